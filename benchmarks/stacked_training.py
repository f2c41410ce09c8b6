"""Train many small models at once: one model with an additional dimension in each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Stacked = dict[str, Tensor]  # by parameter name, with the models in the first dimension


@dataclass(frozen=True)
class Task:
    """Data for training and test, a model, and its training."""

    make_model: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    epochs: int
    loss: Literal["cross entropy", "squared error"] = "cross entropy"
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    rate: float = 3e-3
    decay: float = 0.0

    @property
    def loss_fn(self) -> nn.Module:
        """The loss as a module."""
        return nn.CrossEntropyLoss() if self.loss == "cross entropy" else nn.MSELoss()

    def compute_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample: the mean over its positions or outputs."""
        compute = F.cross_entropy if self.loss == "cross entropy" else F.mse_loss
        losses = compute(outputs, targets, reduction="none")
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


class StackedTraining:
    """Trainings of one task on subsets of its data, `members` `(models, size)`, with one seed for each."""

    def __init__(self, task: Task, members: Tensor, seeds: Sequence[int]) -> None:
        self._task, self._members = task, members
        models = []
        for seed in seeds:
            torch.manual_seed(seed)
            models.append(dict(task.make_model().named_parameters()))
        self._base = copy.deepcopy(task.make_model()).to("meta")
        self._generators = [torch.Generator().manual_seed(seed + 1) for seed in seeds]
        self._parameters = {
            name: torch.stack([model[name].detach() for model in models]).requires_grad_() for name in models[0]
        }

    def run(self, checkpoints: int = 1, batch_size: int = 32) -> list[Stacked]:
        """Train; return the parameters at equal distances, the last ones at the end."""
        task, states = self._task, []
        parameters = list(self._parameters.values())
        optimizer: torch.optim.Optimizer
        if task.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, task.rate, momentum=0.9, weight_decay=task.decay)
        else:
            optimizer = torch.optim.AdamW(parameters, task.rate, weight_decay=task.decay)
        for epoch in range(1, task.epochs + 1):
            for ids in self._shuffle().split(batch_size, dim=1):
                optimizer.zero_grad()
                self._compute_losses(task.data[0][ids], task.data[1][ids], data_dim=0).mean(1).sum().backward()
                optimizer.step()
            if epoch * checkpoints // task.epochs > (epoch - 1) * checkpoints // task.epochs:
                states.append({name: p.detach().clone() for name, p in self._parameters.items()})
        return states

    @torch.no_grad()
    def compute_test_losses(self) -> Tensor:
        """`(models, tests)`."""
        return self._compute_losses(*self._task.test, data_dim=None)

    def _shuffle(self) -> Tensor:
        size = self._members.shape[1]
        pairs = zip(self._members, self._generators, strict=True)
        return torch.stack([ids[torch.randperm(size, generator=generator)] for ids, generator in pairs])

    def _compute_losses(self, inputs: Tensor, targets: Tensor, data_dim: int | None) -> Tensor:
        def compute(parameters: Stacked, inputs: Tensor, targets: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self._base, parameters, (inputs,))
            return self._task.compute_losses(outputs, targets)

        return torch.func.vmap(compute, (0, data_dim, data_dim))(self._parameters, inputs, targets)


def split_models(states: Sequence[Stacked], model: int) -> list[Stacked]:
    """The state dicts of one of the models."""
    return [{name: part[model].clone() for name, part in state.items()} for state in states]
