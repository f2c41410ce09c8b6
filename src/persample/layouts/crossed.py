"""Tensors of all pairs of rows: `a[:, None] - b`, `a @ b.T`. Only pairs of rows of one sample belong to a sample.

A loss that is computed for all pairs, and then for the pairs on the diagonal alone (the generalised overlap of matched
boxes), keeps the samples separate. Such a tensor may be moved and computed with entry by entry. Gradients of pairs of
different samples must be zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from persample.layouts.algebra.engine import merge_rows, move
from persample.layouts.call import Call
from persample.layouts.divisors import SampleUnits
from persample.layouts.ids import find_layout_of_ids, make_sample_ids
from persample.layouts.layout import Crossed, Layout, Lost, Where
from persample.layouts.motion import Motion, make_uniform_motion


def find_crossed_motion(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The motion of a call with a tensor of pairs; None if the function may combine pairs."""
    if not all(where is None or isinstance(where, (Layout, Crossed)) for where in call.where):
        return None
    if call.facts.moves_entries or (call.facts.operator == "diag" and call.tensors[0].dim() == 2):
        return _move(call)
    if call.facts.is_pointwise and len(results) == 1:
        where = _combine_entries(call, results[0].shape)
        return None if where is None else make_uniform_motion(where, results)
    return None


def has_mixed_pairs(gradient: Tensor, crossed: Crossed, batch: int, units: SampleUnits | None) -> bool:
    """Whether the gradient of a tensor of pairs is not zero for a pair of rows of different samples, or units."""
    first, second = (make_sample_ids(gradient, layout, batch) for layout in crossed.rows)
    if units is not None:
        unit = torch.tensor([*units.of_sample, -1], device=gradient.device)  # of the samples; -1 has none
        first, second = unit[first.long()], unit[second.long()]
    return bool((gradient != 0)[(first != second) & (first >= 0) & (second >= 0)].any())


def _combine_entries(call: Call, shape: torch.Size) -> Crossed | None:
    crossed = next(where for where in call.where if isinstance(where, Crossed))
    found: dict[int, Layout] = {}
    for tensor, where in call.pairs:
        layouts = where.rows if isinstance(where, Crossed) else [where] if isinstance(where, Layout) else []
        for layout in layouts:
            here = move(layout, layout.dim + len(shape) - tensor.dim())
            size = tensor.shape[layout.dim]
            merged = merge_rows(found.get(here.dim, here), here, size, call.batch)
            if merged is None or layout.loose or layout.by_rank or size != shape[here.dim]:
                return None
            found[here.dim] = merged
    if len(found) != 2:
        return None
    first, second = sorted(found.values(), key=lambda layout: layout.dim)
    return Crossed(crossed.cause, crossed.place, rows=(first, second))


def _move(call: Call) -> Motion | None:
    """The motion of a function that moves pairs: it is applied to the samples of their rows and of their columns."""
    crossed, tensor = call.where[0], call.tensors[0]
    if not isinstance(crossed, Crossed) or any(call.where[1:]):
        return None
    ids = (make_sample_ids(tensor, layout, call.batch) for layout in crossed.rows)
    moved = (call.run([owners, *call.tensors[1:]]) for owners in ids)
    found = [_find_where(first, second, crossed, call.batch) for first, second in zip(*moved, strict=True)]
    return Motion(tuple(found), depends_on_values=True)


def _find_where(first: Tensor, second: Tensor, crossed: Crossed, batch: int) -> Where | None:
    """Where the samples lie, given those of both rows of each pair."""
    if bool(((first == second) | (first < 0) | (second < 0)).all()):
        return find_layout_of_ids(torch.maximum(first, second), batch)
    rows = find_layout_of_ids(first, batch), find_layout_of_ids(second, batch)
    if isinstance(rows[0], Layout) and isinstance(rows[1], Layout) and rows[0].dim != rows[1].dim:
        return Crossed(crossed.cause, crossed.place, rows=(rows[0], rows[1]))
    return Lost(crossed.cause, crossed.place)
