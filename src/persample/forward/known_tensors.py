"""What is known of tensors, by the tensors themselves rather than by their values."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class TensorMap(Generic[V]):
    """A dict of tensors that keeps none of them alive.

    It is asked several times for each op of a forward pass, so it is a plain dict of ids: an id that has gone to
    another tensor is noticed by the weak reference beside it.

    >>> import torch
    >>> a, names = torch.ones(2), TensorMap()
    >>> names[a] = "a"
    >>> names.get(a), names.get(torch.ones(2))
    ('a', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], V]] = {}

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        self._entries[id(tensor)] = (ref(tensor), value)

    def get(self, tensor: Tensor) -> V | None:
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor
