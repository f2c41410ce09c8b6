"""The columns of a scan as one table, example by example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from persample.scanning.store import Array, Store

TableKind = Literal["parquet", "csv"]


def write_table(store: Store) -> None:
    """Writes `table.parquet` or `table.csv`, a shard at a time."""
    settings = store.settings()
    kind: TableKind = settings["table"]
    first = _as_arrow(next(table_shards(store)), settings)
    with store.whole_file(store.directory / f"table.{kind}") as file:
        writer: Any = parquet.ParquetWriter if kind == "parquet" else csv.CSVWriter
        with writer(file, first.schema) as table:
            for columns in table_shards(store):
                table.write_table(_as_arrow(columns, settings))


def read_table(store: Store) -> pa.Table:
    """The table, as `write_table` left it."""
    kind = store.settings()["table"]
    path = store.directory / f"table.{kind}"
    return parquet.read_table(path) if kind == "parquet" else csv.read_csv(path)


def table_shards(store: Store) -> Iterator[dict[str, Array]]:
    """The columns of the table, shard by shard: of the last checkpoint, but for what is summed over all."""
    settings = store.settings()
    last = len(settings["checkpoints"]) - 1
    wanted = settings["quantities"]
    for shard in range(store.shards(last)):
        each = [store.columns(checkpoint, shard) for checkpoint in range(last + 1)]
        columns = each[-1]
        found: dict[str, Array] = {name: columns[name] for name in ("id", "label") if name in columns}
        found |= {name: columns[name] for name in ("loss", "norm") if name in wanted}
        if "loss" in wanted and last:
            found["mean_loss"] = np.stack([part["loss"] for part in each]).mean(axis=0, dtype=np.float64)
        if "self_influence" in wanted:
            rates = settings["learning_rates"]
            squares = [rate * part["norm"].astype(np.float64) ** 2 for rate, part in zip(rates, each, strict=True)]
            found["self_influence"] = np.sum(squares, axis=0)
        if "alignment" in wanted:
            found["alignment"] = columns["alignment"]
        yield found | {name: part for name, part in columns.items() if name.startswith("norm/")}


def _as_arrow(columns: dict[str, Array], settings: dict[str, Any]) -> pa.Table:
    arrow = {name: pa.array(column) for name, column in columns.items()}
    names = settings["classes"]
    if names and "label" in columns:
        called = [names[label] if 0 <= label < len(names) else str(label) for label in columns["label"].tolist()]
        arrow = {**arrow, "class": pa.array(called)}
    return pa.table(arrow)
