"""y = x Wᵀ + b, over any number of positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from persample.rules.registry import Terms, register_rule
from persample.terms import Dense, Outer, Term, sum_to_shape


def _is_layer(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Not so for a vector as the weight, and for a bias with rows, which `F.linear` takes too."""
    return weight.dim() == 2 and (bias is None or bias.dim() == 1)


@register_rule(
    F.linear,
    accepts=lambda input, dim: dim < input.dim() - 1,
    when=_is_layer,
    reads_result=False,
    stacks=True,
    further=False,
)
def linear(grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Terms:
    input, grad = input.flatten(1, -2), grad.flatten(1, -2)
    terms: dict[str, Term] = {"weight": Outer(input, grad)}
    if bias is not None:
        terms["bias"] = Dense(sum_to_shape(grad, bias.shape))
    return terms
