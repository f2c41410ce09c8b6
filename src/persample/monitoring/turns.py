"""Whose turn it is, if several monitors want to measure: only one recording can be under way at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from persample.monitoring.steps import AnySteps


class Turns:
    """Monitors that wait because another one is measuring. The one that has waited longest comes first.

    A monitor gives way to one that waits once, and again if that one has found no step to measure since: a model that
    is not called any more must not block the others.
    """

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[AnySteps, int] = WeakKeyDictionary()  # the number of the last turn of each
        self._waiting: WeakKeyDictionary[AnySteps, WeakSet[AnySteps]] = WeakKeyDictionary()  # and who gave way to it
        self._count = 0

    def wait(self, monitor: AnySteps) -> None:
        """Note that a monitor could not measure a step."""
        self._waiting[monitor] = WeakSet()

    def leave(self, monitor: AnySteps) -> None:
        """Note that a monitor has ended."""
        self._waiting.pop(monitor, None)

    def take(self, monitor: AnySteps) -> None:
        """Note that a monitor measures a step."""
        self._count += 1
        self._last[monitor] = self._count
        self.leave(monitor)

    def must_give_way(self, monitor: AnySteps) -> bool:
        """Whether another monitor has waited for longer."""
        own = self._last.get(monitor, 0)
        longer = [
            given for other, given in self._waiting.items()
            if other is not monitor and self._last.get(other, 0) < own and monitor not in given
        ]  # fmt: skip
        for given in longer:
            given.add(monitor)
        return bool(longer)


TURNS = Turns()
