"""Convolutions: a linear map of each patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from persample.rules.registry import Terms, register_rule
from persample.terms import Dense, Patches


@register_rule(
    torch.conv1d, accepts=lambda input, dim: dim == 0 and input.dim() == 3, reads_result=False, further=False
)
@register_rule(
    torch.conv2d, accepts=lambda input, dim: dim == 0 and input.dim() == 4, reads_result=False, further=False
)
@register_rule(
    torch.conv3d, accepts=lambda input, dim: dim == 0 and input.dim() == 5, reads_result=False, further=False
)
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
    gaps = _each(dilation, kernel)
    term = Patches(input, grad, kernel, _each(stride, kernel), _paddings(padding, kernel, gaps), gaps, groups)
    return _terms(term, grad, bias)


@register_rule(torch.conv_transpose1d, accepts=lambda input, dim: dim == 0 and input.dim() == 3, reads_result=False)
@register_rule(torch.conv_transpose2d, accepts=lambda input, dim: dim == 0 and input.dim() == 4, reads_result=False)
@register_rule(torch.conv_transpose3d, accepts=lambda input, dim: dim == 0 and input.dim() == 5, reads_result=False)
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
    """A convolution the other way round: of the gradients, with the input for its gradient."""
    kernel = weight.shape[2:]
    widths = zip(_each(padding, kernel), _each(output_padding, kernel), strict=True)
    cut = [(width, width - more) for width, more in widths]
    term = Patches(grad.conj(), input.conj(), kernel, _each(stride, kernel), cut, _each(dilation, kernel), groups)
    return _terms(term, grad, bias)


def _terms(of_weight: Patches, grad: Tensor, bias: Tensor | None) -> Terms:
    """With that of the bias, if there is one: it is added at every position."""
    return {"weight": of_weight} if bias is None else {"weight": of_weight, "bias": Dense(grad.flatten(3).sum((1, 3)))}


def _each(value: int | Sequence[int], kernel: Sequence[int]) -> list[int]:
    """One number for each dim of the kernel: `2`, `(2,)` and `[2, 2]` are the same to torch."""
    values = [value] if isinstance(value, int) else list(value)
    return values * len(kernel) if len(values) == 1 else values


def _paddings(padding: int | str | Sequence[int], kernel: Sequence[int], gaps: Sequence[int]) -> list[tuple[int, int]]:
    """What is put before and after each dim; 'same' puts the odd one after."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [gap * (size - 1) for size, gap in zip(kernel, gaps, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str)  # torch has refused any other
    return [(width, width) for width in _each(padding, kernel)]
