"""persample. For norms and clipped sums, `keep` says before the forward pass what will be asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import persample
from benchmarks.engines.base import Engine
from benchmarks.rows import MAX_NORM, PROJECTION_SIZE, Rows


class Ours(Engine):
    name = "ours"

    def record(self, **options: Any) -> Any:
        """Record one forward and backward pass; return its per-sample gradients."""
        with persample.record(self.model, loss_reduction="sum", **options) as grads:
            self.compute_loss().backward()
        return grads

    def dense(self) -> Rows:
        return self.record().dense()

    def norms(self) -> Tensor:
        return self.record(keep="norms").norms()

    def clip(self) -> Rows:
        return self.record(keep="clip", max_norm=MAX_NORM).clip(MAX_NORM)

    def gram(self) -> Tensor:
        return self.record().gram()

    def project(self) -> Tensor:
        return self.record().project(PROJECTION_SIZE)


class OursTwice(Ours):
    """The clipped sum with two backward passes, which keeps no structured gradients in memory."""

    name = "ours, 2 passes"
    quantities = ("clip",)

    def clip(self) -> Rows:
        return self.record(keep="clip", max_norm=MAX_NORM, passes=2).clip(MAX_NORM)
