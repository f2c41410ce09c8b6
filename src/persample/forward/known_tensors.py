"""Weak map from tensors, by identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class TensorMap(Generic[V]):
    """A dict with tensors as keys, by identity; it keeps no tensor alive.

    It is read several times for each op of a forward pass, so it is a plain dict of ids. The weak reference beside each
    value shows whether an id now belongs to another tensor.

    >>> import torch
    >>> a, names = torch.ones(2), TensorMap()
    >>> names[a] = "a"
    >>> names.get(a), names.get(torch.ones(2))
    ('a', None)
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[ref[Tensor], V]] = {}

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        self.entries[id(tensor)] = (ref(tensor), value)

    def get(self, tensor: Tensor) -> V | None:
        entry = self.entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __bool__(self) -> bool:
        return bool(self.entries)

    def items(self) -> Iterator[tuple[Tensor, V]]:
        """The tensors that still exist, and their values."""
        for reference, value in list(self.entries.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, value

    def __contains__(self, tensor: Tensor) -> bool:
        entry = self.entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor
