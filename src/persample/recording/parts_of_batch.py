"""The batch that several calls of a recording share: its size, and which parts of it they have.

Parts of one batch: `torch.cat([m(x[:8]), m(x[8:])])`, chunks, accumulated gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample.errors import PerSampleError

# ---- the size ----


_ADVICE = (
    "Pass samples= with a tensor that has one row for each sample (for a watched model: add_samples), or batch_size=; "
    "name tensors that are the same for all samples in constants=."
)


class Readings:
    """Chooses the batch size by the tensors of calls, and refuses calls that disagree about it.

    A part may be called with a tensor that is the same for all samples, such as an index of positions. If nothing but
    calls of parts tells the batch size, it cannot be distinguished from the samples.
    """

    def __init__(self, given: int | None) -> None:
        self._given = given  # by the user
        self._first: tuple[int, Callable[[], str]] | None = None  # what the first call of a part has told

    def choose(self, sizes: Collection[int], batch: int | None, place: Callable[[], str]) -> int | None:
        """The batch size, None if a call shows no samples.

        Args:
            sizes: the sizes that the tensors of the call may have in their batch dimensions.
            batch: the batch size of the recording, None if it is not known.
            place: returns what is called, in words, for errors.

        Raises:
            PerSampleError: two sizes fit.
        """
        known = self._given if batch is None else batch
        if known is not None and known in sizes:
            return known
        several = sorted({*sizes} - {1}) or sorted(sizes)  # a dimension of size 1 is expanded to any other
        if known is not None and (not self._first or not several or several == [1]):
            return None
        if known is not None or len(several) > 1:
            first, first_place = self._first or (several.pop(0), None)
            before = f" as in the first call, of {first_place()}," if first_place is not None else ""
            raise PerSampleError(
                f"The size of the batch is ambiguous in a call of {place()}: {first} samples,{before} or {several[0]} "
                f"samples? {_ADVICE}"
            )
        if several:
            self._first = several[0], place
        return several[0] if several else None


# ---- the parts ----


# Rows of one tensor have the same storage, shape and strides, and start at multiples of one stride.
_Key = tuple[Any, ...]


class RowsInMemory:
    """The number of the sample in each row of the memory of a batch, by which a later part of it is found.

    Two calls with disjoint slices of one tensor get different samples. Calls with tensors in other memory get whole
    batches, whose rows are added up.
    """

    def __init__(self) -> None:
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
