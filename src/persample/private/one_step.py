"""What a step of private training knows: its bound and noise, and the sums of the samples that have arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from weakref import ref

from torch import Tensor

from persample import _torch
from persample.gradients import LEAST_BOUND
from persample.private.errors import PrivateTrainingError

Sums = dict[int, Tensor]  # of parameters, by the id of the parameter


@dataclass(frozen=True)
class Settings:
    """Bound and noise of a step. They are fixed when its first samples arrive."""

    max_grad_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not LEAST_BOUND <= self.max_grad_norm < math.inf:
            raise PrivateTrainingError(
                f"max_grad_norm must be positive, finite and at least {LEAST_BOUND}, so that squares of norms do not "
                f"vanish, got {self.max_grad_norm}."
            )
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivateTrainingError(
                f"noise_multiplier must be finite and not negative, got {self.noise_multiplier}."
            )


class Stage(Enum):
    """How far a step is."""

    OPEN = auto()  # samples may arrive
    BETWEEN_PARTS = auto()  # parts of a split batch have arrived, and others are to come
    RELEASED = auto()  # `p.grad` holds the noised gradients of the last step


class PrivateStep:
    """The samples of one step, from their backward passes to the release of the sum.

    Attributes:
        stage: how far the step is.
        settings: its bound and its noise, from the call of the model on.
        parts: the sums of the parts of a split batch before the last backward passes.
        arrived: the number of backward passes since the last release.
        row_count: the number of samples (or units) in them.
        failed: the number of calls of the model or backward passes that have failed since then.
        is_dropped: whether the samples of the last backward pass were dropped, as by `zero_grad()`.

    >>> import torch
    >>> step, p = PrivateStep(), torch.zeros(2)
    >>> step.add({id(p): torch.ones(2)}, rows=3)
    >>> step.close_batch([p])
    >>> step.take()[id(p)], step.row_count
    (tensor([1., 1.]), 3)
    """

    def __init__(self) -> None:
        self.stage = Stage.OPEN
        self.settings: Settings | None = None
        self.parts: Sums | None = None
        self.arrived = self.row_count = self.failed = 0
        self.is_dropped = False
        self._batch: Sums | None = None  # of the backward passes since the last part
        self._shown: dict[int, tuple[ref[Tensor], int]] = {}  # what was put into `p.grad` for these, and its version

    @property
    def has_samples(self) -> bool:
        """Whether samples have arrived that no release has used."""
        return self._batch is not None

    def fix(self, current: Settings) -> Settings:
        """The settings of this step: those at the call of the model with its first samples."""
        if self.settings is None or (self._batch is None and self.parts is None):
            self.settings = current
        return self.settings

    def add(self, sums: Sums, rows: int) -> None:
        """Add the sums of a backward pass."""
        self._batch = _add(self._batch, sums)
        self.arrived += 1
        self.row_count += rows
        self.is_dropped = False
        if self.stage is Stage.RELEASED:
            self.stage = Stage.OPEN

    def show(self, params: Sequence[Tensor]) -> None:
        """Put copies of the sums so far into `p.grad` of these parameters."""
        assert self._batch is not None
        for p in params:
            p.grad = grad = _show(self._batch[id(p)], p)
            self._shown[id(p)] = (ref(grad), grad._version)

    def drop_cleared(self, params: Sequence[Tensor]) -> None:
        """Drop the samples since the last part if `p.grad` was set to None, as by `model.zero_grad()`.

        The values of `p.grad` decide nothing: they depend on the samples.
        """
        if self._batch is not None and self._shown and all(p.grad is None for p in params):
            self.drop_batch()

    def is_grad_left(self, params: Sequence[Tensor]) -> bool:
        """Whether `p.grad` is still what the last step has left in it."""
        if self.stage is not Stage.RELEASED:
            return False
        left = [(p.grad, *self._shown.get(id(p), (None, 0))) for p in params]
        return any(g is not None and made is not None and g is made() and g._version == v for g, made, v in left)

    def close_batch(self, params: Sequence[Tensor]) -> None:
        """Add the sums since the last part to those of the parts."""
        self.drop_cleared(params)
        if self._batch is not None:
            self.parts = _add(self.parts, self._batch)
        self._batch = None

    def close_part(self) -> None:
        """Wait for further parts of the batch."""
        self.drop_batch()
        self.stage = Stage.BETWEEN_PARTS

    def take(self) -> Sums:
        """The sums of all parts, which the step no longer has."""
        sums, self.parts = self.parts or {}, None
        return sums

    def close(self, params: Sequence[Tensor]) -> None:
        """End the step: `p.grad` now holds what was released."""
        self.forget()
        self.is_dropped = False
        self._shown = {id(p): (ref(p.grad), p.grad._version) for p in params if p.grad is not None}
        self.stage = Stage.RELEASED

    def drop_batch(self) -> None:
        """Forget the samples since the last part."""
        self.is_dropped |= self._batch is not None
        self._batch = None
        self._shown.clear()
        self.arrived = self.row_count = 0

    def forget(self) -> None:
        """Forget all samples that have arrived since the last release."""
        self.drop_batch()
        self.parts = self.settings = None
        if self.stage is Stage.BETWEEN_PARTS:
            self.stage = Stage.OPEN

    def clear(self) -> None:
        """`p.grad` is cleared: forget the samples, except parts of a split batch."""
        if self.stage is Stage.BETWEEN_PARTS:
            self.drop_batch()
        else:
            self.forget()
            self.stage = Stage.OPEN


def _add(total: Sums | None, part: Sums) -> Sums:
    """Add sums by parameter. A parameter may be in one of them only."""
    if total is None:
        return part
    return {key: _add_both(total.get(key), part.get(key)) for key in total | part}


def _add_both(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        found = b if a is None else a
        assert found is not None
        return found
    return a + b


def _show(total: Tensor, p: Tensor) -> Tensor:
    """A copy of a sum for `p.grad`. It takes memory only if somebody changes it."""
    return _torch.clone_lazily(total) if total.dtype == p.dtype else total.to(p.dtype)
