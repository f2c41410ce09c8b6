"""Tensors whose entries belong to known samples, without one dimension that tells them apart.

A batch that was split into two dimensions (`h.view(2, B // 2, D)`) is one, and columns that were sorted by themselves.
Such a tensor may be moved, computed with entry by entry, and summed up. After a move, the samples may lie along one
dimension again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample._internal.facts import T
from persample._internal.tree import find_tensors
from persample.errors import get_op_name
from persample.layouts.algebra.engine import get_argument, normalise_dims
from persample.layouts.call import Call
from persample.layouts.ids import find_layout_of_ids, make_sample_ids
from persample.layouts.layout import Layout, Lost, Reduced, Scattered, Where
from persample.layouts.motion import Motion
from persample.layouts.reductions import make_reduced

_SUMS = {"sum", "mean"}

# Functions that combine entries along their argument `dim`.
_ALONG = _SUMS | {"softmax", "log_softmax", "amax", "amin", "logsumexp", "cumsum", "all", "any"}


def find_scattered_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call with a scattered argument; None if the function may combine its entries."""
    if any(isinstance(where, (Lost, Reduced)) and not isinstance(where, Scattered) for where in call.where):
        return None
    found: Sequence[Where | None] | None = None
    if call.facts.moves_entries:
        found = _move(call)
    elif call.facts.is_pointwise:
        found = _combine_entries(call, results)
    elif call.func is T.copy_ and call.where[1] is not None:  # every entry is overwritten
        ids = make_sample_ids(call.tensors[1], call.where[1], call.batch).expand_as(call.tensors[0])
        found = [find_layout_of_ids(ids, call.batch)]
    elif call.facts.operator in _ALONG:
        dims = get_argument(call, 1, "dim", "axis")
        found = _add_up(call) if dims is None else _combine_along(call, results, dims)
    return None if found is None else Motion(tuple(found), depends_on_values=True)


def _move(call: Call) -> list[Where | None] | None:
    moved = range(len(list(find_tensors(call.args[0]))))
    if any(call.where[len(moved) :]):
        return None
    layouts = [where for where in call.where[: len(moved)] if where is not None]
    is_loose = any(isinstance(where, (Layout, Scattered)) and where.loose for where in layouts)
    if is_loose and (len(moved) > 1 or not _keeps_rows(call)):
        return None
    ids = [make_sample_ids(call.tensors[i], call.where[i], call.batch).clone() for i in moved]
    found = [find_layout_of_ids(part, call.batch, is_loose) for part in call.run([*ids, *call.tensors[len(moved) :]])]
    if any(isinstance(where, (Layout, Scattered)) and where.loose_index for where in layouts):
        return [replace(w, loose_index=True) if isinstance(w, (Layout, Scattered)) else w for w in found]
    return list(found)


def _keeps_rows(call: Call) -> bool:
    """Whether row i of each result consists of entries of row i."""
    tensor = call.tensors[0]
    parts = call.run([_number_rows(tensor.shape), *call.tensors[1:]])
    return all(len(part) == len(tensor) and torch.equal(part, _number_rows(part.shape)) for part in parts if part.dim())


def _number_rows(shape: torch.Size) -> Tensor:
    """A tensor in which each entry is the index of its row."""
    return torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


def _combine_entries(call: Call, results: Sequence[Tensor]) -> list[Where | None] | None:
    if any(isinstance(where, (Layout, Scattered)) and (where.loose or where.loose_index) for where in call.where):
        return None
    owner = torch.full(results[0].shape, -1, dtype=torch.int32, device=results[0].device)
    for tensor, where in call.pairs:
        ids = make_sample_ids(tensor, where, call.batch).expand_as(owner)
        if bool(((owner >= 0) & (ids >= 0) & (owner != ids)).any()):
            return [Lost(f"{get_op_name(call.func)} combines entries of different samples") for _ in results]
        owner = torch.maximum(owner, ids)
    return [find_layout_of_ids(owner, call.batch) for _ in results]


def _combine_along(call: Call, results: Sequence[Tensor], given: Any) -> list[Where | None] | None:
    """The layouts of a call that combines entries along some dimensions, if these entries belong to one sample."""
    where, result = call.where[0], results[0]
    if not isinstance(where, Scattered) or where.loose or any(call.where[1:]) or len(results) > 1:
        return None
    owner = where.ids.amax(tuple(normalise_dims(given, where.ids.dim())), keepdim=True)
    if not bool((owner == where.ids).all()):
        return None
    owner = where.ids if result.shape == where.ids.shape else owner.reshape(result.shape)
    return [find_layout_of_ids(owner, call.batch)]


def _add_up(call: Call) -> list[Where | None] | None:
    where = call.where[0]
    if call.facts.operator not in _SUMS or not isinstance(where, Scattered) or any(call.where[1:]):
        return None
    counts = where.ids.flatten()[where.ids.flatten() >= 0].bincount(minlength=call.batch)
    is_mean = call.facts.operator == "mean"
    is_even = call.counted.holds_divisors or bool((counts == counts[0]).all())
    if is_mean and (int(where.ids.min()) < 0 or not is_even):
        return [Lost("mean is a mean over different numbers of entries of the samples")]
    return [make_reduced(call)]
