"""The rule of functions that only move entries: where each entry of a weight went, and whose it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.layouts import Op
from persample.layouts.by_index import Indexing
from persample.layouts.functions import MOVES, PICKS, WRITES
from persample.layouts.layout import regular, samples
from persample.terms import Dense, Rows, Term


@dataclass(frozen=True)
class Moved:
    """Entries of a weight (by their number in it) that were put among those of samples, and their gradients."""

    origin: Tensor
    owner: Tensor
    grad: Tensor

    def term(self, weight: Tensor, batch: int) -> Term:
        """`g_n[i] = sum of the gradients where entry i was put among those of sample n`."""
        with tracing.suspend():
            owner, origin = self.owner.reshape(-1), self.origin.reshape(-1)
            there = ((owner >= 0) & (origin >= 0)).nonzero().squeeze(1)
            at = (owner[there].long(), origin[there])
        dense = self.grad.new_zeros(batch, max(1, weight.numel()))
        entries = self.grad.reshape(-1)[tracing.lift(there)]
        dense.index_put_(tuple(map(tracing.lift, at)), entries, accumulate=True)
        return Dense(dense[:, : weight.numel()].view(batch, *weight.shape).to(weight.dtype))


def is_entry_move(op: Op) -> bool:
    """Whether this is the rule of an op; `reduce=` says that entries are changed on the way."""
    return op.func in MOVES or (op.func in WRITES and "reduce" not in op.kwargs and "reduce" not in op.func.__name__)


def compute_moved_terms(op: Op, weights: Mapping[int, Tensor], grad: Tensor, owner: Tensor) -> dict[int, Term] | None:
    """The terms of the weights in a move; `owner` has the sample of each entry of the result.

    None while a step is traced, if it goes by an index: where entries went cannot be looked up then.
    """
    terms: dict[int, Term] = {}
    traced = tracing.get_trace() is not None
    moved_ones = len(list(find_tensors(op.args[0])))
    for position in weights:
        tensor = op.tensors[position]
        with tracing.suspend():
            numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        if op.func in WRITES and not traced:
            moved = _written(Indexing(op), position == 0, numbers, owner, grad, op.kwargs.get("alpha", 1))
            terms[position] = moved.term(tensor, op.batch)
        elif op.func in PICKS and (rows := _rows(Indexing(op), owner, grad, op.batch)) is not None:
            terms[position] = rows
        elif traced and (op.func in WRITES or len(op.tensors) > moved_ones):
            return None
        else:
            with tracing.suspend():
                nobody = [torch.full(t.shape, -1, device=t.device) for t in op.tensors[:moved_ones]]
                nobody[position] = numbers
                args, kwargs = op.fill([*nobody, *op.tensors[moved_ones:]])
                (origin,) = find_results(op.func(*args, **kwargs), args)
            terms[position] = Moved(origin, owner, grad).term(tensor, op.batch)
    return terms


def _written(call: Indexing, is_base: bool, numbers: Tensor, owner: Tensor, grad: Tensor, alpha: float) -> Moved:
    if is_base:  # what was not written over is still there
        origin = numbers.clone()
        if not call.adds:
            origin[call.item] = -1
        return Moved(origin, owner, grad)
    region = grad[call.item]
    if call.in_order:
        numbers = torch.zeros_like(owner, dtype=numbers.dtype).masked_scatter(call.item[0], numbers)[call.item]
    return Moved(numbers.expand(region.shape), owner[call.item], region * alpha)  # torch takes no conjugate of it


def _rows(call: Indexing, owner: Tensor, grad: Tensor, batch: int) -> Term | None:
    """Rows of a table that an index picked."""
    (index,) = call.item if len(call.item) == 1 else (None,)
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool or call.base.dim() != 2:
        return None
    with tracing.suspend():
        ids = tuple(owner.reshape(index.numel(), -1).amax(1).tolist()) if index.numel() else ()
    layout = regular(0, ids, batch)
    rows = samples(grad.reshape(index.numel(), -1), layout, batch)
    return Rows(samples(index.reshape(-1) % len(call.base), layout, batch), rows, len(call.base))
