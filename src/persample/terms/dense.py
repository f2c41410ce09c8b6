"""A contribution that is small, or has no structure to keep."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from persample.terms.base import Term


@dataclass(frozen=True)
class Dense(Term):
    """The per-sample gradients as they are: `values` is `(batch, *weight.shape)`."""

    values: Tensor

    def dense(self) -> Tensor:
        return self.values
