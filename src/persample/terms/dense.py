"""A contribution that is small, or has no structure to keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample.terms.base import Term


@dataclass(frozen=True)
class Dense(Term):
    """The per-sample gradients as they are: `values` is `(batch, *weight.shape)`."""

    values: Tensor

    @property
    def batch(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    def dense(self) -> Tensor:
        return self.values

    def some(self, start: int, stop: int) -> Dense:
        return Dense(self.values[start:stop])

    def part(self, start: int, stop: int) -> Dense:
        return Dense(self.values[:, start:stop])
