"""Accounting by privacy loss distributions, for three neighbouring relations, and steps as events of dp-accounting.

Requires `pip install 'persample[accounting]'`. docs/private.md says on which theorems the numbers rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, ClassVar

import opacus
from opacus.accountants import IAccountant
from opacus.accountants.registry import register_accountant

from persample.private.errors import PrivateTrainingError

Steps = tuple[float, float, int]  # noise multiplier, sample rate, number of steps

ADD_REMOVE = "data sets of which one has one unit more than the other"


class PLDAccountant(IAccountant):
    """Counts steps, and composes their privacy loss distributions by Google's dp-accounting.

    The result is an upper bound of epsilon: losses are rounded up to a grid. `PrivacyEngine(accountant="pld")` uses it.

    Attributes:
        relation: the neighbouring relation, as dp-accounting calls it.
        neighbours: the same in words.

    >>> accountant = PLDAccountant()
    >>> for _ in range(100):
    ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    >>> accountant.history
    [(1.0, 0.01, 100)]
    >>> round(accountant.get_epsilon(delta=1e-5), 2)
    0.72
    """

    relation: ClassVar[str] = "ADD_OR_REMOVE_ONE"
    neighbours: ClassVar[str] = ADD_REMOVE

    def __init__(self) -> None:
        _import_dp_accounting()
        self.history: list[Steps] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count a step."""
        steps = 1
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            steps += self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps))

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Epsilon of the counted steps, 0 without any."""
        return float(self._compose().get_epsilon(delta)) if self.history else 0.0

    def get_delta(self, epsilon: float) -> float:
        """Delta of the counted steps, 0 without any."""
        return float(self._compose().get_delta(epsilon)) if self.history else 0.0

    def _compose(self) -> Any:
        dp = _import_dp_accounting()
        accountant = dp.pld.PLDAccountant(dp.NeighboringRelation[self.relation])
        return accountant.compose(make_event(self.history))

    def __len__(self) -> int:
        return len(self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The name of the accountant."""
        return "pld"


class ReplaceOnePLDAccountant(PLDAccountant):
    """`PLDAccountant` for data sets of the same size that differ in one unit: `accountant="pld-replace-one"`.

    >>> accountant = ReplaceOnePLDAccountant()
    >>> accountant.history = [(1.0, 0.01, 100)]
    >>> round(accountant.get_epsilon(delta=1e-5), 2)
    0.9
    """

    relation = "REPLACE_ONE"
    neighbours = "data sets of the same size that differ in one unit"

    @classmethod
    def mechanism(cls) -> str:
        """The name of the accountant."""
        return "pld-replace-one"


class ZeroOutPLDAccountant(PLDAccountant):
    """`PLDAccountant` for a unit that is replaced by one that adds nothing: `accountant="pld-zero-out"`.

    Epsilon is that of add or remove. The size of the data set is the same for neighbours, and so public.
    """

    relation = "REPLACE_SPECIAL"
    neighbours = "data sets of the same size, in one of which a unit is replaced by one that adds nothing"

    @classmethod
    def mechanism(cls) -> str:
        """The name of the accountant."""
        return "pld-zero-out"


for _kind in (PLDAccountant, ReplaceOnePLDAccountant, ZeroOutPLDAccountant):
    register_accountant(_kind.mechanism(), _kind, force=True)  # a second import replaces the class


def make_event(history: Iterable[Steps]) -> Any:
    """Counted steps as an event of dp-accounting, for its accountants and those of others.

    >>> make_event([(2.0, 1.0, 3)])
    ComposedDpEvent(events=[SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=3)])
    """
    dp = _import_dp_accounting()
    events = []
    for noise_multiplier, sample_rate, steps in merge_whole(history):
        event = dp.GaussianDpEvent(float(noise_multiplier))
        if not noise_multiplier:
            event = dp.NonPrivateDpEvent()
        elif sample_rate < 1:
            event = dp.PoissonSampledDpEvent(float(sample_rate), event)
        events.append(dp.SelfComposedDpEvent(event, int(steps)))
    return dp.ComposedDpEvent(events)


def merge_whole(history: Iterable[Steps]) -> list[Steps]:
    """The history with all steps that use the whole data set as one entry, if there are several entries of them.

    Gaussian mechanisms with noise multipliers s_i are together one with `1 / s**2 = sum(1 / s_i**2)`, exactly.

    >>> merge_whole([(5.0, 1.0, 2), (1.0, 0.1, 3), (5.0, 1.0, 1), (10.0, 1.0, 4)])
    [(1.0, 0.1, 3), (2.5, 1.0, 1)]
    """
    entries = list(history)
    whole = [entry for entry in entries if entry[1] >= 1]
    if len(whole) < 2:
        return entries
    if any(not noise for noise, _, _ in whole):
        total = math.inf
    else:
        total = math.fsum(steps / noise**2 for noise, _, steps in whole)
    return [*(entry for entry in entries if entry[1] < 1), (total**-0.5 if total < math.inf else 0.0, 1.0, 1)]


def describe_accountant(accountant: Any) -> dict[str, str]:
    """The accountant with the software that computes its numbers."""
    is_ours = isinstance(accountant, PLDAccountant)
    of = f"dp-accounting {version('dp-accounting')}" if is_ours else f"opacus {opacus.__version__}"
    return {"accountant": accountant.mechanism(), "of": of}


def get_neighbours(accountant: Any) -> str:
    """The neighbouring relation of an accountant in words. Those of Opacus add or remove a unit."""
    return str(getattr(accountant, "neighbours", ADD_REMOVE))


def _import_dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise PrivateTrainingError(
            "Accounting by privacy loss distributions needs dp-accounting: pip install 'persample[accounting]'. "
            "The accountants 'prv' and 'rdp' do not need it."
        ) from error
    return dp_accounting
