"""Base classes of the engines. An engine has a model, a batch, and a method for each quantity that it can compute."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from benchmarks.rows import Projection, Rows, compute_clipped_sum, compute_gram, compute_norms
from benchmarks.workloads import GPT, Workload, compute_loss, compute_losses

QUANTITIES = ("dense", "norms", "clip", "gram", "project")


class NoGradient(Exception):
    """An engine ran without an error, but computed no gradient for a parameter."""


class Engine:
    """A way to compute per-sample gradients.

    A step is one forward pass, its backward pass, and the computation of one quantity. Each quantity is a method.

    With `adapted=True` the engine may change the model to an equivalent one that it supports. `note` then describes the
    change. It stays empty if there is no such change.
    """

    name = ""
    quantities: tuple[str, ...] = QUANTITIES

    def __init__(self, workload: Workload, adapted: bool = False) -> None:
        self.model, self.x, self.labels = workload.build()
        self.note = self.adapt() if adapted else ""
        self.setup()

    def setup(self) -> None:
        """Prepare the model for the steps, e.g. add hooks."""

    def adapt(self) -> str:
        """Change the model to an equivalent one that more engines support; return a description of the change."""
        if isinstance(self.model, GPT):
            self.model.expand_positions = True
            return "position ids as (B, T)"
        return ""

    def step(self, quantity: str) -> Any:
        """Run one step. The result is valid until `clear` is called."""
        return getattr(self, quantity)()

    def clear(self) -> None:
        """Free the result of the last step, as a training loop does before its next step."""
        for p in self.model.parameters():
            p.grad = None

    def compute_loss(self) -> Tensor:
        """Sum of the losses of the samples."""
        return compute_loss(self.model(self.x), self.labels)

    def compute_losses(self) -> Tensor:
        """`(B,)`: the loss of each sample."""
        return compute_losses(self.model(self.x), self.labels)

    def collect(self, attribute: str) -> Rows:
        """Read an attribute of each parameter, where the engine has stored its result."""
        values = {name: getattr(p, attribute, None) for name, p in self.model.named_parameters()}
        missing = [name for name, value in values.items() if value is None]
        if missing:
            raise NoGradient(f"'{missing[0]}' has no {attribute}")
        return {name: value for name, value in values.items() if value is not None}


class RowsEngine(Engine):
    """An engine that computes dense rows. The other quantities are computed from the rows."""

    def dense(self) -> Rows:
        """`{name: (B, *shape)}`: the gradient of the loss of each sample."""
        raise NotImplementedError

    def norms(self) -> Tensor:
        return compute_norms(self.dense())

    def clip(self) -> Rows:
        rows = self.dense()
        return compute_clipped_sum(rows, compute_norms(rows))

    def gram(self) -> Tensor:
        return compute_gram(self.dense())

    def project(self) -> Tensor:
        return self.projection.project(self.dense())

    @cached_property
    def projection(self) -> Projection:
        return Projection(self.model)


def find_modules(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """All modules of a class, each as (parent, attribute name, module)."""
    return [(m, name, c) for m in model.modules() for name, c in m.named_children() if isinstance(c, kind)]


def format_error(error: Exception) -> str:
    """Text that stands for a result in tables."""
    return f"error: {type(error).__name__}"
