"""Questions to stored gradients: which are alike, which are like no other, which push a prediction.

A store has a row of length 1 for each example, and the length that it had. All answers go through the rows in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from persample.scanning.store import Array, Store

BLOCK = 4096

# How much of the rows' squared length the directions that duplicates are looked for in have to leave out at most.
LEFT_OUT = 0.3


class Rows:
    """The stored rows by one checkpoint."""

    def __init__(self, store: Store, checkpoint: int) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._shards = range(store.shards(checkpoint))
        parts = [self._store.columns(checkpoint, shard, ["length"])["length"] for shard in self._shards]
        self.lengths = torch.from_numpy(np.concatenate(parts))

    def __len__(self) -> int:
        return len(self.lengths)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """`(first, rows)`: the rows in float32, some thousands at a time."""
        first, waiting = 0, list[Tensor]()
        for shard in self._shards:
            waiting.append(_as_tensor(self._store.rows(self._checkpoint, shard)))
            if sum(map(len, waiting)) >= BLOCK or shard == self._shards[-1]:
                block = torch.cat(waiting)
                yield first, block
                first, waiting = first + len(block), []

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Some rows, in float32."""
        found = torch.empty(len(ids), self.dim)
        size = len(self._store.rows(self._checkpoint, 0))
        for shard in (ids // size).unique().tolist():
            here = (ids // size == shard).nonzero().flatten()
            found[here] = _as_tensor(self._store.rows(self._checkpoint, shard)[(ids[here] % size).numpy()])
        return found

    @property
    def dim(self) -> int:
        """How many numbers a row has."""
        return self._store.rows(self._checkpoint, 0).shape[1]

    def second_moment(self, scaled: bool) -> Tensor:
        """`(dim, dim)`: the mean of the rows' outer squares, as they are stored or at their lengths."""
        total = torch.zeros(self.dim, self.dim, dtype=torch.float64)
        for first, block in self.blocks():
            if scaled:
                block = block * self.lengths[first : first + len(block), None].float()
            total += (block.T @ block).double()
        return total / len(self)


@dataclass(frozen=True)
class Found:
    """Examples, the most fitting first, and by how much they fit."""

    ids: Tensor
    scores: Tensor


def products(rows: Rows, directions: Tensor) -> Tensor:
    """`(directions, rows)`: the inner products of the gradients, at their lengths, with some directions."""
    parts = [directions.float() @ block.T for _, block in rows.blocks()]
    return torch.cat(parts, dim=1) * rows.lengths.float()


def neighbours(rows: Rows, i: int, k: int) -> Found:
    """The `k` examples whose gradients point most nearly as that of example `i`, by the cosine."""
    own = rows[torch.tensor([i])][0]
    cosines = torch.cat([block @ own for _, block in rows.blocks()])
    cosines[i] = -torch.inf
    scores, ids = cosines.topk(min(k, len(rows) - 1))
    return Found(ids, scores)


def outliers(rows: Rows, k: int) -> Found:
    """The `k` examples whose gradients point where few others do.

    The score is the leverage of the rows of length 1, how much of its direction a row has to itself, over the mean.
    """
    factor = whitening(rows.second_moment(scaled=False))
    scores = torch.cat([(block @ factor).square().sum(1) for _, block in rows.blocks()])
    best = (scores / scores.mean()).topk(min(k, len(rows)))
    return Found(best.indices, best.values)


def whitening(moment: Tensor, ridge: float = 1e-3) -> Tensor:
    """`W` with `W Wᵀ = (moment + λ)⁻¹`; λ, a small part of the mean square, is for directions that rows never take."""
    dim = len(moment)
    steady = moment + ridge * moment.trace().clamp(min=torch.finfo(torch.float64).tiny) / dim * torch.eye(dim)
    lower = torch.linalg.cholesky(steady)
    return torch.linalg.solve_triangular(lower, torch.eye(dim, dtype=moment.dtype), upper=False).T.float()


# ---- duplicates ----


def duplicates(rows: Rows, tolerance: float) -> list[list[int]]:
    """Groups of examples whose gradients differ from the first one's by at most `tolerance` of their length.

    Exact, yet most pairs are compared in a few directions only: with rows split into a part `u` in the directions of
    the largest variance and the rest, of length `r`, no cosine is larger than `u·u' + r r'`.
    """
    least = (1 - tolerance**2) ** 0.5 - _ROUNDING  # the cosine that is needed, whatever the lengths
    bounds = _bounds(rows)
    leads = torch.zeros(len(rows), dtype=torch.bool)
    groups: dict[int, list[int]] = {}

    def join(pairs: Tensor) -> None:
        for lead, member in sorted(_alike(rows, pairs, tolerance).tolist()):
            if leads[lead] and leads[member]:
                leads[member] = False
                groups.setdefault(lead, [lead]).append(member)

    for own in torch.arange(len(rows)).split(_COMPARED_AT_ONCE):
        earlier = leads.nonzero().flatten()
        leads[own] = True
        for part in earlier.split(BLOCK) if len(earlier) else ():
            join(_near(bounds, part, own, least))
        own = own[leads[own]]
        if not len(own):
            continue
        near = _near(bounds, own, own, least)
        join(near[near[:, 0] < near[:, 1]])
    return list(groups.values())


_COMPARED_AT_ONCE = 512
_ROUNDING = 1e-4


def _bounds(rows: Rows) -> Tensor:
    """`(rows, directions + 1)`: the product of two is no less than the cosine of theirs."""
    values, vectors = torch.linalg.eigh(rows.second_moment(scaled=False))
    left_out = values.cumsum(0)  # of the smallest ones
    kept = len(values) - int((left_out <= LEFT_OUT * left_out[-1]).sum())
    basis = vectors[:, len(values) - kept :].float()

    def bound(block: Tensor) -> Tensor:
        block = torch.nn.functional.normalize(block)  # a float16 has made them a little longer or shorter
        inside = block @ basis
        rest = (block.square().sum(1) - inside.square().sum(1)).clamp(min=0).sqrt()
        return torch.cat([inside, rest[:, None]], 1)

    return torch.cat([bound(block) for _, block in rows.blocks()])


def _near(bounds: Tensor, some: Tensor, others: Tensor, least: float) -> Tensor:
    """The pairs whose cosine may be as large as `least`."""
    products = bounds[some] @ bounds[others].T
    has_any = (products.amax(0) >= least).nonzero().flatten()  # few: the whole is looked at but once
    near = (products[:, has_any] >= least).nonzero()
    return torch.stack([some[near[:, 0]], others[has_any[near[:, 1]]]], 1)


def _alike(rows: Rows, pairs: Tensor, tolerance: float) -> Tensor:
    """Those of the pairs whose gradients differ by as little."""
    kept = []
    for some in pairs.split(BLOCK):
        one, other = (rows[ids] * rows.lengths[ids, None].float() for ids in some.T)
        longest = torch.maximum(one.norm(dim=1), other.norm(dim=1))
        kept.append(some[(one - other).norm(dim=1) <= tolerance * longest])
    return torch.cat(kept) if kept else pairs


def _as_tensor(rows: Array) -> Tensor:
    return torch.from_numpy(np.array(rows)).float()
