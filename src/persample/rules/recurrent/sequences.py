"""Conversions between the sequences of each sample and one batch of all sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Sequences of `batch` samples, `each` per sample.

    The rule of a layer gets the tensors of a sample as `(T, each, ·)`, or as `(T, ·)` if they were packed. Cells take
    all n = batch * each sequences as `(n, T, ·)`. For packed sequences, one per sample, `length` has their lengths;
    otherwise it is None and all sequences have T steps.
    """

    batch: int
    each: int
    length: Tensor | None

    def split(self, rows: Tensor) -> Tensor:
        """`(batch, T, each, ·)` to `(n, T, ·)`."""
        rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
        return rows.transpose(1, 2).flatten(0, 1)

    def join(self, rows: Tensor) -> Tensor:
        """`(n, T, ·)` to `(batch, T * each, ·)`."""
        return rows.unflatten(0, (self.batch, self.each)).transpose(1, 2).flatten(1, 2)

    def reverse(self, rows: Tensor) -> Tensor:
        """Reverse the steps of each sequence, and leave the padding after its end unchanged."""
        if self.length is None:
            return rows.flip(1)
        step = torch.arange(rows.shape[1], device=rows.device)
        mirrored = self.length.unsqueeze(1) - 1 - step
        order = torch.where(mirrored >= 0, mirrored, step)
        return rows.gather(1, order.unsqueeze(-1).expand_as(rows))

    @property
    def ends(self) -> Any:
        """The index of the state after the last step of each sequence in `(n, 1 + T, ·)`."""
        if self.length is None:
            return slice(None), -1
        return torch.arange(self.batch, device=self.length.device), self.length
