"""Copies of memory that code outside of a recording can change without torch noticing.

Answers are computed from the factors of terms, long after the backward pass. torch counts the writes to a tensor, so
that a changed activation is noticed. It does not count writes through `x.data`, nor writes of numpy or another library
to memory that they share with a tensor. So factors in the memory of a tensor from outside are copied when they arrive:
usually the input of the first layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample.terms import Term, find_factors, map_factors


class OutsideMemory:
    """The memory of tensors from outside, and the copies that a backward pass has made of parts of it."""

    def __init__(self) -> None:
        # Ids of freed memory may remain: that can cause a copy without need, and nothing else.
        self._ids: set[int] = set()
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}  # by place in memory: a factor, kept alive, and its copy

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor as outside."""
        storage_id = _torch.find_storage_id(tensor)
        if storage_id is not None:
            self._ids.add(storage_id)

    def copy_factors(self, term: Term) -> Term:
        """The same term, with copies of its factors that lie in outside memory."""
        return map_factors(term, self._copy) if any(map(self._contains, find_factors(term))) else term

    def forget_copies(self) -> None:
        """End a backward pass: from now on the memory may have other values."""
        self._copies.clear()

    def _contains(self, tensor: Tensor) -> bool:
        return _torch.find_storage_id(tensor) in self._ids or _torch.is_foreign_memory(tensor)

    def _copy(self, tensor: Tensor) -> Tensor:
        if not self._contains(tensor):
            return tensor
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if place not in self._copies:
            self._copies[place] = (tensor, _copy_memory(tensor))
        return self._copies[place][1]


def _copy_memory(tensor: Tensor) -> Tensor:
    """A copy that needs no more memory than the tensor: entries that an expanded tensor repeats are copied once."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not 0 < length < tensor.numel():
        return tensor.clone()
    memory = torch.as_strided(tensor, (length,), (1,)).clone()
    return torch.as_strided(memory, tensor.shape, tensor.stride(), 0)
