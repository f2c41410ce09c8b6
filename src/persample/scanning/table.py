"""The table of a scan: one row per example."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from persample.scanning.alignment import read_alignment
from persample.scanning.errors import ScanError
from persample.scanning.packing import SKIPPED
from persample.scanning.store import Array, Store
from persample.scanning.suggestions import (
    Opinion,
    choose_checkpoints,
    combine_checkpoints,
    compute_confidence,
    compute_fit,
    describe_last,
    parse_confidence,
    suggest_labels,
)

TableKind = Literal["parquet", "csv"]

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


# Columns that describe an example and what the model says about it. All other columns are measured quantities.
DESCRIPTIONS = (
    "id", "name", "label", "predicted", "probability", "given_probability", "suggested", "suggested_probability",
    "worst_label", "worst_given", "worst_probability", "prediction", "target",
)  # fmt: skip
_OPINION = ("other", "other_probability", "given_probability")  # stored for classifiers


def write_table(store: Store) -> None:
    """Write `table.parquet` or `table.csv`, one shard at a time."""
    shards = _Shards(store)
    kind: TableKind = shards.settings["table"]
    tables = (_make_arrow_table(shards.read(shard), shards.settings) for shard in range(shards.count))
    parts = map(_prepare_for_csv, tables) if kind == "csv" else tables
    first = next(parts)
    with store.writing(store.directory / f"table.{kind}") as file:
        writer: Any = parquet.ParquetWriter if kind == "parquet" else csv.CSVWriter
        with writer(file, first.schema) as table:
            for part in itertools.chain([first], parts):
                table.write_table(part)


def read_table(store: Store) -> pa.Table:
    """The table, from the shards: the file of the table is for other programs, and its texts may be escaped."""
    shards = _Shards(store)
    return pa.concat_tables(_make_arrow_table(shards.read(s), shards.settings) for s in range(shards.count))


def get_column_names(store: Store) -> list[str]:
    """The columns of the table, in order."""
    return _Shards(store).names


def read_column(store: Store, name: str) -> Array:
    """One column, for all examples."""
    shards = _Shards(store)
    return np.concatenate([shards.read_column(shard, name) for shard in range(shards.count)])


def read_opinion(store: Store) -> tuple[Array, Opinion, list[float]] | None:
    """The labels of all examples, what the model says about them, and the share of them that each checkpoint predicts.

    None if the model is no classifier.
    """
    shards = _Shards(store)
    if "suggested" not in shards.names:
        return None
    parts = [shards.read_opinion(shard) for shard in range(shards.count)]
    fields = ("other", "other_probability", "given_probability")
    opinion = Opinion(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))
    return read_column(store, "label"), opinion, shards.fits


def read_skipped(store: Store) -> dict[int, str]:
    """What is wrong with the examples that were not measured, by id."""
    if not store.read_settings().get("skip_bad"):
        return {}
    last = len(store.read_settings()["checkpoints"]) - 1
    found: dict[int, str] = {}
    for shard in range(store.count_shards(last)):
        if SKIPPED in store.list_columns(last, shard):  # not if it was stored before the user chose to skip
            part = store.read_columns(last, shard, ["id", SKIPPED])
            reasons = np.char.decode(part[SKIPPED], "utf-8", "replace").tolist()
            found |= {i: reason for i, reason in zip(part["id"].tolist(), reasons, strict=True) if reason}
    return found


def check_shards(store: Store) -> int:
    """Check that the shards hold consecutive examples, and return the number of examples."""
    shards, count = _Shards(store), 0
    for shard in range(shards.count):
        ids = shards.read_column(shard, "id")
        if ids[0] != count or (count := count + len(ids)) != ids[-1] + 1:
            break
    else:
        if count and shards.settings["examples"] in (None, count):
            return count
    raise ScanError(
        f"The shards in {store.address} do not contain consecutive examples: the data has no examples, or changed "
        "since the scan was started. Start over with resume=False."
    )


class _Shards:
    """The columns of the shards: those of the last checkpoint, or computed from all checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store, self.settings = store, store.read_settings()
        self._checkpoints = range(len(self.settings["checkpoints"]))
        self.count = store.count_shards(self._checkpoints[-1])

    @cached_property
    def names(self) -> list[str]:
        """The columns of the table, in order."""
        stored = self._store.list_columns(self._checkpoints[-1], 0) if self.count else ()
        quantities = self.settings["quantities"]
        is_classifier = set(_OPINION) <= set(stored)
        columns = {
            **{name: name in stored for name in ("id", "name", "label")},
            **dict.fromkeys(("predicted", "probability", "given_probability"), is_classifier),
            **dict.fromkeys(("suggested", "suggested_probability"), is_classifier),
            **{name: name in stored for name in ("worst_label", "worst_given", "worst_probability")},
            **{name: name in stored for name in ("prediction", "target")},
            "loss": "loss" in quantities,
            "norm": "norm" in quantities,
            "mean_loss": "loss" in quantities and len(self._checkpoints) > 1,
            "self_influence": "self_influence" in quantities,
            "el2n": is_classifier,
            "estimated_alignment": "estimated_alignment" in quantities,
            "alignment": "alignment" in quantities,
        }
        names = [name for name, is_present in columns.items() if is_present]
        return [*names, *(f"norm/{group}" for group in self.settings["groups"]), *self.settings.get("extra", ())]

    def read(self, shard: int) -> dict[str, Array]:
        """All columns of a shard."""
        return {name: self.read_column(shard, name) for name in self.names}

    def read_column(self, shard: int, name: str) -> Array:
        """One column of a shard."""
        if name in ("mean_loss", "el2n"):
            parts = self._read_each_checkpoint(shard, [name.removeprefix("mean_")])
            return np.stack([next(iter(part.values())) for part in parts]).mean(axis=0, dtype=np.float64)
        if name == "self_influence":
            squares = (part["norm"].astype(np.float64) ** 2 for part in self._read_each_checkpoint(shard, ["norm"]))
            return sum(rate * part for rate, part in zip(self.settings["learning_rates"], squares, strict=True))
        if name == "estimated_alignment":
            ids = self._read_last(shard, ["id"])["id"]
            return read_alignment(self._store, int(ids[0]), int(ids[-1]) + 1)
        if name == "name":
            return np.char.decode(self._read_last(shard, ["name"])["name"], "utf-8")
        if name in ("predicted", "probability", "given_probability") and "predicted" in self.names:
            part = self._read_last(shard, ["label", *_OPINION])
            return describe_last(part["label"], part)[name]
        if name in ("suggested", "suggested_probability"):
            opinion = self.read_opinion(shard)
            suggested = suggest_labels(opinion, self._confidence)
            return suggested if name == "suggested" else np.where(suggested < 0, np.nan, opinion.other_probability)
        return self._read_last(shard, [name])[name]

    def read_opinion(self, shard: int) -> Opinion:
        """What the model says about the labels of a shard, with the checkpoints that count."""
        checkpoints = choose_checkpoints(self.fits)
        return combine_checkpoints([self._store.read_columns(c, shard, _OPINION) for c in checkpoints])

    @cached_property
    def fits(self) -> list[float]:
        """The share of the given labels that each checkpoint predicts."""
        if self._store.is_complete:
            return self._store.read_json("summary.json")["fits"]
        names = ["given_probability", "other_probability"]
        fits = []
        for checkpoint in self._checkpoints:
            parts = [self._store.read_columns(checkpoint, shard, names) for shard in range(self.count)]
            fits.append(compute_fit({name: np.concatenate([part[name] for part in parts]) for name in names}))
        return fits

    @cached_property
    def _confidence(self) -> dict[int, float]:
        if self._store.is_complete:
            return parse_confidence(self._store.read_json("summary.json").get("confidence"))
        given = [self.read_opinion(shard).given_probability for shard in range(self.count)]
        labels = [self.read_column(shard, "label") for shard in range(self.count)]
        return compute_confidence(np.concatenate(labels), np.concatenate(given))

    def _read_each_checkpoint(self, shard: int, names: Sequence[str]) -> list[dict[str, Array]]:
        return [self._store.read_columns(checkpoint, shard, names) for checkpoint in self._checkpoints]

    def _read_last(self, shard: int, names: Sequence[str]) -> dict[str, Array]:
        return self._store.read_columns(self._checkpoints[-1], shard, names)


def escape_formula(text: str) -> str:
    """A text that spreadsheets do not take for a formula: with an apostrophe in front if needed. Numbers stay.

    >>> [escape_formula(text) for text in ("=1+1", "@sum", "-dash", "-1.5e3", "plain", "")]
    ["'=1+1", "'@sum", "'-dash", '-1.5e3', 'plain', '']
    """
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(text) else text


def make_key(name: str) -> str:
    """A name that no spreadsheet takes for a formula and that `urllib.parse.unquote` turns back into the name.

    >>> [make_key(name) for name in ("=1+1", "cats/1.png", "-dash", "100%")]
    ['%3D1+1', 'cats/1.png', '%2Ddash', '100%25']
    """
    key = name.replace("%", "%25")
    return key if escape_formula(key) == key else f"%{ord(key[0]):02X}{key[1:]}"


def _prepare_for_csv(table: pa.Table) -> pa.Table:
    """The table with vectors as texts, without texts that are formulas, and with a key for each name."""
    if "name" in table.column_names:
        keys = pa.array([make_key(name) for name in table["name"].to_pylist()], pa.string())
        table = table.add_column(table.column_names.index("name"), "key", keys)
    for i, field in enumerate(table.schema):
        if pa.types.is_list(field.type):
            texts = [json.dumps(value) for value in table[i].to_pylist()]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
        if pa.types.is_string(field.type):
            table = table.set_column(
                i, field, pa.array([text and escape_formula(text) for text in table[i].to_pylist()], field.type)
            )
    return table


def _make_arrow_table(columns: dict[str, Array], settings: dict[str, Any]) -> pa.Table:
    """Add the names of classes after the columns that hold their numbers."""
    arrow = {name: pa.array(column if column.ndim == 1 else list(column)) for name, column in columns.items()}
    for name in ("suggested", "suggested_probability"):
        if name in arrow:
            arrow[name] = pa.array(columns[name], mask=columns["suggested"] < 0)
    names = settings["classes"]
    if names:
        for name, title in _CLASS_COLUMNS.items():
            if name in columns:
                arrow[title] = pa.array([get_class_name(names, label) for label in columns[name].tolist()], pa.string())
    return pa.table(arrow)


_CLASS_COLUMNS = {"label": "class", "predicted": "predicted_class", "suggested": "suggested_class"}


def get_class_name(names: Sequence[str] | None, label: int) -> str | None:
    """The name of a class, or its number as a text; None for no class.

    >>> get_class_name(["cat", "dog"], 1), get_class_name(None, 7), get_class_name(["cat"], -1)
    ('dog', '7', None)
    """
    if label < 0:
        return None
    return str(names[label]) if names and label < len(names) else str(label)
