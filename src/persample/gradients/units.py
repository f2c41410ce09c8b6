"""Units: rows that are gradients of several samples, such as all examples of one user."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.terms import Groups, make_groups

# The unit of each sample, or a number of consecutive samples; a function is called with the batch size.
UnitIds = int | Tensor | Sequence[Hashable]
UnitReduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class UnitOptions:
    """How samples are combined to units, as `record` was told.

    Attributes:
        ids: the unit of each sample, or the number of consecutive samples of each unit, or a function of the batch
            size that returns either.
        count: the number of units, if the ids are numbers from 0 to count - 1; else the rows are the sorted ids.
        reduction: whether the row of a unit is the sum or the mean of the gradients of its samples.
    """

    ids: UnitIds | Callable[[int], UnitIds]
    count: int | None = None
    reduction: UnitReduction = "sum"

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise PerSampleError(f"unit_reduction must be 'sum' or 'mean', got {self.reduction!r}.")
        if isinstance(self.ids, int) and (isinstance(self.ids, bool) or self.ids < 1):
            raise PerSampleError(f"units must be a positive number of samples or the unit of each, got {self.ids}.")
        if self.count is not None and (isinstance(self.ids, int) or self.count < 0):
            raise PerSampleError("num_units must not be negative, and requires units with an id for each sample.")

    def find_units(self, batch_size: int, device: torch.device) -> Units:
        """The units of a batch."""
        ids = self.ids(batch_size) if callable(self.ids) else self.ids
        if isinstance(ids, int):
            return self._make_units(*_number_consecutive(batch_size, ids), device)
        names, rows = _number_ids(ids, batch_size)
        if self.count is not None:
            if not all(isinstance(name, int) and 0 <= name < self.count for name in names):
                raise PerSampleError(
                    f"num_units={self.count} requires units with numbers from 0 to {self.count - 1}, got {names[:5]}."
                )
            rows, names = torch.tensor(names, dtype=torch.long)[rows], list(range(self.count))
        return self._make_units(names, rows, device)

    def _make_units(self, names: Sequence[Any], rows: Tensor, device: torch.device) -> Units:
        weights = None
        if self.reduction == "mean":
            weights = 1 / torch.bincount(rows, minlength=len(names)).double()[rows]
        groups = make_groups(rows, len(names), weights).to(device)
        return Units(names, rows.tolist(), groups, self.reduction, not isinstance(self.ids, int))


@dataclass(frozen=True)
class Units:
    """The units of one batch.

    Attributes:
        names: the id of each row.
        rows: the row of each sample, as Python numbers; -1 for none.
        groups: the samples of each row.
        reduction: how the gradients of a unit's samples are combined.
        are_named: whether the ids were given, so that other batches can have the same units.
    """

    names: Sequence[Any]
    rows: Sequence[int]
    groups: Groups
    reduction: UnitReduction
    are_named: bool


def combine_units(several: Sequence[Units]) -> tuple[Units, list[Groups]]:
    """The units of several batches, and for each batch the groups that put its rows in their places.

    A mean over the samples of a unit in several batches weighs each batch by its number of them.
    """
    first = several[0]
    if any(units.reduction != first.reduction for units in several):
        raise PerSampleError("combine() needs recordings with the same unit_reduction; these differ.")
    names = _sort({name for units in several for name in units.names})
    numbers = {name: row for row, name in enumerate(names)}
    device = first.groups.rows.device
    rows = [torch.tensor([numbers[name] for name in units.names], dtype=torch.long, device=device) for units in several]
    samples = torch.cat([own[units.groups.rows.to(device)] for own, units in zip(rows, several, strict=True)])
    parts = []
    for own, units in zip(rows, several, strict=True):
        weights = None
        if first.reduction == "mean":
            totals = torch.bincount(samples, minlength=len(names))[own].clamp(min=1)
            weights = units.groups.count_samples().to(device).double() / totals
        parts.append(make_groups(own, len(names), weights))
    return Units(names, samples.tolist(), make_groups(samples, len(names)), first.reduction, are_named=True), parts


def _number_consecutive(batch_size: int, size: int) -> tuple[Sequence[int], Tensor]:
    if batch_size % size:
        raise PerSampleError(
            f"units={size} needs a batch that is a multiple of {size} samples, got {batch_size}. Pass the unit of each "
            "sample if units have different numbers of samples."
        )
    return range(batch_size // size), torch.arange(batch_size) // size


def _number_ids(ids: Tensor | Sequence[Hashable], batch_size: int) -> tuple[list[Any], Tensor]:
    """The sorted ids, and the row of each sample."""
    if not isinstance(ids, Tensor) and hasattr(ids, "tolist"):  # an array of numpy
        ids = ids.tolist()
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise PerSampleError(f"units must be integers or other ids, got a tensor of {ids.dtype}.")
        if ids.dim() != 1:
            raise PerSampleError(f"units must have an id for each sample, got shape {tuple(ids.shape)}.")
        ids = ids.tolist()
    listed = list(ids)
    if len(listed) != batch_size:
        raise PerSampleError(f"units has {len(listed)} ids, and the batch has {batch_size} samples.")
    names = _sort(set(listed))
    numbers = {name: row for row, name in enumerate(names)}
    return names, torch.tensor([numbers[name] for name in listed], dtype=torch.long)


def _sort(names: set[Any]) -> list[Any]:
    try:
        return sorted(names)
    except TypeError as error:
        raise PerSampleError(f"The ids of units must be comparable, because rows have their order: {error}.") from error
