"""Rows for each position of a sequence: a use that treats positions alike is computed as if each were a sample.

The part of position t is what the gradient of the use's result at t contributes. These parts add up to the gradient of
the sample, because a term is linear in the gradient of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from persample._internal.tree import put_in_tensors
from persample.layouts import Call, Layout, find_declared_motion
from persample.terms import Slices, Term

if TYPE_CHECKING:
    from persample.backward.recorded_use import Plan

# Computes the terms of a rule from the gradient and the tensors of the arguments, with the samples in front.
ApplyRule = Callable[[Tensor, Sequence[Tensor]], dict[int, Term]]


@dataclass(frozen=True)
class _Place:
    """The dimension of the positions in a sample of the activation, and in a sample of the result."""

    input: int
    result: int
    weights: dict[int, int]  # by their positions: the dimension of weights that have a part for each position


class PositionSplitter:
    """Splits the terms of uses into parts for each of `count` positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def compute_terms(
        self, plan: Plan, tensors: Sequence[Tensor], grad: Tensor, apply_rule: ApplyRule
    ) -> dict[int, Term] | None:
        """Terms with a row for each sample and position, the positions of a sample side by side.

        None if the use has no such positions: it has no dimension of that size along which it works position by
        position, or more than one.

        Args:
            plan: the plan of the use.
            tensors: the tensors of its arguments; those that depend on the batch have the samples in front.
            grad: the gradient of the result, with the samples in front.
            apply_rule: computes the terms.
        """
        batched = [i for i, layout in enumerate(plan.layouts) if layout is not None]
        if len(batched) != 1:
            return None
        (position,) = batched
        if self.count == 1:
            return apply_rule(grad, tensors)
        places = [
            place
            for dim, size in enumerate(tensors[position].shape[1:])
            if size == self.count and (place := self._find_place(plan, tensors, position, dim, grad)) is not None
        ]
        if len(places) != 1:
            return None
        (place,) = places
        if place.weights:
            terms = apply_rule(grad, tensors)
            return {i: self._split_weight(terms[i], dim) for i, dim in place.weights.items()}
        moved = list(tensors)
        moved[position] = _move_to_batch(tensors[position], place.input)
        return apply_rule(_move_to_batch(grad, place.result), moved)

    def _find_place(
        self, plan: Plan, tensors: Sequence[Tensor], position: int, dim: int, grad: Tensor
    ) -> _Place | None:
        """Where the positions lie, if the function computes each position of dimension `dim` on its own."""
        one = [tensor.to("meta") for tensor in tensors]
        one[position] = one[position][0]
        where = [Layout(dim) if i == position else None for i in range(len(tensors))]
        args, kwargs = put_in_tensors(plan.arguments, one)
        result = grad[0].to("meta")
        motion = find_declared_motion(Call(plan.func, args, kwargs, tuple(one), tuple(where), self.count), [result])
        if motion is None or len(motion.results) != 1:
            return None
        (found,) = motion.results
        if not isinstance(found, Layout) or not found.is_pattern or result.shape[found.dim] != self.count:
            return None
        weights = {i: layout.dim for i, layout in motion.aligned}
        if weights and (result.dim() < 3 or not {*range(len(tensors))} - {position} <= weights.keys()):
            return None  # (batch, features), with as many features as positions
        return _Place(dim, found.dim, weights)

    def _split_weight(self, term: Term, dim: int) -> Slices:
        """The term of a weight that has a part for each position."""
        values = term.dense().movedim(1 + dim, 1)
        index = torch.arange(self.count, device=values.device).repeat(len(values))
        return Slices(values.flatten(0, 1), index, dim, self.count)


def _move_to_batch(rows: Tensor, dim: int) -> Tensor:
    """`(batch, ..., positions, ...)` to `(batch * positions, ..., 1, ...)`; `dim` is the dimension in a sample."""
    return rows.movedim(1 + dim, 1).flatten(0, 1).unsqueeze(1 + dim)


def group_by_rows(terms: Sequence[Term]) -> list[list[Term]]:
    """Terms with equal numbers of rows together: of samples, or of their positions."""
    groups: dict[int, list[Term]] = {}
    for term in terms:
        groups.setdefault(term.batch, []).append(term)
    return list(groups.values())
