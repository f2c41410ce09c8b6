"""The order in which steps must take the batches of a loader."""

from __future__ import annotations

from collections.abc import Callable

from persample.private.errors import PrivateTrainingError


class Turns:
    """Refuses a step whose batch was drawn for another step.

    A strategy of correlated noise assumes that batches with one sample are a number of steps apart. The sampler draws
    for the steps from the next one on when a loop begins; so a batch that is left out would move later ones.

    Args:
        count_steps: returns the number of steps so far.
    """

    def __init__(self, count_steps: Callable[[], int]) -> None:
        self.count_steps = count_steps
        self.taken = 0  # steps for which a batch was handed out

    def check_step(self) -> None:
        """Raise if no batch was handed out for the next step."""
        if self.taken != self.count_steps() + 1:
            raise PrivateTrainingError(
                "No batch of the loader was handed out for this step. With correlated noise, each step takes the next "
                "batch of the loader that make_private returned, also if the batch is empty."
            )


class Turn:
    """The place of a loop among the steps: one for each loop over the loader."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._position = turns, turns.count_steps()

    def take(self) -> None:
        """Note that the loop hands out its next batch; raise if that batch is not for the next step."""
        if self._position != self._turns.count_steps():
            raise PrivateTrainingError(
                f"The batch was drawn for step {self._position}, and the next step is {self._turns.count_steps()}. "
                "With correlated noise, call step() once for each batch of the loader, before the next one is taken, "
                "and run one loop over the loader at a time. To go on after an error, begin a new loop."
            )
        self._position += 1
        self._turns.taken = self._position

    def note_step(self) -> None:
        """Note that a step is made, which the noise counts itself."""


class Pace:
    """A loop over the loader with independent noise: each batch makes its step, whatever its samples are.

    A loop that leaves batches out decides by them, for example if a loss is too large or a batch is empty. A loop may
    take batches in advance, always the same number of them.

    >>> pace = Pace()
    >>> for _ in range(3):
    ...     pace.take()
    ...     pace.note_step()
    >>> pace.take()
    >>> pace.take()
    >>> pace.note_step()
    Traceback (most recent call last):
    persample.private.errors.PrivateTrainingError: A batch of the loader was left out: this loop made a step for each...
    """

    def __init__(self) -> None:
        self._waiting = 0  # batches without a step
        self._ahead = 0  # of them, those that wait when the first step is made

    def take(self) -> None:
        """Note that the loop hands out its next batch."""
        self._waiting += 1

    def note_step(self) -> None:
        """Note that a step is made; raise if a batch was left out."""
        self._ahead = self._ahead or self._waiting
        if self._waiting > self._ahead:
            raise PrivateTrainingError(
                "A batch of the loader was left out: this loop made a step for each of the batches before. If its "
                "samples decide that, such as a loss that is too large or a batch that is empty, then what is released "
                "depends on them. Call backward() and step() for each batch; an empty one makes a step of noise. "
                "BatchMemoryManager divides a batch that is too large. To go on after an error, begin a new loop."
            )
        self._waiting = max(0, self._waiting - 1)
