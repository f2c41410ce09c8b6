"""The updates of torch's optimizers as functions that can be differentiated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from persample.scanning.errors import ScanError

State = tuple[Sequence[Tensor], ...]  # the parameters, and lists of moments in the same order
Grads = Sequence[Tensor | None]


class Update(ABC):
    """One step of an optimizer. `options` are those of the group of each parameter."""

    moments = 0  # lists of them in a state
    refused: tuple[str, ...] = ()  # options that change the update in another way

    def __init__(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        self.names, self._options = list(options), list(options.values())
        for own in self._options:
            if wrong := [name for name in self.refused if own.get(name)]:
                raise ScanError(f"A replay has no formula for {wrong[0]}=True.")

    def start(self, parameters: Sequence[Tensor]) -> State:
        """The state before the first step."""
        return (parameters, *([torch.zeros_like(p) for p in parameters] for _ in range(self.moments)))

    def apply(self, state: State, grads: Grads, step: int, rate: float | None) -> State:
        """The state after a step. A parameter without a gradient stays as it is."""
        columns = []
        for *before, grad, options in zip(*state, grads, self._options, strict=True):
            used = options if rate is None else {**options, "lr": rate}
            columns.append(before if grad is None else self.update(before, grad, step, used))
        return tuple(list(column) for column in zip(*columns, strict=True))

    @abstractmethod
    def update(self, before: Sequence[Tensor], grad: Tensor, step: int, options: Mapping[str, Any]) -> list[Tensor]:
        """A parameter and its moments after a step."""


class SGDUpdate(Update):
    """`torch.optim.SGD`."""

    moments, refused = 1, ("maximize",)

    def update(self, before: Sequence[Tensor], grad: Tensor, step: int, options: Mapping[str, Any]) -> list[Tensor]:
        p, moment = before
        grad = grad + options["weight_decay"] * p
        share = 1 - options["dampening"] if step else 1.0
        moment = options["momentum"] * moment + share * grad
        moved = grad if not options["momentum"] else grad + options["momentum"] * moment
        moved = moment if options["momentum"] and not options["nesterov"] else moved
        return [p - options["lr"] * moved, moment]


class AdamUpdate(Update):
    """`torch.optim.Adam` and `torch.optim.AdamW`, which decays weights apart from the gradient."""

    moments, refused = 2, ("maximize", "amsgrad")

    def __init__(self, options: Mapping[str, Mapping[str, Any]], is_decoupled: bool) -> None:
        super().__init__(options)
        self._is_decoupled = is_decoupled

    def update(self, before: Sequence[Tensor], grad: Tensor, step: int, options: Mapping[str, Any]) -> list[Tensor]:
        p, first, second = before
        (beta1, beta2), rate, decay = options["betas"], options["lr"], options["weight_decay"]
        is_decoupled = self._is_decoupled or options.get("decoupled_weight_decay", False)
        p, grad = (p * (1 - rate * decay), grad) if is_decoupled else (p, grad + decay * p)
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad.square()
        is_zero = second == 0  # where the root has no derivative, and the gradient is zero
        root = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, second).sqrt())
        length = root / (1 - beta2 ** (step + 1)) ** 0.5 + options["eps"]
        return [p - rate / (1 - beta1 ** (step + 1)) * first / length, first, second]


def make_update(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Update:
    """The update of an optimizer for the parameters of a model that it trains."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    options = {name: groups[id(p)] for name, p in parameters.items() if id(p) in groups and p.requires_grad}
    if not options:
        raise ScanError("The optimizer trains no parameter of the model.")
    if type(optimizer) is SGD:
        return SGDUpdate(options)
    if type(optimizer) in (Adam, AdamW):
        return AdamUpdate(options, type(optimizer) is AdamW)
    raise ScanError(f"A replay needs SGD, Adam or AdamW of torch.optim, got {type(optimizer).__name__}.")
