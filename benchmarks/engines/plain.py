"""The plain step, to which everything is compared: forward and backward, with the gradient of the batch."""

from __future__ import annotations

from benchmarks.engines.base import Engine
from benchmarks.rows import Rows


class Plain(Engine):
    name = "plain"
    quantities = ()

    def total(self) -> Rows:
        """`{name: shape}`: the gradient of the sum of the losses."""
        self.compute_loss().backward()
        return self.collect("grad")
