"""What follows from dense rows `{name: (B, *shape)}`, in the cheapest way: for engines that give nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Rows = dict[str, Tensor]

MAX_NORM = 1.0
PROJECTED = 1024


def clip_factors(norms: Tensor) -> Tensor:
    return (MAX_NORM / norms).clamp(max=1)


def norms_of(rows: Rows) -> Tensor:
    return torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)


def clip_of(rows: Rows) -> Rows:
    factors = clip_factors(norms_of(rows))
    return {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


def gram_of(rows: Rows) -> Tensor:
    return sum((r.flatten(1) @ r.flatten(1).T for r in rows.values()), start=torch.zeros(()))


class Projection:
    """A sparse random projection: each entry of a row is added, with its sign, to one of `PROJECTED` numbers.

    In blocks of columns, and by `scatter_add_`: the fastest of the ways that were tried on a CPU, ahead of `index_add_`
    and of products with a sparse matrix.
    """

    BLOCK = 2**14

    def __init__(self, model: nn.Module) -> None:
        draws = torch.Generator().manual_seed(0)
        self._buckets: Rows = {}
        self._signs: Rows = {}
        for name, p in model.named_parameters():
            self._buckets[name] = torch.randint(PROJECTED, (p.numel(),), generator=draws)
            self._signs[name] = torch.randint(2, (p.numel(),), generator=draws).mul_(2).sub_(1).to(p.dtype)

    def of(self, rows: Rows) -> Tensor:
        some = next(iter(rows.values()))
        projected = some.new_zeros(len(some), PROJECTED)
        for name, r in rows.items():
            parts = (part.split(self.BLOCK, -1) for part in (r.flatten(1), self._buckets[name], self._signs[name]))
            for entries, buckets, signs in zip(*parts, strict=True):
                projected.scatter_add_(1, buckets.expand_as(entries), entries * signs)
        return projected
