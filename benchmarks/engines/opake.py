"""Opake: `clipped_grad`, which computes the rows by vmap and adds them up clipped."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.engines.base import Engine
from benchmarks.rows import MAX_NORM, Rows
from benchmarks.workloads import compute_loss


def make_clipped_grad(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """The function of parameters, inputs and labels that Opake makes, and its first state."""
    from opake.dpsgd.clipping import clipped_grad

    def compute_sample_loss(parameters: Rows, x: Tensor, label: Tensor) -> Tensor:
        return compute_loss(functional_call(model, parameters, (x[None],)), label[None])

    return clipped_grad(compute_sample_loss, batch_argnums=(1, 2), clipping_norm=MAX_NORM, **options)


def take_parameters(model: nn.Module) -> Rows:
    """The parameters as the function takes them."""
    return {name: p.detach() for name, p in model.named_parameters()}


class Opake(Engine):
    name = "Opake"
    quantities = ("norms", "clip")

    def setup(self) -> None:
        self.run_clip, self.state = make_clipped_grad(self.model)
        self.run_norms, _ = make_clipped_grad(self.model, return_aux=True)

    def norms(self) -> Tensor:
        (_, aux), self.state = self.run_norms(take_parameters(self.model), self.x, self.labels, state=self.state)
        norms: Tensor = aux.grad_norms
        return norms

    def clip(self) -> Rows:
        clipped, self.state = self.run_clip(take_parameters(self.model), self.x, self.labels, state=self.state)
        total: Rows = clipped.pytree
        return total
