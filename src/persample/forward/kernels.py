"""Run an op without gradients of its weights, to the same bits: torch chooses some kernels by what requires grad.

The gradient of a large linear layer's input is computed by the faster library, which may round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.facts import find_functions
from persample._internal.tree import map_tensors
from persample.layouts import Call
from persample.terms import multiply, prefers_onednn


def run_detached(call: Call, weights: Container[int], without_graph: bool) -> Any:
    """The result of `call`, connected by autograd to the activations but not to the weights.

    `weights` are positions among the tensors of the call. With `without_graph` the result is connected to nothing.
    """
    has_graph = any(t.requires_grad for i, t in enumerate(call.tensors) if i not in weights)
    if call.is_inplace or (has_graph and not without_graph):
        changed = 0 if call.is_inplace else None
        args, kwargs = call.fill(
            [t.detach() if i in weights and i != changed else t for i, t in enumerate(call.tensors)]
        )
        return choose_kernel(call.func, weights)(*args, **kwargs)
    return map_tensors(Tensor.detach, call.func(*call.args, **call.kwargs))


def choose_kernel(func: Callable[..., Any], weights: Container[int]) -> Callable[..., Any]:
    """The function that computes the same bits as `func` if these of its tensors no longer require grad."""
    kernel, deciding = _KERNELS.get(func, (func, ()))
    return kernel if any(i in weights for i in deciding) else func


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() < 3 or input.is_contiguous():
        if _can_use_onednn(input, weight, bias):
            return _Affine.apply(input, weight, lambda: F.linear(input, weight, bias))
        return F.linear(input, weight, bias)
    result = _matmul(input, weight.t())
    return result if bias is None else result.add_(bias)


def _addmm(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) == 3 and not kwargs:
        bias, input, weight = args
        if _can_use_onednn(input, weight.t(), bias):
            return _Affine.apply(input, weight.t(), lambda: torch.addmm(bias, input, weight))
    return torch.addmm(*args, **kwargs)


class _Affine(torch.autograd.Function):
    """A product with a weight `(out, in)` plus a bias, which computes the gradient of its input as `multiply` does."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        return compute()

    @staticmethod
    @once_differentiable
    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        with _torch.DisableTorchFunction():
            rows = grad.reshape(-1, len(weight))
            return multiply(rows, weight).view(*grad.shape[:-1], weight.shape[1]), None, None


def _can_use_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `_Affine` is faster than torch's own function, and returns all gradients that are needed."""
    if not input.requires_grad or (bias is not None and bias.requires_grad):  # such a bias is no recorded weight
        return False
    is_plain = type(input) is Tensor and input.dtype == torch.float32 and input.dim() > 1 and weight.dim() == 2
    if not is_plain or not prefers_onednn(input.numel() // max(1, input.shape[-1]), weight):
        return False
    return not (_torch.is_any_autocast_enabled() or _torch.is_inside_forward_ad() or _torch.is_inside_transform())


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """`matmul` as for a matrix that requires grad: the rows are folded into one matrix, even if that needs a copy."""
    if input.dim() > 2 and other.dim() in (1, 2):
        return (input.reshape(-1, input.shape[-1]) @ other).unflatten(0, input.shape[:-1])
    if input.dim() == 2 and other.dim() > 2:
        return _matmul(other.mT, input.t()).mT
    if input.dim() == 1 and other.dim() > 2:
        return _matmul(other.mT, input)
    return torch.matmul(input, other)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Attention as for a mask that requires grad: without a fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


# What to call in place of a function if one of its tensors at these positions is a weight, which does not require grad
# any more.
_KERNELS: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[int, ...]]] = {
    F.linear: (_linear, (1,)),
    torch.addmm: (_addmm, (2,)),
    Tensor.addmm: (_addmm, (2,)),
    F.scaled_dot_product_attention: (_attention, (3,)),
    **dict.fromkeys([*find_functions("matmul"), torch.linalg.matmul], (_matmul, (0, 1))),
}
