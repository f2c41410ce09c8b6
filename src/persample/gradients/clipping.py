"""Clipping: the bound on the norms of rows, and the factors that enforce it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.terms import Term


@dataclass(frozen=True)
class Bound:
    """How a recording with `keep="clip"` clips.

    `max_norm` is the bound on the norm of a row, or on each parameter's part of it, by name. A `stabiliser` selects
    automatic clipping. `passes` is the number of backward passes; None: one, unless its factors take more than `memory`
    bytes, or more than half of the free memory if that is None. `keeps_rows`: the rows before clipping are kept too.
    """

    max_norm: float | Mapping[str, float]
    stabiliser: float | None = None
    passes: Literal[1, 2] | None = None
    memory: int | None = None
    keeps_rows: bool = False


LEAST_BOUND = 1e-15  # of a row or a part of it; squares of smaller norms would vanish


def check_max_norm(max_norm: float) -> None:
    """Refuse a bound that is not positive, or so small that squares of norms near it vanish in float32."""
    if not max_norm >= LEAST_BOUND:
        raise PerSampleError(
            f"max_norm must be positive and at least {LEAST_BOUND}, so that squares of norms do not vanish, got "
            f"{max_norm}. Multiply the loss and max_norm by the same number."
        )


def compute_clip_factors(norms: Tensor, max_norm: float, stabiliser: float | None = None, scale: float = 1.0) -> Tensor:
    """The factor for each row that makes its norm at most `max_norm`, after the row was multiplied by `scale`.

    With a stabiliser (automatic clipping) every row is scaled, by `max_norm / (norm + stabiliser)`.

    >>> compute_clip_factors(torch.tensor([0.5, 4.0]), 1.0)
    tensor([1.0000, 0.2500])
    >>> compute_clip_factors(torch.tensor([0.5, 4.0]), 1.0, stabiliser=0.5)
    tensor([1.0000, 0.2222])
    """
    if stabiliser is None:
        return bound_inverse_norms(norms.reciprocal(), max_norm, scale)
    check_max_norm(max_norm)
    return max_norm * scale / (norms * scale + stabiliser)


def bound_inverse_norms(inverse: Tensor, max_norm: float, scale: float) -> Tensor:
    """The same factors from the inverse norms, which are overwritten."""
    check_max_norm(max_norm)
    return inverse.mul_(max_norm).clamp_(max=scale)


def add_weighted_rows(term: Term, weights: Tensor, exact: Collection[int]) -> Tensor:
    """`term.sum(weights)`, with the rows of some samples computed in float64.

    Where contributions to a row cancel, the sum of its scaled contributions is wrong by more than the row.
    """
    if not exact:
        return term.sum(weights)
    total = term.sum(weights.index_fill(0, torch.tensor(sorted(exact), device=weights.device), 0))
    for n in sorted(exact):
        total = total + (term.compute_exact_row(n) * weights[n].double()).to(total.dtype)
    return total
