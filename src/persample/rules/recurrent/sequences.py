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
    all n = batch * each sequences as `(T, n, ·)`, so that the memory of a step is contiguous. For packed sequences, one
    per sample, `length` has their lengths; otherwise it is None and all sequences have T steps.
    """

    batch: int
    each: int
    length: Tensor | None

    def split(self, rows: Tensor) -> Tensor:
        """`(batch, T, each, ·)` to `(T, n, ·)`."""
        rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
        return rows.transpose(0, 1).flatten(1, 2)

    def join(self, rows: Tensor) -> Tensor:
        """`(T, n, ·)` to `(batch, T * each, ·)`."""
        return rows.unflatten(1, (self.batch, self.each)).transpose(0, 1).flatten(1, 2)

    def reverse(self, rows: Tensor) -> Tensor:
        """Reverse the steps of each sequence, and leave the padding after its end unchanged."""
        if self.length is None:
            return rows.flip(0)
        step = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        mirrored = self.length - 1 - step
        order = torch.where(mirrored >= 0, mirrored, step)
        return rows.gather(0, order.unsqueeze(-1).expand_as(rows))

    @property
    def ends(self) -> Any:
        """The index of the state after the last step of each sequence in `(1 + T, n, ·)`."""
        if self.length is None:
            return -1
        return self.length, torch.arange(self.batch, device=self.length.device)
