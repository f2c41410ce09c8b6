"""x + w, x - w, x w, x / w and the same with x and w exchanged, entry by entry with broadcasting; and PReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from persample._internal.facts import find_functions
from persample.rules.registry import RuleFunction, Terms, register_rule
from persample.terms import Dense, sum_to_shape


def _register_elementwise(name: str, weight_first: bool) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for `name(input, other)`, where one of the two is a weight with no more dims than the samples."""
    samples, weight = (1, 0) if weight_first else (0, 1)

    def are_two_tensors(*args: Any, **kwargs: Any) -> bool:
        pair = (*args, *(kwargs[key] for key in ("input", "other") if key in kwargs))
        both = len(pair) == 2 and isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)
        return both and pair[weight].dim() <= pair[samples].dim()

    return register_rule(
        *find_functions(name),
        accepts=lambda input, dim: True,
        batched=("other",) if weight_first else ("input",),
        when=are_two_tensors,
        reads_result=False,
    )


@_register_elementwise("add", weight_first=False)
def samples_plus_weight(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"other": Dense(sum_to_shape(grad, other.shape) * alpha.conjugate())}


@_register_elementwise("add", weight_first=True)
def weight_plus_samples(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"input": Dense(sum_to_shape(grad, input.shape))}


@_register_elementwise("sub", weight_first=False)
def samples_minus_weight(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"other": Dense(-sum_to_shape(grad, other.shape) * alpha.conjugate())}


@_register_elementwise("sub", weight_first=True)
def weight_minus_samples(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"input": Dense(sum_to_shape(grad, input.shape))}


@_register_elementwise("mul", weight_first=False)
def samples_times_weight(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"other": Dense(sum_to_shape(grad * input.conj(), other.shape))}


@_register_elementwise("mul", weight_first=True)
def weight_times_samples(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"input": Dense(sum_to_shape(grad * other.conj(), input.shape))}


@_register_elementwise("div", weight_first=False)
def samples_over_weight(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"other": Dense(-sum_to_shape(grad * (input / (other * other)).conj(), other.shape))}


@_register_elementwise("div", weight_first=True)
def weight_over_samples(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"input": Dense(sum_to_shape(grad / other.conj(), input.shape))}


@register_rule(*find_functions("prelu"), accepts=lambda input, dim: dim == 0 and input.dim() > 1, reads_result=False)
def prelu(grad: Tensor, input: Tensor, weight: Tensor) -> Terms:
    negative = grad * input.clamp(max=0)  # (batch, images, channel, *size)
    channels = negative.flatten(3).sum((1, 3)) if negative.dim() > 3 else negative.sum(1)
    return {"weight": Dense(channels if weight.numel() > 1 else channels.sum(1, keepdim=True).view(-1, *weight.shape))}
