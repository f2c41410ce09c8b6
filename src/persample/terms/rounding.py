"""When rounding can make a squared norm too small, or a row's share of a sum too large.

Contributions of several positions or uses to a sample's gradient can cancel. The squared norm is then a small
difference of large numbers, and its rounding error depends on the large ones. So beside a squared norm, a term gives a
*floor*: a squared norm that is at least as large as its floor is right up to `TOLERANCE`, and so is the sample's share
of a weighted sum. Below the floor, the row has to be computed in float64.

The constants are measured (`tests/terms/test_rounding.py` repeats the measurement), because bounds that hold for every
order of summation are a hundred times larger and would distrust ordinary data. The squared norms of the benchmarks are
20 times their floors or more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softshrink

# The largest relative error of a norm, and of a row's share of a sum relative to the row's norm.
TOLERANCE = 5e-5

# Squared norms of factors below this number lose less than 1e-11 of a norm to underflow.
_LARGE = 1e12


def add_up_products(products: Tensor) -> tuple[Tensor, Tensor]:
    """`(batch,)`: the sums of the real parts of `(batch, ...)`, and of the absolute values. Overwrites the products."""
    dims = tuple(range(1, products.dim()))
    if products.is_complex():
        return products.real.sum(dims), products.abs().sum(dims)
    return products.sum(dims), products.abs_().sum(dims)  # faster than vector_norm, which does not use SIMD here


def find_floor_of_products(size: Tensor, length: int) -> Tensor:
    """The floor of a squared norm that is a sum of products of inner products.

    Args:
        size: `(batch,)`, the sum of the absolute values of what was added up.
        length: the number of entries of the vectors in the inner products.
    """
    # Inner products of vectors with equal entries have the largest errors, which grow with their length.
    units = 8 + min(length, 4096) / 64
    return size * (units * _get_unit(size.dtype) / (2 * TOLERANCE))


def find_floor_of_sums(size: Tensor) -> Tensor:
    """The floor of the squared norm of a sum over positions.

    Args:
        size: `(batch,)`, the square of the sum of the norms of what was added up.
    """
    return size * (8 * _get_unit(size.dtype) / TOLERANCE) ** 2


def find_lost_squares(first: Tensor, second: Tensor, length: int) -> Tensor:
    """What a squared norm that is a sum of products of inner products can lose to underflow, at most.

    Products of two small entries vanish below the smallest normal number. That matters if the other factor is large.
    With factors of ordinary size it is 0, so that a row of zeros has norm 0.

    Args:
        first: `(batch,)`, the squared norm of one factor of the gradient, times the number of positions.
        second: the same of the other factor.
        length: the number of entries of the vectors in the inner products.
    """
    return softshrink(first + second, _LARGE).mul_(length * torch.finfo(first.dtype).tiny)


def add_lost_squares(squares: Tensor, first: Tensor, second: Tensor, length: int) -> Tensor:
    """`squares` and `find_lost_squares(first, second, length)`."""
    lost = softshrink(first + second, _LARGE)
    return torch.add(squares, lost, alpha=length * torch.finfo(first.dtype).tiny)


def _get_unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2
