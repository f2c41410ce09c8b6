"""Convolutions: y = W * x + b, a linear map of each patch of x."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from persample.rules.registry import Accepts, Terms, register_rule
from persample.terms import Dense, Patches


def _accept_images(spatial_dims: int) -> Accepts:
    """Accept `(B, channels, *size)`, but no image without a batch dimension."""
    return lambda input, dim: dim == 0 and input.dim() == 2 + spatial_dims


@register_rule(torch.conv1d, accepts=_accept_images(1), reads_result=False, stacks=True, further=False)
@register_rule(torch.conv2d, accepts=_accept_images(2), reads_result=False, stacks=True, further=False)
@register_rule(torch.conv3d, accepts=_accept_images(3), reads_result=False, stacks=True, further=False)
def conv(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Terms:
    kernel = weight.shape[2:]
    gaps = _expand(dilation, kernel)
    widths = _find_padding(padding, kernel, gaps)
    return _add_bias(Patches(input, grad, kernel, _expand(stride, kernel), widths, gaps, groups), grad, bias)


@register_rule(torch.conv_transpose1d, accepts=_accept_images(1), reads_result=False, stacks=True)
@register_rule(torch.conv_transpose2d, accepts=_accept_images(2), reads_result=False, stacks=True)
@register_rule(torch.conv_transpose3d, accepts=_accept_images(3), reads_result=False, stacks=True)
def conv_transpose(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Terms:
    """The term of a convolution of `grad`, with `input` as the gradient of its result."""
    kernel = weight.shape[2:]
    pairs = zip(_expand(padding, kernel), _expand(output_padding, kernel), strict=True)
    widths = [(width, width - more) for width, more in pairs]
    gaps, steps = _expand(dilation, kernel), _expand(stride, kernel)
    return _add_bias(Patches(grad.conj(), input.conj(), kernel, steps, widths, gaps, groups), grad, bias)


def _add_bias(weight_term: Patches, grad: Tensor, bias: Tensor | None) -> Terms:
    """The term of the weight and, if there is a bias, its term: the bias is added at every position."""
    if bias is None:
        return {"weight": weight_term}
    points = grad.flatten(3)
    # A sum over one dimension takes half the time of a sum over both.
    total = points.squeeze(1).sum(2) if grad.shape[1] == 1 else points.sum((1, 3))
    return {"weight": weight_term, "bias": Dense(total)}


def _expand(value: int | Sequence[int], kernel: Sequence[int]) -> list[int]:
    """One number for each dimension of the kernel. To torch, `2`, `(2,)` and `[2, 2]` are the same."""
    values = [value] if isinstance(value, int) else list(value)
    return values * len(kernel) if len(values) == 1 else values


def _find_padding(
    padding: int | str | Sequence[int], kernel: Sequence[int], gaps: Sequence[int]
) -> list[tuple[int, int]]:
    """The widths before and after each dimension. If "same" needs an odd total, torch pads one more after."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [gap * (size - 1) for size, gap in zip(kernel, gaps, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str)  # torch raises for any other string
    return [(width, width) for width in _expand(padding, kernel)]
