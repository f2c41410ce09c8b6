"""persample. What will be asked is said beforehand where that can be said: for norms and clipped sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import persample
from benchmarks.engines.base import Engine
from benchmarks.rows import MAX_NORM, PROJECTED, Rows


class Ours(Engine):
    name = "ours"

    def recorded(self, **options: Any) -> persample.PerSampleGradients:
        """The gradients of one forward and backward pass."""
        with persample.record(self.model, loss_reduction="sum", **options) as grads:
            self.loss().backward()
        return grads

    def dense(self) -> Rows:
        return self.recorded().dense()

    def norms(self) -> Tensor:
        norms = self.recorded(keep="norms").norms()
        assert isinstance(norms, Tensor)
        return norms

    def clip(self) -> Rows:
        return self.recorded(keep="clip", max_norm=MAX_NORM).clip(MAX_NORM)

    def gram(self) -> Tensor:
        return self.recorded().gram()

    def project(self) -> Tensor:
        return self.recorded().project(PROJECTED)


class OursTwice(Ours):
    """The clipped sum by two backward passes, which keep nothing between the forward and the answer."""

    name = "ours, 2 passes"
    offers = ("clip",)

    def clip(self) -> Rows:
        return self.recorded(keep="clip", max_norm=MAX_NORM, passes=2).clip(MAX_NORM)
