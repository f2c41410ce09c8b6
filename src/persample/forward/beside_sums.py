"""Weights beside a sum over the samples: `exp(-s) * loss + s` with learned variances, or a penalty on the weights.

A weight that multiplies a sum multiplies each sample's part, and its own gradient has a row for each of these parts.
What is added to a sum belongs to no sample: its gradient is kept apart, for `grads.shared()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from persample import _torch
from persample.backward import Collector
from persample.errors import SamplesMixed, get_op_name
from persample.forward.known_tensors import TensorMap
from persample.layouts import Call, NoParts, Reduced, Summed
from persample.terms import Dense


class Follower(Protocol):
    """What is needed of the tracker."""

    @property
    def collector(self) -> Collector: ...

    def place(self) -> str:
        """The module whose code is running, in words."""

    @property
    def summed(self) -> TensorMap[Summed]:
        """How sums over the samples were computed."""


def is_beside_sum(call: Call) -> bool:
    """Whether a call combines weights with sums over the samples, and with nothing else that depends on the batch."""
    return all(where is None or isinstance(where, Reduced) for where in call.where) and call.facts.keeps_sums


def run_beside_sum(call: Call, weights: dict[int, Tensor], follower: Follower) -> Any:
    """Run such a call. The caller finds the layout of the result."""
    collector = follower.collector
    if not call.facts.is_bilinear:
        tensors = enumerate(call.tensors)
        tapped = [_Apart.apply(t.detach(), [t], collector, collector.anchor) if i in weights else t for i, t in tensors]
        args, kwargs = call.fill(tapped)
        return call.func(*args, **kwargs)
    is_first = isinstance(call.where[0], Reduced)
    if len(call.tensors) != 2 or len(weights) != 1 or (call.facts.is_division and not is_first):
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {follower.place()}, is not linear in a sum over the samples. Multiply each "
            "sample's loss before it is added up."
        )
    ((position, weight),) = weights.items()
    parts, rest = _find_parts(call, 1 - position, follower)
    collector.expect([weight])
    args, kwargs = call.fill([t.detach() if i == position else t for i, t in enumerate(call.tensors)])
    result = call.func(*args, **kwargs)
    detached = [tensor.detach() for tensor in call.tensors]
    product = _Product(call.with_tensors(detached), position, weight, parts, rest, collector)
    return _Factor.apply(result, product, collector.anchor)


def _find_parts(call: Call, position: int, follower: Follower) -> tuple[Tensor, Tensor | None]:
    """`(batch, *shape)`: each sample's part of the sum that a weight is multiplied with; what belongs to no sample."""
    summed = follower.summed.get(call.tensors[position])
    try:
        if summed is None:
            raise NoParts("it was not seen how the sum was computed")
        with torch.no_grad(), _torch.DisableTorchFunction():
            parts, whole = summed.compute_parts(), call.tensors[position].detach()
            rest = whole - parts.sum(0)
            rounding = torch.finfo(whole.dtype).eps ** 0.75 * torch.maximum(parts.abs().sum(0), whole.abs())
            return parts, rest if bool((rest.abs() > rounding).any()) else None
    except NoParts as reason:
        if call.batch == 1:
            return call.tensors[position].detach().unsqueeze(0), None
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {follower.place()}, multiplies a sum over the samples by a weight, whose "
            f"gradient needs each sample's part of the sum: {reason}. Multiply the losses before they are added up."
        ) from None


class _Apart(torch.autograd.Function):
    """The identity. Its backward keeps the gradient of a weight apart from those of the samples."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: list[Tensor], collector: Collector, anchor: Tensor) -> Tensor:
        ctx.weight, ctx.collector = weight[0], collector
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if _torch.will_run_node(ctx.collector.anchor_node):
            ctx.collector.receive_shared(ctx.weight, grads[0])
        return None, None, None, None


@dataclass(frozen=True)
class _Product:
    """A weight, at a position of a call, that multiplies a sum over the samples."""

    call: Call
    position: int
    weight: Tensor
    parts: Tensor  # of the sum, `(batch, *shape)`
    rest: Tensor | None  # of the sum, which belongs to no sample
    collector: Collector

    def differentiate(self, part: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the weight, if the sum consists of this part."""
        with torch.enable_grad():
            weight = self.weight.detach().requires_grad_()
            tensors = (part, weight) if self.position else (weight, part)
            (result,) = self.call.run([tensor.clone() for tensor in tensors])  # it may change one in place
            return torch.autograd.grad(result, weight, grad)[0]


class _Factor(torch.autograd.Function):
    """The identity, on the product of a weight and a sum over the samples. Its backward finds the weight's rows."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, product: _Product, anchor: Tensor) -> Tensor:
        ctx.product = product
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        product: _Product = ctx.product
        collector, (grad,) = product.collector, grads
        if _torch.will_run_node(collector.anchor_node):
            with _torch.DisableTorchFunction():
                rows = torch.stack([product.differentiate(part, grad) for part in product.parts])
                collector.receive(product.weight, Dense(rows), "factor of the loss")
                if product.rest is not None:
                    collector.receive_shared(product.weight, product.differentiate(product.rest, grad))
        return grad, None, None
