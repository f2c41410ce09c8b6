"""How the update of an optimizer depends on the gradient of a step: a linear map for each weight.

An update is `-M g - r`, where g is the gradient of the step and r comes from earlier steps and from weight decay. With
what normalises the gradient held as the step makes it, the map M is linear and symmetric:

    SGD         lr · own                                 own: the share of g in the momentum buffer, plus Nesterov's
    Adam        lr · own / (√v + ε)                      v: the second moments after the step
    Muon        lr · own · L                             L: the product of the Newton-Schulz steps

So the inner product of a sample's gradient g_i with M ∇L of another loss L is what the sample takes from that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Muon, Optimizer

from persample.errors import PerSampleError

# The settings of a group of parameters, and the state of a parameter before the step.
Group = Mapping[str, Any]
State = Mapping[str, Any]

# From a parameter, a direction of its shape, and its gradient in the step: M times the direction.
Map = Callable[[Tensor, Tensor, Tensor], Tensor]


def map_by_sgd(group: Group, state: State, parameter: Tensor, grad: Tensor, direction: Tensor) -> Tensor:
    """SGD, also with momentum, dampening and Nesterov."""
    momentum = group["momentum"]
    own = 1.0
    if momentum:
        is_first = state.get("momentum_buffer") is None
        own = 1.0 if is_first else 1 - group["dampening"]
        own = 1 + momentum * own if group["nesterov"] else own
    return direction * own


def map_by_adam(group: Group, state: State, parameter: Tensor, grad: Tensor, direction: Tensor) -> Tensor:
    """Adam and AdamW, with the second moments that the step will have."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state.get("step", 0)) + 1
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        grad = grad + group["weight_decay"] * parameter.detach()
    squares = beta2 * state.get("exp_avg_sq", 0.0) + (1 - beta2) * grad.square()
    if group["amsgrad"] and "max_exp_avg_sq" in state:
        squares = torch.maximum(squares, state["max_exp_avg_sq"])
    scale = (squares / (1 - beta2**step)).sqrt() + group["eps"]
    return direction * ((1 - beta1) / (1 - beta1**step)) / scale


def map_by_muon(group: Group, state: State, parameter: Tensor, grad: Tensor, direction: Tensor) -> Tensor:
    """Muon: the Newton-Schulz iteration X ← (a + b XXᵀ + c (XXᵀ)²) X is a product L X with a symmetric L."""
    momentum, (a, b, c) = group["momentum"], group["ns_coefficients"]
    before = state.get("momentum_buffer")
    buffer = (1 - momentum) * grad if before is None else before.lerp(grad, 1 - momentum)
    own = 1 - momentum
    update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
    own = own + momentum * own if group["nesterov"] else own
    is_tall = grad.shape[0] > grad.shape[1]
    x, mapped = (update.mT, direction.mT) if is_tall else (update, direction)
    norm = x.norm().clamp(min=group["eps"])
    x, mapped = x / norm, mapped / norm
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x, mapped = a * x + polynomial @ x, a * mapped + polynomial @ mapped
    rows, columns = grad.shape
    ratio = {"original": max(1.0, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
    return (mapped.mT if is_tall else mapped) * own * ratio[group["adjust_lr_fn"] or "original"]


_MAPS: dict[type[Optimizer], Callable[[Group, State, Tensor, Tensor, Tensor], Tensor]] = {
    SGD: map_by_sgd,
    Adam: map_by_adam,  # and AdamW, which is a subclass
    Muon: map_by_muon,
}


def unwrap(optimizer: Any) -> Optimizer:
    """The optimizer itself, inside of what accelerate, Lightning and others put around it."""
    while not isinstance(optimizer, tuple(_MAPS)) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class Update:
    """The map M of each weight that some optimizers step.

    Args:
        optimizers: the optimizers; without any, M is the identity.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = [unwrap(optimizer) for optimizer in optimizers]
        for optimizer in self._optimizers:
            if not isinstance(optimizer, tuple(_MAPS)):
                raise PerSampleError(
                    f"The update of {type(optimizer).__name__} is not known. Known are SGD, Adam, AdamW and Muon of "
                    "torch.optim. Without an optimizer, values are plain inner products of gradients."
                )

    @property
    def needs_grads(self) -> bool:
        """Whether the map depends on the gradient of the step."""
        return not all(isinstance(optimizer, SGD) for optimizer in self._optimizers)

    def find_maps(self) -> Map:
        """M as a function of a parameter, a direction, and the gradient of the step, as the next step makes it.

        Parameters that no optimizer steps are mapped to zero.
        """
        if not self._optimizers:
            return lambda parameter, direction, grad: direction
        places = {
            id(p): (next(make for kind, make in _MAPS.items() if isinstance(optimizer, kind)), group, optimizer.state)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

        def map_direction(parameter: Tensor, direction: Tensor, grad: Tensor) -> Tensor:
            if id(parameter) not in places:
                return torch.zeros_like(direction)
            make, group, state = places[id(parameter)]
            sign = -1.0 if group.get("maximize") else 1.0
            mapped = make(group, state.get(parameter, {}), parameter, sign * grad, direction)
            return mapped * (sign * float(group["lr"]))

        return map_direction
