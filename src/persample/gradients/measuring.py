"""The squared norms of the terms of many parameters: norms are computed in groups, their arithmetic in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.dtypes import widen
from persample.gradients.squared_norms import SquaredNorms
from persample.gradients.stack import Stack
from persample.terms import Dense, Outer, Patches, Term, add_lost_squares, compute_row_norms

# Terms of these classes whose norms are products of norms of factors.
_PLAIN = {Dense, Outer}


def measure_stacks(stacks: Iterable[Stack], squares: SquaredNorms, compact: bool = False, summed: bool = True) -> None:
    """Add the squared norms of some stacks to `squares`; the arguments are those of `Stack.measure`."""
    groups: dict[Any, list[tuple[Stack, Sequence[Tensor]]]] = {}
    for stack in stacks:
        if compact:
            compact_stack(stack)
        factors = _find_norm_factors(stack.term)
        if factors:
            key = len(factors), factors[-1].device, *(factor.dtype for factor in factors)
            groups.setdefault(key, []).append((stack, factors))
        else:
            squares.add(stack.names, *stack.measure(compact, summed))
    norms = _Norms()
    sides = [
        [norms.add(side) for side in zip(*(factors for _, factors in group), strict=True)] for group in groups.values()
    ]
    for group, numbers in zip(groups.values(), sides, strict=True):
        names = [name for stack, _ in group for name in stack.names]
        found, *others = map(norms.get_squares, numbers)
        for other in others:
            length = max(max(stack.term.shape) for stack, _ in group)
            found = add_lost_squares(found * other, found, other, length)
        squares.add(names, found.view(len(names), -1), None, can_be_negative=False)


def compact_stack(stack: Stack) -> None:
    """Keep the dense form of a term if its norms need it and it is smaller."""
    if type(stack.term) in (Outer, Patches):  # others find out in `measure`
        stack.replace_term(stack.term.compact())


def _find_norm_factors(term: Term) -> Sequence[Tensor]:
    """Tensors `(batch, ...)`: the norm of a row is the product of the norms of their rows. Empty if there are none."""
    if type(term) is Dense:
        return (term.values,)
    return (term.input, term.grad) if type(term) is Outer and term.positions == 1 else ()


class _Norms:
    """The norms of the rows of tensors. Tensors in the same memory share them, as those of a bias and its weight."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # by place in memory
        self._norms: list[Tensor] = []  # each `(batch,)`
        self._squares: Sequence[Tensor] = ()
        self._all = torch.empty(0)

    def add(self, tensors: Iterable[Tensor]) -> list[int]:
        """Compute the norms of the rows of some tensors; returns the number of each."""
        return [self._add(tensor) for tensor in tensors]

    def _add(self, tensor: Tensor) -> int:
        place = (
            _torch.find_storage_id(tensor) or id(tensor),
            tensor.storage_offset(),
            tensor.dtype,
            *[(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1],
        )
        if place not in self._numbers:
            self._numbers[place] = len(self._norms)
            self._norms.append(compute_row_norms(widen(tensor)))
        return self._numbers[place]

    def get_squares(self, numbers: Sequence[int]) -> Tensor:
        """The squared norms of some tensors, one after the other; after all were added."""
        norms, sizes = self._norms, [len(norms) for norms in self._norms]
        if len({(own.dtype, own.device) for own in norms}) > 1:
            return torch.cat([norms[i] for i in numbers]).square()
        if not self._squares:
            self._all = (torch.cat(norms) if len(norms) > 1 else norms[0]).square()
            self._squares = self._all.split(sizes)
        first, count = numbers[0], len(numbers)
        if list(numbers) == list(range(first, first + count)):
            return self._all.narrow(0, sum(sizes[:first]), sum(sizes[first : first + count]))
        return torch.cat([self._squares[i] for i in numbers])
