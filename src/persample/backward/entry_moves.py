"""The rule of functions that only move entries (`cat`, `x[i] = w`, `expand`, ...).

The function is applied to the entry numbers of a weight instead of the weight. So it is known which entry of the weight
each entry of the result is, and to which sample it belongs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.layouts import Call, Indexing, make_layout, split_samples
from persample.terms import Dense, Rows, Term


@dataclass(frozen=True)
class MovedEntries:
    """Entries of a result that were moved there from a weight: three tensors of the same shape."""

    origin: Tensor  # the number of the entry in the weight, -1 if it is not from the weight
    owner: Tensor  # the sample that the entry belongs to in the result, -1 for none
    grad: Tensor  # the gradient of the entry of the result

    def make_term(self, weight: Tensor, batch: int) -> Term:
        """`g_n[i]` is the sum of the gradients of all entries with owner n and origin i."""
        with tracing.suspend():
            owner, origin = self.owner.reshape(-1), self.origin.reshape(-1)
            valid = ((owner >= 0) & (origin >= 0)).nonzero().squeeze(1)
            index = (owner[valid].long(), origin[valid])
        dense = self.grad.new_zeros(batch, max(1, weight.numel()))
        entries = self.grad.reshape(-1)[tracing.lift(valid)]
        dense.index_put_(tuple(map(tracing.lift, index)), entries, accumulate=True)
        return Dense(dense[:, : weight.numel()].view(batch, *weight.shape).to(weight.dtype))


def is_entry_move(call: Call) -> bool:
    """Whether an op only moves entries. A write with `reduce=` also changes them."""
    return call.facts.moves_entries or (
        call.facts.writes_entries and "reduce" not in call.kwargs and "reduce" not in call.func.__name__
    )


def compute_moved_terms(
    call: Call, weights: Mapping[int, Tensor], grad: Tensor, owner: Tensor
) -> dict[int, Term] | None:
    """The terms of the weights of an op that only moves entries, by the positions of the weights.

    Args:
        call: The call.
        weights: The weights by their positions among the tensors of the call.
        grad: The gradient of the result.
        owner: The sample of each entry of the result, -1 for none.

    Returns None if a step is being traced and the op uses an index: the index has no values then.
    """
    terms: dict[int, Term] = {}
    facts, traced = call.facts, tracing.get_trace() is not None
    moved_count = len(list(find_tensors(call.args[0])))  # the tensors after these are indices
    for position in weights:
        tensor = call.tensors[position]
        with tracing.suspend():
            numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        if facts.writes_entries and not traced:
            entries = _find_written_entries(
                Indexing(call), position == 0, numbers, owner, grad, call.kwargs.get("alpha", 1)
            )
            terms[position] = entries.make_term(tensor, call.batch)
        elif facts.picks_entries and (rows := _find_picked_rows(Indexing(call), owner, grad, call.batch)) is not None:
            terms[position] = rows
        elif traced and (facts.writes_entries or len(call.tensors) > moved_count):
            return None
        else:
            with tracing.suspend():
                origins = [torch.full(t.shape, -1, device=t.device) for t in call.tensors[:moved_count]]
                origins[position] = numbers
                args, kwargs = call.fill([*origins, *call.tensors[moved_count:]])
                (origin,) = find_results(call.func(*args, **kwargs), args)
            terms[position] = MovedEntries(origin, owner, grad).make_term(tensor, call.batch)
    return terms


def _find_written_entries(
    indexing: Indexing, is_base: bool, numbers: Tensor, owner: Tensor, grad: Tensor, alpha: float
) -> MovedEntries:
    """The entries of a weight after a write: of the tensor written into (`is_base`), or of the written value."""
    if is_base:  # entries that were not overwritten are still in their places
        origin = numbers.clone()
        if not indexing.adds:
            origin[indexing.item] = -1
        return MovedEntries(origin, owner, grad)
    region = grad[indexing.item]
    if indexing.in_order:
        numbers = torch.zeros_like(owner, dtype=numbers.dtype).masked_scatter(indexing.item[0], numbers)[indexing.item]
    # torch does not take the conjugate of alpha here
    return MovedEntries(numbers.expand(region.shape), owner[indexing.item], region * alpha)


def _find_picked_rows(indexing: Indexing, owner: Tensor, grad: Tensor, batch: int) -> Term | None:
    """The term of a table, if the call picks rows of it by one tensor of indices."""
    (index,) = indexing.item if len(indexing.item) == 1 else (None,)
    if (
        not isinstance(index, Tensor)
        or index.is_floating_point()
        or index.dtype == torch.bool
        or indexing.base.dim() != 2
    ):
        return None
    with tracing.suspend():
        ids = tuple(owner.reshape(index.numel(), -1).amax(1).tolist()) if index.numel() else ()
    layout = make_layout(0, ids, batch)
    rows = split_samples(grad.reshape(index.numel(), -1), layout, batch)
    return Rows(split_samples(index.reshape(-1) % len(indexing.base), layout, batch), rows, len(indexing.base))
