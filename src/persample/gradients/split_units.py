"""Units with samples in several processes: the parts of their rows are added up in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample._internal.memory import find_free_memory
from persample._internal.precision import widen
from persample._internal.text import format_bytes
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients.units import Units
from persample.terms import Dense, Groups, Joined, Term, make_groups, merge_samples


@dataclass(frozen=True)
class SplitUnits:
    """The units of a batch that several processes share. Each unit has its row in the first process with samples of it.

    A unit whose samples are in one process keeps its structure. The row of a shared unit is dense: each process adds up
    its part, and the process that has the row takes the sum of all parts.

    Attributes:
        given: the units of the samples of this process.
        own: the units whose rows this process has. Its groups have the samples of units that are not shared.
        own_rows: the rows of the units that are not shared.
        names: the shared units, in an order that all processes have.
        shared: the samples of this process that belong to shared units.
        kept: the shared units whose rows this process has, and `kept_rows` their rows.
    """

    given: Units
    own: Units
    own_rows: Tensor
    names: Sequence[Any]
    shared: Groups
    kept: Tensor
    kept_rows: Tensor

    def add_up_shared(self, term: Term | None, parameter: Tensor, scale: float) -> Tensor:
        """`(shared units, *shape)`: the parts of the shared rows that this process has."""
        dtype = widen(parameter.new_empty(0)).dtype
        if term is None or not self.shared.largest:
            return torch.zeros(self.shared.count, *parameter.shape, dtype=dtype, device=parameter.device)
        return merge_samples(term, self.shared.to(parameter.device)).dense().to(dtype) * scale

    def join(self, term: Term | None, shared_rows: Tensor, scale: float) -> Term | None:
        """The term with the rows of this process; None if it has nothing for them.

        Args:
            term: what this process found for a parameter, with a row for each sample.
            shared_rows: the rows of all shared units.
            scale: what the rows of this process will be multiplied by.
        """
        device, shape = shared_rows.device, shared_rows.shape[1:]
        kept = Dense(shared_rows[self.kept.to(device)] / scale) if len(self.kept) else None
        if not len(self.own_rows):
            return kept
        if term is None and kept is None:
            return None
        groups = self.own.groups.to(device)
        own: Term = Dense(shared_rows.new_zeros(groups.count, *shape))
        if term is not None and groups.largest:
            own = merge_samples(term, groups)
        return own if kept is None else Joined([own, kept], [self.own_rows.to(device), self.kept_rows.to(device)])

    def check_memory(self, parameters: Iterable[Tensor], processes: Processes) -> None:
        """Refuse shared units whose dense rows would take more than half of the free memory of a process."""
        listed = list(parameters)
        sizes = [p.numel() * widen(p.new_empty(0)).element_size() for p in listed]
        needed = len(self.kept) * sum(sizes) + 2 * self.shared.count * max(sizes, default=0)
        free = find_free_memory(p.device for p in listed)
        if self.names and processes.count(int(free is not None and needed > free // 2)):  # all processes raise, or none
            raise PerSampleError(
                f"{len(self.names)} units (such as {self.names[0]}) have samples in several processes, and their dense "
                f"rows need more than half of the free memory of a process ({format_bytes(needed)} in this one). Give "
                "all samples of a unit to one process."
            )


def split_units(units: Units, processes: Processes) -> SplitUnits | None:
    """How the rows of units are distributed over processes; None if each unit has all its samples in one of them."""
    sizes = units.groups.count_samples().tolist()
    gathered = processes.gather_objects([(name, size) for name, size in zip(units.names, sizes, strict=True)])
    totals, owners, shared = _find_owners(gathered)
    first = gathered[0][0]  # has the rows of units without samples
    # All processes must decide alike, because those with split units wait for each other.
    if all(owners.get(name, first) == rank for rank, found in gathered for name, _ in found):
        return None
    own = [name for name in units.names if owners.get(name, first) == processes.get_rank()]
    rows = {name: row for row, name in enumerate(own)}
    whole = {name: number for number, name in enumerate(name for name in own if name not in shared)}
    device = units.groups.rows.device
    weights = None
    if units.reduction == "mean":
        counts = torch.tensor([totals[name] for name in units.names], dtype=torch.float64, device=device)
        weights = 1 / counts[units.groups.rows]

    def group(numbers: dict[Any, int]) -> Groups:
        of_units = torch.tensor([numbers.get(name, -1) for name in units.names], dtype=torch.long, device=device)
        return make_groups(of_units[units.groups.rows], len(numbers), weights)

    def list_rows(names: Iterable[Any]) -> Tensor:
        return torch.tensor([rows[name] for name in names], dtype=torch.long, device=device)

    kept = [name for name in own if name in shared]
    return SplitUnits(
        given=units,
        own=replace(units, names=own, rows=(own_groups := group(whole)).rows.tolist(), groups=own_groups),
        own_rows=list_rows(whole),
        names=list(shared),
        shared=group(shared),
        kept=torch.tensor([shared[name] for name in kept], dtype=torch.long, device=device),
        kept_rows=list_rows(kept),
    )


def _find_owners(
    gathered: Sequence[tuple[int, Sequence[tuple[Any, int]]]],
) -> tuple[dict[Any, int], dict[Any, int], dict[Any, int]]:
    """By unit: the number of samples, the first process with samples of it, and the number of a shared unit."""
    totals: dict[Any, int] = {}
    owners: dict[Any, int] = {}
    shared: dict[Any, int] = {}
    for rank, found in gathered:
        for name, size in found:
            totals[name] = totals.get(name, 0) + size
            if size and owners.setdefault(name, rank) != rank:
                shared.setdefault(name, len(shared))
    return totals, owners, shared
