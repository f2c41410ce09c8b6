"""The sequences of a batch, as the samples have them and as the cells go through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Each sample has `each` sequences. All are as long, or `length` says how long the one of each sample is.

    A sample is a `(T, each, ·)`, or a `(T, ·)` if it was packed; cells take the `(n, T, ·)` of all sequences.
    """

    batch: int
    each: int
    length: Tensor | None

    def apart(self, rows: Tensor) -> Tensor:
        """From `(batch, T, each, ·)` to `(n, T, ·)`."""
        rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
        return rows.transpose(1, 2).flatten(0, 1)

    def joined(self, rows: Tensor) -> Tensor:
        """From `(n, T, ·)` to `(batch, T * each, ·)`."""
        return rows.unflatten(0, (self.batch, self.each)).transpose(1, 2).flatten(1, 2)

    def reversed(self, rows: Tensor) -> Tensor:
        """The steps from each sequence's own end to its start, and what is beyond it as it is; its own inverse."""
        if self.length is None:
            return rows.flip(1)
        step = torch.arange(rows.shape[1], device=rows.device)
        mirrored = self.length.unsqueeze(1) - 1 - step
        order = torch.where(mirrored >= 0, mirrored, step)
        return rows.gather(1, order.unsqueeze(-1).expand_as(rows))

    @property
    def ends(self) -> Any:
        """The index of what is after the last step, in `(n, 1 + T, ·)`."""
        if self.length is None:
            return slice(None), -1
        return torch.arange(self.batch, device=self.length.device), self.length
