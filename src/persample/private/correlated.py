"""Noise that takes back parts of the noise of earlier steps, drawn again from its keys or kept."""

from __future__ import annotations

from collections.abc import Sequence
from os import getpid
from typing import Any

import torch
from torch import Tensor

from persample.private.errors import PrivateTrainingError
from persample.private.noise import _COUNTER_BYTES, _KEY_BYTES, Noise
from persample.private.strategies import Strategy

_RECORD = _COUNTER_BYTES + _KEY_BYTES


class CorrelatedNoise(Noise):
    """The noise `std * (C^-1 Z)[t]` of step t, where draw t of the source is row t of Z.

    The numbers of an earlier draw are a function of its key and its number, so they need no memory: a band of b takes
    b draws. `mix` changes the key of later draws only. The state has all keys so far, with the first draw of each.

    >>> from persample.private.strategies import Cancelling
    >>> noise, total = make_noise(Cancelling(steps=10, separation=5, share=0.5)), torch.zeros(2, 1000)
    >>> for row in total:
    ...     noise.add_to([row], std=1.0)
    >>> bool(-0.6 < torch.corrcoef(total)[0, 1] < -0.3)          # -0.5 / sqrt(1.25)
    True
    """

    def __init__(self, taps: Sequence[float]) -> None:
        super().__init__()
        self._taps = [float(tap) for tap in taps]
        self._keys = [(1, self._key)]  # the first draw of each key
        self._layout: list[Any] | None = None

    @property
    def draws(self) -> int:
        """The number of draws so far: that of the steps."""
        return self._draws

    def mix(self) -> None:
        """Draw later noise with another key. That of earlier steps, which later ones take back, stays."""
        super().mix()
        self._keys.append((self._draws + 1, self._key))

    def _find_key(self, draw: int) -> bytes:
        return next(key for first, key in reversed(self._keys) if first <= draw)

    def _leave_parent(self) -> None:
        if self._process != getpid():
            raise PrivateTrainingError(
                "Correlated noise cannot be continued in a forked process: parent and child would draw the same noise. "
                "Make the optimizer in the process that trains."
            )

    def get_state(self) -> Tensor:
        """The number of draws, and the keys with their first draws, as bytes."""
        self._leave_parent()
        records = [(self._draws, bytes(_KEY_BYTES)), *self._keys]
        numbers = b"".join(first.to_bytes(_COUNTER_BYTES, "little") + key for first, key in records)
        return torch.tensor(list(numbers), dtype=torch.uint8, device="cpu")

    def set_state(self, state: Tensor) -> None:
        """Continue where `get_state` was called."""
        numbers = bytes(state.tolist())
        records = [numbers[i : i + _RECORD] for i in range(0, len(numbers), _RECORD)]
        if len(records) < 2 or len(records[-1]) != _RECORD:
            raise PrivateTrainingError("The state of the noise is not that of correlated noise.")
        read = [(int.from_bytes(r[:_COUNTER_BYTES], "little"), r[_COUNTER_BYTES:]) for r in records]
        self._draws, self._keys, self._key = read[0][0], read[1:], read[-1][1]
        self._layout = None

    def _check_layout(self, totals: Sequence[Tensor]) -> None:
        """Raise if a draw would give earlier noise to other numbers than before."""
        layout = [(t.shape, t.dtype, t.device) for t in totals]
        if self._layout not in (None, layout):
            raise PrivateTrainingError(
                "The trainable parameters have changed. Correlated noise takes back noise of earlier steps, parameter "
                "by parameter: freeze or unfreeze parameters before make_private."
            )
        self._layout = layout

    @torch.no_grad()
    def add_to(self, totals: Sequence[Tensor], std: float) -> None:
        """Add the noise of the next step to contiguous real tensors, in place."""
        self._leave_parent()
        self._check_layout(totals)
        self._draws += 1
        for lag, tap in enumerate(self._taps[: self._draws]):
            if tap:
                self._add_draw(totals, std * tap, self._draws - lag)


class KeptNoise(CorrelatedNoise):
    """The same for a banded C, whose inverse has no band: the noise of the last steps, before scaling, is kept.

    After `set_state`, it is computed again from the first draw on.
    """

    def __init__(self, taps: Sequence[float]) -> None:
        super().__init__(taps)
        self._past: list[list[Tensor]] = []  # the last one first
        self._newest = 0  # the draw of the last one

    def set_state(self, state: Tensor) -> None:
        super().set_state(state)
        self._newest = 0

    @torch.no_grad()
    def add_to(self, totals: Sequence[Tensor], std: float) -> None:
        """Add the noise of the next step to contiguous real tensors, in place."""
        if len(self._taps) == 1:
            super().add_to(totals, std)
            return
        self._leave_parent()
        self._check_layout(totals)
        self._draws += 1
        is_known = self._newest == self._draws - 1  # not after a restart, nor after a draw that was interrupted
        for draw in range(self._draws if is_known else 1, self._draws + 1):
            self._keep(totals, draw)
        for total, noise in zip(totals, self._past[0], strict=True):
            total.add_(noise, alpha=std)

    def _keep(self, totals: Sequence[Tensor], draw: int) -> None:
        """Solve `C y = z` for the row of a draw."""
        if draw == 1:
            self._past = []
        row = [torch.zeros_like(total) for total in totals]
        self._add_draw(row, 1.0, draw)
        for tap, earlier in zip(self._taps[1:], self._past, strict=False):
            for part, before in zip(row, earlier, strict=True):
                part.sub_(before, alpha=tap)
        self._past, self._newest = [row, *self._past][: max(1, len(self._taps) - 1)], draw


def make_noise(strategy: Strategy) -> CorrelatedNoise:
    """The noise of a strategy."""
    return (KeptNoise if strategy.is_stored else CorrelatedNoise)(strategy.taps)
