"""How far a recording is: one of six stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto


class Stage(Enum):
    """What a recording is doing."""

    BEFORE = auto()  # nothing was called yet: the code around the model prepares the batch
    INSIDE = auto()  # a call of the model runs, as far as is known
    LOSS = auto()  # the code around the model runs after a call
    BACKWARD = auto()  # a backward pass runs
    ENDED = auto()  # nothing is followed any more, and the mode can be removed at any time
    GIVEN_UP = auto()  # the same, because the recording was refused: gradients that were recorded still arrive


_OVER = (Stage.ENDED, Stage.GIVEN_UP)


class Progress:
    """The stage of a recording, and the ways from one to another.

    Attributes:
        is_paused: whether passes run that are not part of the recording.
        is_following: whether calls are followed now.
    """

    def __init__(self, is_inside: bool) -> None:
        self.stage = Stage.INSIDE if is_inside else Stage.BEFORE
        self.is_paused = False
        self.is_following = True
        self._last = self.stage  # that was no end

    @property
    def has_ended(self) -> bool:
        """Whether nothing is followed any more."""
        return self.stage in _OVER

    def enter_model(self) -> None:
        """Note that a call of the model begins."""
        self._set(Stage.INSIDE)

    def leave_model(self) -> None:
        """Note that a call of the model has ended."""
        self._last = Stage.LOSS
        if self.stage is Stage.INSIDE:
            self._set(Stage.LOSS)

    def end(self) -> None:
        """Follow nothing from now on."""
        self._set(Stage.ENDED)

    def give_up(self) -> None:
        """Follow nothing from now on, because the recording was refused."""
        self._set(Stage.GIVEN_UP)

    @contextmanager
    def differentiate(self) -> Iterator[None]:
        """Inside the block, a backward pass runs."""
        before = self.stage
        self._set(Stage.BACKWARD)
        try:
            yield
        finally:
            if self.stage is Stage.BACKWARD:
                self._set(before)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed: it runs passes that are not part of the recording."""
        was_paused, self.is_paused = self.is_paused, True
        self._set(self.stage)
        try:
            yield
        finally:
            self.is_paused = was_paused
            self._set(self.stage)

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Inside the block, a recording that has ended is followed again, until it is refused again.

        For recomputations: they must save what the forward pass has saved.
        """
        stage = self.stage
        if stage in _OVER:
            self._set(self._last)
        try:
            yield
        finally:
            if stage in _OVER:
                self._set(stage)

    def _set(self, stage: Stage) -> None:
        self.stage = stage
        self.is_following = not self.is_paused and stage not in _OVER
        if stage not in _OVER:
            self._last = stage
