"""The columns of a scan as one table, example by example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from persample.scanning.errors import ScanError
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


def column_names(store: Store) -> list[str]:
    """The columns of the table, in their order."""
    settings = store.settings()
    wanted, several = settings["quantities"], len(settings["checkpoints"]) > 1
    found = {
        "id": True,
        "label": settings["labelled"],
        "loss": "loss" in wanted,
        "norm": "norm" in wanted,
        "mean_loss": "loss" in wanted and several,
        "self_influence": "self_influence" in wanted,
        "alignment": "alignment" in wanted,
    }
    return [*(name for name, there in found.items() if there), *(f"norm/{group}" for group in settings["groups"])]


def column_of(store: Store, name: str) -> Array:
    """A column of the table, of all examples."""
    settings = store.settings()
    return np.concatenate([_part(store, settings, shard, name) for shard in range(_shards(store, settings))])


def table_shards(store: Store) -> Iterator[dict[str, Array]]:
    """The columns of the table, shard by shard."""
    settings, names = store.settings(), column_names(store)
    for shard in range(_shards(store, settings)):
        yield {name: _part(store, settings, shard, name) for name in names}


def check_whole(store: Store) -> int:
    """Refuses shards that do not fit together, as those of data that have grown; gives the number of examples."""
    settings, count = store.settings(), 0
    for shard in range(_shards(store, settings)):
        ids = _part(store, settings, shard, "id")
        if ids[0] != count or (count := count + len(ids)) != ids[-1] + 1:
            break
    else:
        if count and settings["examples"] in (None, count):
            return count
    raise ScanError(
        f"The shards in {store.directory} do not follow each other: the data have no examples, or have changed since "
        "they were first scanned. Start over with resume=False."
    )


def _shards(store: Store, settings: dict[str, Any]) -> int:
    return store.shards(len(settings["checkpoints"]) - 1)


def _part(store: Store, settings: dict[str, Any], shard: int, name: str) -> Array:
    """A column of a shard: of the last checkpoint, but for what is summed over all."""
    every = range(len(settings["checkpoints"]))
    if name == "mean_loss":
        return np.stack([store.columns(c, shard, ["loss"])["loss"] for c in every]).mean(axis=0, dtype=np.float64)
    if name == "self_influence":
        squares = (store.columns(c, shard, ["norm"])["norm"].astype(np.float64) ** 2 for c in every)
        return sum(rate * part for rate, part in zip(settings["learning_rates"], squares, strict=True))
    return store.columns(every[-1], shard, [name])[name]


def _as_arrow(columns: dict[str, Array], settings: dict[str, Any]) -> pa.Table:
    arrow = {name: pa.array(column) for name, column in columns.items()}
    names = settings["classes"]
    if names and "label" in columns:
        called = [names[label] if 0 <= label < len(names) else str(label) for label in columns["label"].tolist()]
        arrow = {**arrow, "class": pa.array(called)}
    return pa.table(arrow)
