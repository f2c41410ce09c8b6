"""A loop over the samples with plain autograd. Norms and clipped sums are computed without storing the rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.engines.base import RowsEngine
from benchmarks.rows import Rows, compute_clip_factors, compute_norm
from benchmarks.workloads import compute_loss


class Loop(RowsEngine):
    name = "loop"

    def compute_gradients(self) -> Iterator[tuple[Tensor, ...]]:
        """The gradient of the loss of each sample, with a tensor for each parameter."""
        parameters = list(self.model.parameters())
        for x, label in zip(self.x.split(1), self.labels.split(1), strict=True):
            yield torch.autograd.grad(compute_loss(self.model(x), label), parameters)

    def dense(self) -> Rows:
        rows = {name: p.new_empty(len(self.x), *p.shape) for name, p in self.model.named_parameters()}
        for n, gradient in enumerate(self.compute_gradients()):
            for r, part in zip(rows.values(), gradient, strict=True):
                r[n] = part
        return rows

    def norms(self) -> Tensor:
        return torch.stack([compute_norm(gradient) for gradient in self.compute_gradients()])

    def clip(self) -> Rows:
        total = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for gradient in self.compute_gradients():
            factor = compute_clip_factors(compute_norm(gradient))
            torch._foreach_add_(list(total.values()), torch._foreach_mul(gradient, factor))
        return total
