"""The step that everything is compared to: forward and backward, with the gradient of the batch."""

from __future__ import annotations

from benchmarks.engines.base import Engine
from benchmarks.rows import Rows


class Plain(Engine):
    name = "plain"
    offers = ()

    def total(self) -> Rows:
        """`{name: shape}`: the gradient of the sum of the losses."""
        self.loss().backward()
        return self.named("grad")
