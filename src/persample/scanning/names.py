"""Names of examples: the user's ids, or the paths of the files that they come from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset

from persample._internal.text import describe_value
from persample.scanning.errors import ScanError
from persample.scanning.screening import Unreadable
from persample.scanning.store import Array

Ids = Sequence[Any] | str


class Names:
    """The names of the examples of a dataset.

    `ids` has one name per example, or is the key of the name in each example. Without it, names are those that the
    dataset knows: its attribute `names`, or the files of a dataset of torchvision, relative to its `root`.
    """

    def __init__(self, data: Any, ids: Ids | None, size: int | None, read: Callable[[Iterable[int]], Any]) -> None:
        self._key = ids if isinstance(ids, str) else None
        self._read = read
        found = _read_column(data, ids) if isinstance(ids, str) else ids
        self._names = None if found is None else _make_texts(found)
        if ids is None:
            self._names = find_names(data)
        if self._names is not None and size is not None and len(self._names) != size:
            raise ScanError(f"The data has {size} examples, but ids has {len(self._names)} entries.")
        if self._key is not None and self._names is None and size is None:
            raise ScanError("For a stream, ids must be a sequence of names, not the key of the name in an example.")

    @property
    def exist(self) -> bool:
        """Whether the examples have names."""
        return self._names is not None or self._key is not None

    def compute_digest(self) -> str | None:
        """A digest of all names, or the key of the name in each example; None without names."""
        if self._names is None:
            return self._key
        return hashlib.sha256("\0".join(self._names).encode("utf-8", "replace")).hexdigest()[:16]

    def get(self, i: int) -> str | None:
        """The name of an example for a message; None if it is not known without reading the example."""
        return self._names[i] if self._names is not None and i < len(self._names) else None

    def encode(self, ids: range) -> Array:
        """The names of some examples in UTF-8, as an array of bytes."""
        if self._names is not None:
            if ids.stop > len(self._names):
                raise ScanError(f"ids has {len(self._names)} entries, but the data has more examples.")
            names = self._names[ids.start : ids.stop]
        else:
            names = [_get_name(example, self._key) for example in self._read(ids).values()]
        return np.array([name.encode("utf-8", "replace") for name in names])


def find_names(data: Any) -> list[str] | None:
    """The names that a dataset knows; None if it has none."""
    if isinstance(data, Subset):
        names = find_names(data.dataset)
        return None if names is None else [names[i] for i in data.indices]
    names = getattr(data, "names", None)
    if isinstance(names, (list, tuple)) and _has_length(data, names) and all(isinstance(name, str) for name in names):
        return list(names)
    files = getattr(data, "samples", None)  # torchvision's folders: pairs of path and class
    if isinstance(files, (list, tuple)) and files and _has_length(data, files) and all(map(_is_file_and_class, files)):
        root = getattr(data, "root", None)
        return [os.path.relpath(path, root) if root else str(path) for path, _ in files]
    return None


def find_classes(data: Any) -> list[str] | None:
    """The names of the classes: of torchvision's `classes`, or of a label column of Hugging Face's `features`."""
    if isinstance(data, Subset):
        return find_classes(data.dataset)
    names: Any = getattr(data, "classes", None)
    features = getattr(data, "features", None)
    if names is None and isinstance(features, Mapping):
        names = next((getattr(features[key], "names", None) for key in ("label", "labels") if key in features), None)
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else None


def _has_length(data: Any, names: Sequence[Any]) -> bool:
    return hasattr(data, "__len__") and len(data) == len(names)


def _is_file_and_class(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], (str, os.PathLike))


def _read_column(data: Any, key: str) -> Any:
    """A column of a dict of tensors or of a dataset of Hugging Face; None if the data has no columns."""
    names = list(data) if isinstance(data, Mapping) else getattr(data, "column_names", None)
    if not isinstance(names, list):
        return None
    if key not in names:
        raise ScanError(f"The data has no column {key!r} for ids. It has {', '.join(map(str, names))}.")
    return data[key]


def _make_texts(names: Any) -> list[str]:
    names = names.tolist() if hasattr(names, "tolist") else list(names)
    if any(isinstance(name, (list, tuple, dict)) for name in names[:1]):
        raise ScanError(f"ids must have one name per example, got {describe_value(names[0])} as the first.")
    return [str(name) for name in names]


def _get_name(example: Any, key: Any) -> str:
    if isinstance(example, Unreadable):
        return ""
    if not isinstance(example, Mapping) or key not in example:
        raise ScanError(f"ids={key!r} is not a key of each example: one is {describe_value(example)}.")
    return str(example[key])
