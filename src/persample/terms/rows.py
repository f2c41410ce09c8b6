"""Rows of a table: what an embedding contributes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample.terms.base import Term


@dataclass(frozen=True)
class Rows(Term):
    """`g_n[ids[n, t]] += grad[n, t]`: each looked-up row of a table of `count` rows gets its gradient.

    `ids` is `(batch, t)`, `grad` is `(batch, t, width)`.
    """

    ids: Tensor
    grad: Tensor
    count: int

    def dense(self) -> Tensor:
        batch, _, width = self.grad.shape
        sample = torch.arange(batch, device=self.ids.device).unsqueeze(1)
        table = self.grad.new_zeros(batch * self.count, width)
        table.index_add_(0, (sample * self.count + self.ids).flatten(), self.grad.flatten(0, 1))
        return table.unflatten(0, (batch, self.count))
