"""Quantities computed from dense rows, `{name: (B, *shape)}`, for engines that compute rows only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Rows = dict[str, Tensor]

MAX_NORM = 1.0
PROJECTION_SIZE = 1024


def compute_norm(gradient: Sequence[Tensor]) -> Tensor:
    """Norm of one gradient, which has a tensor for each parameter."""
    return torch.stack(torch._foreach_norm(gradient)).norm()


def compute_norms(rows: Rows) -> Tensor:
    """`(B,)`: norm of each row, over all parameters."""
    return torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)


def compute_clip_factors(norms: Tensor) -> Tensor:
    """Factors that clip rows of these norms to `MAX_NORM`."""
    return (MAX_NORM / norms).clamp(max=1)


def compute_clipped_sum(rows: Rows, norms: Tensor) -> Rows:
    """Sum of the rows, each clipped to `MAX_NORM`."""
    factors = compute_clip_factors(norms)
    return {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


def compute_gram(rows: Rows) -> Tensor:
    """`(B, B)`: inner products of the rows."""
    return sum((r.flatten(1) @ r.flatten(1).T for r in rows.values()), start=torch.zeros(()))


class Projection:
    """A sparse random projection: each entry of a row is added, with a random sign, to one of the projected numbers.

    It works on blocks of columns and with `scatter_add_`. On a CPU this was faster than `index_add_` and than a product
    with a sparse matrix.
    """

    BLOCK = 2**14

    def __init__(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        self._buckets: Rows = {}
        self._signs: Rows = {}
        for name, p in model.named_parameters():
            self._buckets[name] = torch.randint(PROJECTION_SIZE, (p.numel(),), generator=generator)
            self._signs[name] = torch.randint(2, (p.numel(),), generator=generator).mul_(2).sub_(1).to(p.dtype)

    def project(self, rows: Rows) -> Tensor:
        """`(B, PROJECTION_SIZE)`: the projected rows."""
        first = next(iter(rows.values()))
        projected = first.new_zeros(len(first), PROJECTION_SIZE)
        for name, r in rows.items():
            parts = (part.split(self.BLOCK, -1) for part in (r.flatten(1), self._buckets[name], self._signs[name]))
            for entries, buckets, signs in zip(*parts, strict=True):
                projected.scatter_add_(1, buckets.expand_as(entries), entries * signs)
        return projected
