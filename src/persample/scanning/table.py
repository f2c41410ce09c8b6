"""The table of a scan: one row per example."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from persample.scanning.alignment import read_alignment
from persample.scanning.errors import ScanError
from persample.scanning.store import Array, Store, write_file

TableKind = Literal["parquet", "csv"]

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def write_table(store: Store) -> None:
    """Write `table.parquet` or `table.csv`, one shard at a time."""
    settings = store.read_settings()
    kind: TableKind = settings["table"]
    parts = (_make_arrow_table(columns, settings) for columns in _iterate_shards(store))
    first = next(parts)
    with write_file(store.directory / f"table.{kind}", store.directory) as file:
        writer: Any = parquet.ParquetWriter if kind == "parquet" else csv.CSVWriter
        with writer(file, first.schema) as table:
            for part in itertools.chain([first], parts):
                table.write_table(_escape_formulas(part) if kind == "csv" else part)


def read_table(store: Store) -> pa.Table:
    """The table, from the shards: the file of the table is for other programs, and its texts may be escaped."""
    settings = store.read_settings()
    return pa.concat_tables(_make_arrow_table(columns, settings) for columns in _iterate_shards(store))


def get_column_names(store: Store) -> list[str]:
    """The columns of the table, in order."""
    settings = store.read_settings()
    quantities, has_several_checkpoints = settings["quantities"], len(settings["checkpoints"]) > 1
    columns = {
        "id": True,
        "label": settings["labelled"],
        "loss": "loss" in quantities,
        "norm": "norm" in quantities,
        "mean_loss": "loss" in quantities and has_several_checkpoints,
        "self_influence": "self_influence" in quantities,
        "estimated_alignment": "estimated_alignment" in quantities,
        "alignment": "alignment" in quantities,
    }
    names = [name for name, is_present in columns.items() if is_present]
    return [*names, *(f"norm/{group}" for group in settings["groups"])]


def read_column(store: Store, name: str) -> Array:
    """One column, for all examples."""
    settings = store.read_settings()
    return np.concatenate([_read_part(store, settings, shard, name) for shard in range(_count_shards(store, settings))])


def check_shards(store: Store) -> int:
    """Check that the shards hold consecutive examples, and return the number of examples."""
    settings, count = store.read_settings(), 0
    for shard in range(_count_shards(store, settings)):
        ids = _read_part(store, settings, shard, "id")
        if ids[0] != count or (count := count + len(ids)) != ids[-1] + 1:
            break
    else:
        if count and settings["examples"] in (None, count):
            return count
    raise ScanError(
        f"The shards in {store.directory} do not contain consecutive examples: the data has no examples, or changed "
        "since the scan was started. Start over with resume=False."
    )


def _iterate_shards(store: Store) -> Iterator[dict[str, Array]]:
    settings, names = store.read_settings(), get_column_names(store)
    for shard in range(_count_shards(store, settings)):
        yield {name: _read_part(store, settings, shard, name) for name in names}


def _count_shards(store: Store, settings: dict[str, Any]) -> int:
    return store.count_shards(len(settings["checkpoints"]) - 1)


def _read_part(store: Store, settings: dict[str, Any], shard: int, name: str) -> Array:
    """One column of a shard: that of the last checkpoint, or computed from all checkpoints."""
    checkpoints = range(len(settings["checkpoints"]))
    if name == "mean_loss":
        losses = [store.read_columns(c, shard, ["loss"])["loss"] for c in checkpoints]
        return np.stack(losses).mean(axis=0, dtype=np.float64)
    if name == "self_influence":
        squares = (store.read_columns(c, shard, ["norm"])["norm"].astype(np.float64) ** 2 for c in checkpoints)
        return sum(rate * part for rate, part in zip(settings["learning_rates"], squares, strict=True))
    if name == "estimated_alignment":
        ids = store.read_columns(checkpoints[-1], shard, ["id"])["id"]
        return read_alignment(store, int(ids[0]), int(ids[-1]) + 1)
    return store.read_columns(checkpoints[-1], shard, [name])[name]


def escape_formula(text: str) -> str:
    """A text that spreadsheets do not take for a formula: with an apostrophe in front if needed. Numbers stay.

    >>> [escape_formula(text) for text in ("=1+1", "@sum", "-dash", "-1.5e3", "plain", "")]
    ["'=1+1", "'@sum", "'-dash", '-1.5e3', 'plain', '']
    """
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(text) else text


def _escape_formulas(table: pa.Table) -> pa.Table:
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(i, field, pa.array([escape_formula(text) for text in table[i].to_pylist()]))
    return table


def _make_arrow_table(columns: dict[str, Array], settings: dict[str, Any]) -> pa.Table:
    arrow = {name: pa.array(column) for name, column in columns.items()}
    names = settings["classes"]
    if names and "label" in columns:
        labels = columns["label"].tolist()
        arrow["class"] = pa.array([names[label] if 0 <= label < len(names) else str(label) for label in labels])
    return pa.table(arrow)
