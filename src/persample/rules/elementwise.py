"""x + w, x - w, x w, x / w and their like, entry by entry with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from persample.rules.registry import Terms, register_rule
from persample.rules.shapes import conjugate, summed_to
from persample.terms import Dense

T: Any = torch.Tensor


def _elementwise(name: str, *more: Callable[..., Any], weight_first: bool) -> Callable[..., Any]:
    """Registers a rule for `name(input, other)` where one of the two is a weight, of no more dims than the samples."""
    functions = {getattr(torch, name, None), getattr(T, name), getattr(T, f"{name}_"), *more} - {None}
    samples, weight = (1, 0) if weight_first else (0, 1)

    def when(*args: Any, **kwargs: Any) -> bool:
        pair = (*args, *(kwargs[key] for key in ("input", "other") if key in kwargs))
        both = len(pair) == 2 and isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)
        return both and pair[weight].dim() <= pair[samples].dim()

    return register_rule(
        *functions,
        accepts=lambda input, dim: True,
        batched=("other",) if weight_first else ("input",),
        when=when,
        reads_result=False,
    )


@_elementwise("add", weight_first=False)
def add(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"other": Dense(summed_to(grad, other.shape) * conjugate(alpha))}


@_elementwise("add", weight_first=True)
def added_to(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"input": Dense(summed_to(grad, input.shape))}


@_elementwise("sub", weight_first=False)
def sub(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"other": Dense(-summed_to(grad, other.shape) * conjugate(alpha))}


@_elementwise("sub", weight_first=True)
def subtracted_from(grad: Tensor, input: Tensor, other: Tensor, alpha: complex = 1) -> Terms:
    return {"input": Dense(summed_to(grad, input.shape))}


@_elementwise("mul", weight_first=False)
def mul(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"other": Dense(summed_to(grad * input.conj(), other.shape))}


@_elementwise("mul", weight_first=True)
def multiplied_by(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"input": Dense(summed_to(grad * other.conj(), input.shape))}


@_elementwise("div", T.true_divide, weight_first=False)
def div(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"other": Dense(-summed_to(grad * (input / (other * other)).conj(), other.shape))}


@_elementwise("div", T.true_divide, weight_first=True)
def divided_by(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"input": Dense(summed_to(grad / other.conj(), input.shape))}


@register_rule(torch.prelu, accepts=lambda input, dim: dim == 0 and input.dim() > 1, reads_result=False)
def prelu(grad: Tensor, input: Tensor, weight: Tensor) -> Terms:
    below = grad * input.clamp(max=0)  # (batch, images, channel, *size)
    channels = below.flatten(3).sum((1, 3)) if below.dim() > 3 else below.sum(1)
    return {"weight": Dense(channels if weight.numel() > 1 else channels.sum(1, keepdim=True).view(-1, *weight.shape))}
