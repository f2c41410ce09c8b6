"""Which sample each row of the memory of a batch is, for calls that get parts of a batch, or other batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample.errors import PerSampleError

# Rows of one tensor have the same storage, shape and strides, and start at multiples of one stride.
_Key = tuple[Any, ...]


class RowsInMemory:
    """The number of the sample in each row of the memory of a batch, by which a later part of it is found.

    Two calls with disjoint slices of one tensor get different samples. Calls with tensors in other memory get whole
    batches, whose rows are added up, unless they are known to be other batches.

    Attributes:
        called: the ids of the modules that were called with samples.
        newest: the samples of the last batch, if there are several.
    """

    def __init__(self) -> None:
        self.called: set[int] = set()
        self.newest: list[int] | None = None
        self._numbers: dict[_Key, dict[int, int]] = {}
        self._tensors: list[Tensor] = []  # keeps the memory: another tensor must not get it

    def add(self, tensors: Iterable[tuple[Tensor, int]], numbers: Sequence[int]) -> None:
        """Note the sample of each index of some tensors along their batch dimensions."""
        for tensor, dim in tensors:
            found = _find_rows(tensor, dim)
            if found is not None:
                key, rows = found
                self._numbers.setdefault(key, {}).update(zip(rows, numbers, strict=True))
                self._tensors.append(tensor.detach())

    def find(self, tensors: Iterable[tuple[Tensor, int]]) -> list[int] | None:
        """The sample of each row of a call with these tensors, with the next numbers for new ones.

        None if the tensors are in other memory than those of earlier calls.
        """
        answers: list[list[int]] = []
        for tensor, dim in tensors:
            found = _find_rows(tensor, dim)
            if found is not None and found[0] in self._numbers:
                answers.append(self._number(*found))
        if not answers:
            return None
        if any(answer != answers[0] for answer in answers):
            raise PerSampleError(
                "Two arguments of the model are parts of tensors from earlier calls, but of different rows. Pass "
                "samples= with the tensors that have one row for each sample."
            )
        return answers[0]

    def _number(self, key: _Key, rows: Sequence[int]) -> list[int]:
        known = self._numbers[key]
        following = 1 + max(number for numbers in self._numbers.values() for number in numbers.values())
        numbers = []
        for row in rows:
            if row not in known:
                following += 1
            numbers.append(known.get(row, following - 1))
        return numbers


def _find_rows(tensor: Tensor, dim: int) -> tuple[_Key, range] | None:
    """The memory of a tensor and the numbers of its rows there; None if the rows have no memory of their own."""
    storage = None if tensor.layout is not torch.strided or not tensor.numel() else _torch.find_storage(tensor)
    if storage is None or not tensor.stride(dim):
        return None
    stride = tensor.stride(dim)
    shape, strides = list(tensor.shape), list(tensor.stride())
    del shape[dim], strides[dim]
    first, place = int(tensor.storage_offset()), []
    outer = [other for d, other in enumerate(strides) if other > stride or (other == stride and d < dim)]
    for other in sorted(outer, reverse=True):  # slices along other dimensions have the same rows
        index, first = divmod(first, other)
        place.append(index)
    first, rest = divmod(first, stride)
    key = _torch.get_storage_key(storage), tensor.dtype, dim, stride, *place, rest, tuple(shape), tuple(strides)
    return key, range(first, first + tensor.shape[dim])
