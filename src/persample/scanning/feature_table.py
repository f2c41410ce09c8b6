"""A table of numbers, categories and dates as a dataset of features, by a pipeline of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute
from torch import Tensor
from torch.utils.data import Dataset

from persample.scanning.datasets import read_table
from persample.scanning.errors import ScanError
from persample.scanning.labels import read_labels
from persample.scanning.store import Array

PIPELINE_FILE = "pipeline.joblib"
_MAX_CLASSES = 20  # of a target of integers; with more it is a number
_MAX_CATEGORIES = 50  # of a column; rarer ones are one
_DATE_PARTS = ("year", "month", "day_of_week", "hour")


class FeatureTable(Dataset[tuple[Tensor, Any]]):
    """The rows of a table as pairs of features and target.

    `data` is a CSV, Parquet or JSONL file, a data frame of pandas or polars, or a `pyarrow.Table`. `target` is the
    column to predict: names, booleans or up to 20 integers are classes, other numbers are targets of a regression. All
    other columns are features. Numbers are standardised, their missing values replaced by the median and marked;
    categories become one feature each, with one for missing values; dates become year, month, weekday and hour.

    The `pipeline` is one of scikit-learn that takes the columns as `make_columns` gives them. It is fitted to this
    table unless given: pass the one of the training, from `joblib.load`. `feature_names` names its features.

    >>> table = pa.table({"size": [1.0, None, 3.0], "colour": ["red", "blue", "red"], "y": ["a", "b", "a"]})
    >>> data = FeatureTable(table, target="y")
    >>> data.feature_names, data.classes, data[0][0].shape
    (['size', 'size is missing', 'colour=blue', 'colour=red'], ['a', 'b'], torch.Size([4]))
    """

    def __init__(
        self,
        data: Any,
        target: str,
        ids: str | None = None,
        classes: Sequence[str] | None = None,
        pipeline: Any = None,
    ) -> None:
        table, where = read_table(data, target)[0], str(data) if isinstance(data, (str, Path)) else "the table"
        for name in (target, *([ids] if ids else [])):
            if name not in table.column_names:
                raise ScanError(f"{where} has no column '{name}'. It has {', '.join(table.column_names)}.")
        names = ids or ("id" if "id" in table.column_names else None)
        self.names = None if names is None else [str(name) for name in table[names].to_pylist()]
        self._targets, self.classes = _read_targets(table[target], classes, f"The column '{target}' of {where}")
        kept = [name for name in table.column_names if name not in (target, names)]
        columns, kinds = make_columns(table.select(kept))
        if not columns:
            raise ScanError(f"{where} has no columns of numbers, categories or dates beside '{target}'.")
        self.left_out = sorted(set(kept) - {name.partition(" ")[0] for name in columns} - set(columns))
        self.pipeline = _fit(columns, kinds) if pipeline is None else pipeline
        rows = np.asarray(self.pipeline.transform(_stack(columns)), dtype=np.float32)
        self.rows, self.feature_names = torch.from_numpy(rows), _name_features(self.pipeline, list(columns))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        return self.rows[i], self._targets[i]

    def save_pipeline(self, path: str | Path) -> None:
        """Write the pipeline; `joblib.load` reads it. Only load files that you trust."""
        import joblib

        joblib.dump(self.pipeline, path)


def make_columns(table: pa.Table) -> tuple[dict[str, Array], dict[str, str]]:
    """The columns of features, and the kind of each, "number" or "category". Nested columns are left out."""
    columns: dict[str, Array] = {}
    kinds: dict[str, str] = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if pa.types.is_temporal(kind) and not pa.types.is_time(kind) and not pa.types.is_duration(kind):
            parts = _DATE_PARTS[:3] if pa.types.is_date(kind) else _DATE_PARTS
            columns |= {f"{name} {part}": _to_floats(getattr(compute, part)(column)) for part in parts}
            kinds |= {f"{name} {part}": "number" for part in parts}
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            columns[name], kinds[name] = _to_floats(column), "number"
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind):
            texts = ["" if value is None else str(value) for value in column.to_pylist()]
            columns[name], kinds[name] = np.array(texts, dtype=object), "category"
    return columns, kinds


def _to_floats(column: Any) -> Array:
    return np.array([np.nan if value is None else float(value) for value in column.to_pylist()])


def _stack(columns: dict[str, Array]) -> Array:
    return np.stack([column.astype(object) for column in columns.values()], axis=1)


def _fit(columns: dict[str, Array], kinds: dict[str, str]) -> Any:
    try:
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler
    except ImportError as error:
        raise ScanError("Tables need scikit-learn: pip install scikit-learn") from error
    places = {kind: [i for i, name in enumerate(columns) if kinds[name] == kind] for kind in ("number", "category")}
    imputer = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_MAX_CATEGORIES, sparse_output=False)
    steps = [
        ("number", make_pipeline(imputer, StandardScaler()), places["number"]),
        ("category", encoder, places["category"]),
    ]
    return ColumnTransformer([step for step in steps if step[2]], sparse_threshold=0).fit(_stack(columns))


def _name_features(pipeline: Any, columns: list[str]) -> list[str]:
    """The features in words; those of a pipeline that cannot name them are numbered."""
    try:
        found = [name.partition("__")[2] for name in pipeline.get_feature_names_out(columns).tolist()]
    except (AttributeError, ValueError):
        return []
    return [_name_feature(name, columns) for name in found]


def _name_feature(name: str, columns: list[str]) -> str:
    if name.startswith("missingindicator_"):
        return f"{name.removeprefix('missingindicator_')} is missing"
    column = max((one for one in columns if name.startswith(f"{one}_")), key=len, default=None)
    return name if column is None or name in columns else f"{column}={name[len(column) + 1 :]}"


def _read_targets(column: Any, classes: Sequence[str] | None, where: str) -> tuple[Any, list[str] | None]:
    """Numbers of classes, or a column of numbers `(rows, 1)`, and the names of the classes if they have any."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    values = column.to_pylist()
    is_whole = pa.types.is_integer(column.type) and len(set(values)) <= _MAX_CLASSES
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_boolean(column.type):
        values = [None if value is None else str(value) for value in values]
        return read_labels(values, classes, where)
    if is_whole and min((value for value in values if value is not None), default=0) >= 0:
        return read_labels(values, classes, where)
    if missing := column.null_count:
        raise ScanError(f"{where} is empty in {missing:,} rows. Fill in or remove these rows.")
    return torch.tensor([float(value) for value in values])[:, None], None
