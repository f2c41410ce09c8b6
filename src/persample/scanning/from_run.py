"""A scan of what was measured in a training run, without a pass over the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from persample._version import __version__
from persample.scanning.errors import ScanError
from persample.scanning.results import Scan
from persample.scanning.store import Array, Store
from persample.scanning.summary import summarise
from persample.scanning.table import write_table

_DTYPES = {"label": np.int64, "other": np.int32}
# The columns that every scan of a classifier has; all others are measured quantities of this run.
_USUAL = ("label", "loss", "given_probability", "other", "other_probability", "norm")


def write_columns(
    directory: str | Path,
    columns: Mapping[str, Array],
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Scan:
    """Write columns with one number for each example as a scan of one shard without projected gradients.

    Args:
        directory: an empty or a new directory.
        columns: by name; label, loss, given_probability, other, other_probability and norm are required.
        names: the names of the examples.
        classes: the names of the classes.
    """
    if missing := [name for name in _USUAL if name not in columns]:
        raise ScanError(f"The run has no column '{missing[0]}'.")
    count = len(columns["norm"])
    if not count:
        raise ScanError("The run has seen no example.")
    store = Store(directory)
    settings = {
        "examples": count,
        "data": sha256(np.ascontiguousarray(columns["label"]).tobytes()).hexdigest()[:16],  # what is known of them
        "project": None,
        "quantities": ["loss", "norm"],
        "extra": [name for name in columns if name not in _USUAL],
        "groups": {},
        "parameters": {},
        "loss": "CrossEntropyLoss",
        "loss_reduction": None,
        "labelled": True,
        "checkpoints": ["run"],
        "learning_rates": [1.0],
        "classes": None if classes is None else list(classes),
        "table": "parquet",
        "about": {"persample": __version__, "torch": torch.__version__},
    }
    store.start(settings, resume=False)
    arrays = {name: np.asarray(column).astype(_DTYPES.get(name, np.float64)) for name, column in columns.items()}
    residual = (1 - arrays["given_probability"]) ** 2 + arrays["other_probability"] ** 2
    arrays |= {"id": np.arange(count), "el2n": np.sqrt(residual)}
    if names is not None:
        arrays["name"] = np.char.encode(np.array(list(names), dtype=str), "utf-8")
    store.write_shard(0, 0, arrays, None)
    write_table(store)
    store.write_json("summary.json", summarise(store))
    return Scan(directory)
