"""Runs an op without its weights' gradients, yet to the same bits: torch chooses some kernels by who requires grad."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample._internal.tree import map_tensors
from persample.layouts import Op


def run_detached(op: Op, weights: dict[int, Tensor], whole: bool) -> Any:
    """The result of `op`, from which autograd reaches the activations but no weights; nothing if `whole`."""
    activations = any(t.requires_grad for i, t in enumerate(op.tensors) if i not in weights)
    if op.inplace or (activations and not whole):
        changed = 0 if op.inplace else None
        args, kwargs = op.filled([t.detach() if i in weights and i != changed else t for i, t in enumerate(op.tensors)])
        return kernel(op.func, weights)(*args, **kwargs)
    return map_tensors(Tensor.detach, op.func(*op.args, **op.kwargs))


def kernel(func: Callable[..., Any], weights: Container[int]) -> Callable[..., Any]:
    """What computes the same bits without gradients of the weights, which are given by their positions."""
    as_torch_would, deciding = _BY_WEIGHT.get(func, (func, ()))
    return as_torch_would if any(i in weights for i in deciding) else func


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() < 3 or input.is_contiguous():
        return F.linear(input, weight, bias)
    result = _matmul(input, weight.t())
    return result if bias is None else result.add_(bias)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """As `matmul` does for a matrix that requires grad: all rows as one matrix, also where that takes a copy."""
    if input.dim() > 2 and other.dim() in (1, 2):
        return (input.reshape(-1, input.shape[-1]) @ other).unflatten(0, input.shape[:-1])
    if input.dim() == 2 and other.dim() > 2:
        return _matmul(other.mT, input.t()).mT
    if input.dim() == 1 and other.dim() > 2:
        return _matmul(other.mT, input)
    return torch.matmul(input, other)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """As torch does where the mask, the fourth of the tensors, requires grad: without fusing."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


# What torch does where one of these tensors requires grad.
_BY_WEIGHT: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[int, ...]]] = {
    F.linear: (_linear, (1,)),
    F.scaled_dot_product_attention: (_attention, (3,)),
    torch.matmul: (_matmul, (0, 1)),
    Tensor.matmul: (_matmul, (0, 1)),
    Tensor.__matmul__: (_matmul, (0, 1)),
}
