"""What every engine is: a model and a batch of its own, and a step for each quantity that it can give."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from benchmarks.rows import Projection, Rows, clip_of, gram_of, norms_of
from benchmarks.workloads import GPT, Workload, loss_of, losses_of

QUANTITIES = ("dense", "norms", "clip", "gram", "project")


class NoGradient(Exception):
    """An engine ran, and left nothing for a parameter."""


class Engine:
    """A way to per-sample gradients. A step is one forward pass, its backward, and the answer to one question.

    `adapted` allows changes to the model that leave its function as it is, for engines that do not take it as written;
    `note` then says what was changed, or stays empty if there is nothing that would help.
    """

    name = ""
    offers: tuple[str, ...] = QUANTITIES

    def __init__(self, workload: Workload, adapted: bool = False) -> None:
        self.model, self.x, self.labels = workload.build()
        self.note = self.adapt() if adapted else ""
        self.setup()

    def setup(self) -> None:
        """Prepares the model for the steps: hooks and the like."""

    def adapt(self) -> str:
        """Changes the model to a form that more engines take; says what was done."""
        if isinstance(self.model, GPT):
            self.model.expand_positions = True
            return "position ids as (B, T)"
        return ""

    def step(self, quantity: str) -> Any:
        """One step; the answer belongs to the caller until `clear`."""
        return getattr(self, quantity)()

    def clear(self) -> None:
        """Forgets the last answer, as a training loop does before its next step."""
        for p in self.model.parameters():
            p.grad = None

    def loss(self) -> Tensor:
        """The sum of the samples' losses."""
        return loss_of(self.model(self.x), self.labels)

    def losses(self) -> Tensor:
        """`(B,)`: the samples' losses."""
        return losses_of(self.model(self.x), self.labels)

    def named(self, attribute: str) -> Rows:
        """What the engine has left at each parameter, by name."""
        found = {name: getattr(p, attribute, None) for name, p in self.model.named_parameters()}
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise NoGradient(f"'{missing[0]}' has no {attribute}")
        return {name: value for name, value in found.items() if value is not None}


class RowsEngine(Engine):
    """An engine that gives dense rows, from which the other answers are taken."""

    def dense(self) -> Rows:
        """`{name: (B, *shape)}`: the gradient of each sample's loss."""
        raise NotImplementedError

    def norms(self) -> Tensor:
        return norms_of(self.dense())

    def clip(self) -> Rows:
        return clip_of(self.dense())

    def gram(self) -> Tensor:
        return gram_of(self.dense())

    def project(self) -> Tensor:
        return self.projection.of(self.dense())

    @cached_property
    def projection(self) -> Projection:
        return Projection(self.model)


def modules_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every module of a kind, with the module it belongs to and its name there."""
    return [(m, name, c) for m in model.modules() for name, c in m.named_children() if isinstance(c, kind)]
