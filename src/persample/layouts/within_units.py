"""Calls that combine samples of one unit, such as the two halves of a batch of pairs.

The row of a unit is a sum over its samples. So samples of a unit may be combined: a tensor of which each row belongs
to one unit counts as rows of the unit's first sample. Whatever gradient these rows get goes back to all samples that
they were computed from, and arrives in the row of the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.layouts.call import Call
from persample.layouts.divisors import SampleUnits
from persample.layouts.find import find_motion
from persample.layouts.ids import find_layout_of_ids, make_layout, map_layouts
from persample.layouts.layout import Crossed, Divided, Layout, Lost, Reduced, Scattered, Where
from persample.layouts.motion import Motion


@dataclass(frozen=True)
class _Renumbering:
    """The layouts of a batch in another batch, in which sample n has the number `numbers[n]`."""

    numbers: Sequence[int]
    before: int
    after: int

    def apply(self, where: Where | None, tensor: Tensor) -> Where | None:
        if isinstance(where, Scattered):
            table = torch.tensor([*self.numbers, -1], dtype=torch.int32, device=where.ids.device)
            found = find_layout_of_ids(table[where.ids.long()], self.after, where.loose)  # -1 selects the last entry
            assert isinstance(found, (Layout, Scattered))
            return replace(found, loose_index=where.loose_index)

        def renumber(layout: Layout) -> Layout:
            ids = layout.get_ids(tensor.shape[layout.dim] if tensor.dim() else 1, self.before)
            ids = tuple([n if n < 0 else self.numbers[n] for n in ids])
            made = make_layout(layout.dim, ids, self.after, layout.loose)
            return replace(made, loose_index=layout.loose_index, by_rank=layout.by_rank)

        return where if isinstance(where, Divided) else map_layouts(where, renumber)


def _renumber(units: SampleUnits, batch: int) -> tuple[_Renumbering, _Renumbering]:
    """From samples to units, and from units to their first samples."""
    count = len(units.first)
    return _Renumbering(units.of_sample, batch, count), _Renumbering(units.first, count, batch)


def find_motion_with_units(call: Call, results: Sequence[Tensor]) -> tuple[Call, Motion]:
    """How a call moves the samples, and the call; both with the layouts of units if samples of one unit meet."""
    motion, units = find_motion(call, results), call.counted.units
    are_lost = any(isinstance(where, Crossed) or _is_mixed(where) for where in motion.results)
    if units is None or not are_lost or any(map(_is_mixed, call.where)):
        return call, motion
    enter, leave = _renumber(units, call.batch)
    of_units = replace(call, batch=enter.after, where=tuple(map(enter.apply, call.where, call.tensors)))
    found = find_motion(of_units, results)
    if any(_is_mixed(where) or (isinstance(where, Reduced) and where.divisors) for where in found.results):
        return call, motion
    units.have_met |= any(made.requires_grad for made in results)
    aligned = [(i, leave.apply(where, call.tensors[i])) for i, where in found.aligned]
    moved = Motion(
        tuple(map(leave.apply, found.results, results)),
        tuple((i, where) for i, where in aligned if isinstance(where, Layout)),
        depends_on_values=True,
    )
    return replace(call, where=tuple(map(leave.apply, of_units.where, call.tensors))), moved


def enter_units(call: Call) -> Call:
    """The same call, in which a scattered tensor whose rows belong to one unit each has rows of units."""
    units = call.counted.units
    if units is None or not any(isinstance(where, Scattered) for where in call.where):
        return call
    enter, leave = _renumber(units, call.batch)
    found = [
        leave.apply(enter.apply(where, tensor), tensor) if isinstance(where, Scattered) else where
        for tensor, where in call.pairs
    ]
    units.have_met = True
    return replace(call, where=tuple(found))


def _is_mixed(where: Where | None) -> bool:
    is_known = isinstance(where, (Scattered, Crossed))
    return isinstance(where, Lost) and not (is_known or where.listing or where.sized)
