"""A loop over the samples with plain autograd. Norms and clipped sums are reduced sample by sample."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.engines.base import RowsEngine
from benchmarks.rows import Rows, clip_factors
from benchmarks.workloads import loss_of


class Loop(RowsEngine):
    name = "loop"

    def gradients(self) -> Iterator[tuple[Tensor, ...]]:
        """The gradient of each sample's loss, a tensor for each parameter."""
        parameters = list(self.model.parameters())
        for x, label in zip(self.x.split(1), self.labels.split(1), strict=True):
            yield torch.autograd.grad(loss_of(self.model(x), label), parameters)

    def dense(self) -> Rows:
        rows = {name: p.new_empty(len(self.x), *p.shape) for name, p in self.model.named_parameters()}
        for n, gradient in enumerate(self.gradients()):
            for r, part in zip(rows.values(), gradient, strict=True):
                r[n] = part
        return rows

    def norms(self) -> Tensor:
        return torch.stack([_norm(gradient) for gradient in self.gradients()])

    def clip(self) -> Rows:
        total = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for gradient in self.gradients():
            torch._foreach_add_(list(total.values()), torch._foreach_mul(gradient, clip_factors(_norm(gradient))))
        return total


def _norm(gradient: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(torch._foreach_norm(gradient)).norm()
