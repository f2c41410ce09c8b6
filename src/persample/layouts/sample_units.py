"""The unit of each sample, where rows are those of units: users, pairs, augmentations of an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class SampleUnits:
    """The unit of each sample, if rows are those of units, and the first sample of each unit.

    Attributes:
        have_met: whether samples of one unit were combined in a tensor that requires grad.
    """

    of_sample: tuple[int, ...]
    first: tuple[int, ...]
    have_met: bool = False


def make_sample_units(of_sample: Sequence[int]) -> SampleUnits | None:
    """The units of the samples of a batch; None if each sample has its own.

    >>> make_sample_units([7, 3, 7]).first
    (0, 1)
    """
    first: dict[int, int] = {}
    for n, unit in enumerate(of_sample):
        first.setdefault(unit, n)
    numbers = {unit: number for number, unit in enumerate(first)}
    if len(first) == len(of_sample):
        return None
    return SampleUnits(tuple([numbers[unit] for unit in of_sample]), tuple(first.values()))
