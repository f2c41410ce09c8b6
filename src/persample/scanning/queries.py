"""Queries on stored gradients: neighbours, outliers, duplicates, influence.

A store has a projected gradient of length 1 for each example, and its original length. All queries read the rows in
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from persample.scanning.notebook import format_html_table
from persample.scanning.store import Array, Store

BLOCK_SIZE = 4096  # rows

# Duplicates are first compared in the directions of largest variance. The other directions together hold at most this
# share of the squared lengths.
LEFT_OUT_SHARE = 0.3


class StoredGradients:
    """The projected gradients of one checkpoint: rows of length 1, and their original `lengths`."""

    def __init__(self, store: Store, checkpoint: int) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._shards = range(store.count_shards(checkpoint))
        parts = [store.read_columns(checkpoint, shard, ["length"])["length"] for shard in self._shards]
        self.lengths = torch.from_numpy(np.concatenate(parts))

    def __len__(self) -> int:
        return len(self.lengths)

    def iterate_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """`(start, rows)`: all rows in float32, in blocks of whole shards with about `BLOCK_SIZE` rows."""
        start, waiting = 0, list[Tensor]()
        for shard in self._shards:
            waiting.append(_to_tensor(self._store.read_rows(self._checkpoint, shard)))
            if sum(map(len, waiting)) >= BLOCK_SIZE or shard == self._shards[-1]:
                block = torch.cat(waiting)
                yield start, block
                start, waiting = start + len(block), []

    def __getitem__(self, ids: Tensor) -> Tensor:
        """The rows of some examples, in float32."""
        rows = torch.empty(len(ids), self.dim)
        shard_size = len(self._store.read_rows(self._checkpoint, 0))
        for shard in (ids // shard_size).unique().tolist():
            here = (ids // shard_size == shard).nonzero().flatten()
            stored = self._store.read_rows(self._checkpoint, shard)
            rows[here] = _to_tensor(stored[(ids[here] % shard_size).numpy()])
        return rows

    @property
    def dim(self) -> int:
        """The number of entries in a row."""
        return self._store.read_rows(self._checkpoint, 0).shape[1]

    def compute_second_moment(self, scaled: bool) -> Tensor:
        """`(dim, dim)`: mean of the outer products of rows with themselves; `scaled`: at their original lengths."""
        total = torch.zeros(self.dim, self.dim, dtype=torch.float64)
        for start, block in self.iterate_blocks():
            if scaled:
                block = block * self.lengths[start : start + len(block), None].float()
            total += (block.T @ block).double()
        return total / len(self)


@dataclass(frozen=True)
class Ranking:
    """Examples with their scores, best first."""

    ids: Tensor
    scores: Tensor

    def _repr_html_(self) -> str:
        pairs = zip(self.ids.tolist(), self.scores.tolist(), strict=True)
        return format_html_table(["example", "score"], [list(pair) for pair in pairs])


def compute_products(rows: StoredGradients, directions: Tensor) -> Tensor:
    """`(directions, rows)`: inner products of the gradients, at their original lengths, with some directions."""
    parts = [directions.float() @ block.T for _, block in rows.iterate_blocks()]
    return torch.cat(parts, dim=1) * rows.lengths.float()


def find_neighbours(rows: StoredGradients, i: int, k: int) -> Ranking:
    """The `k` examples with gradients most similar to that of example `i`, by cosine."""
    own = rows[torch.tensor([i])][0]
    cosines = torch.cat([block @ own for _, block in rows.iterate_blocks()])
    cosines[i] = -torch.inf
    scores, ids = cosines.topk(min(k, len(rows) - 1))
    return Ranking(ids, scores)


def find_outliers(rows: StoredGradients, k: int) -> Ranking:
    """The `k` examples with the most unusual gradient directions.

    The score is the leverage of a row of length 1, as a multiple of the mean leverage.
    """
    factor = compute_whitening(rows.compute_second_moment(scaled=False))
    scores = torch.cat([(block @ factor).square().sum(1) for _, block in rows.iterate_blocks()])
    best = (scores / scores.mean()).topk(min(k, len(rows)))
    return Ranking(best.indices, best.values)


def compute_whitening(moment: Tensor, ridge: float = 1e-3) -> Tensor:
    """`W` with `W Wᵀ = (moment + λ)⁻¹`. λ is a fraction `ridge` of the mean eigenvalue: `moment` may be singular."""
    dim = len(moment)
    regularised = moment + ridge * moment.trace().clamp(min=torch.finfo(torch.float64).tiny) / dim * torch.eye(dim)
    lower = torch.linalg.cholesky(regularised)
    return torch.linalg.solve_triangular(lower, torch.eye(dim, dtype=moment.dtype), upper=False).T.float()


# ---- duplicates ----


def find_duplicates(rows: StoredGradients, tolerance: float) -> list[list[int]]:
    """Groups of examples with the same gradient, up to a relative difference of `tolerance`.

    Each gradient of a group is compared with that of the first example; the difference is relative to the longer one.
    The result is exact, although most pairs are compared in a few directions only. A row of length 1 is split into a
    part `u` in the directions of largest variance and a rest of length `r`. Then the cosine of two rows is at most
    `u·u' + r r'`, and only pairs for which this bound is large enough are compared in full.
    """
    min_cosine = (1 - tolerance**2) ** 0.5 - _ROUNDING  # no pair within the tolerance has a smaller cosine
    bounds = _compute_bounds(rows)
    is_lead = torch.zeros(len(rows), dtype=torch.bool)
    groups: dict[int, list[int]] = {}

    def join(pairs: Tensor) -> None:
        for lead, member in sorted(_keep_duplicates(rows, pairs, tolerance).tolist()):
            if is_lead[lead] and is_lead[member]:
                is_lead[member] = False
                groups.setdefault(lead, [lead]).append(member)

    for own in torch.arange(len(rows)).split(_COMPARED_AT_ONCE):
        earlier = is_lead.nonzero().flatten()
        is_lead[own] = True
        for part in earlier.split(BLOCK_SIZE) if len(earlier) else ():
            join(_find_candidates(bounds, part, own, min_cosine))
        own = own[is_lead[own]]
        if not len(own):
            continue
        pairs = _find_candidates(bounds, own, own, min_cosine)
        join(pairs[pairs[:, 0] < pairs[:, 1]])
    return list(groups.values())


_COMPARED_AT_ONCE = 512
_ROUNDING = 1e-4


def _compute_bounds(rows: StoredGradients) -> Tensor:
    """`(rows, directions + 1)`: the inner product of two of these rows is an upper bound on the cosine."""
    values, vectors = torch.linalg.eigh(rows.compute_second_moment(scaled=False))
    left_out = values.cumsum(0)  # eigenvalues are in ascending order
    kept = len(values) - int((left_out <= LEFT_OUT_SHARE * left_out[-1]).sum())
    basis = vectors[:, len(values) - kept :].float()

    def split(block: Tensor) -> Tensor:
        block = torch.nn.functional.normalize(block)  # rounding to float16 has changed the lengths
        inside = block @ basis
        rest = (block.square().sum(1) - inside.square().sum(1)).clamp(min=0).sqrt()
        return torch.cat([inside, rest[:, None]], 1)

    return torch.cat([split(block) for _, block in rows.iterate_blocks()])


def _find_candidates(bounds: Tensor, some: Tensor, others: Tensor, min_cosine: float) -> Tensor:
    """`(pairs, 2)`: the pairs of `some` and `others` that may have a cosine of at least `min_cosine`."""
    products = bounds[some] @ bounds[others].T
    # Few columns have a candidate, so that only one pass goes over the whole matrix.
    has_any = (products.amax(0) >= min_cosine).nonzero().flatten()
    found = (products[:, has_any] >= min_cosine).nonzero()
    return torch.stack([some[found[:, 0]], others[has_any[found[:, 1]]]], 1)


def _keep_duplicates(rows: StoredGradients, pairs: Tensor, tolerance: float) -> Tensor:
    """The pairs of gradients that differ, at their original lengths, by at most `tolerance` of the longer one."""
    kept = []
    for some in pairs.split(BLOCK_SIZE):
        one, other = (rows[ids] * rows.lengths[ids, None].float() for ids in some.T)
        longest = torch.maximum(one.norm(dim=1), other.norm(dim=1))
        kept.append(some[(one - other).norm(dim=1) <= tolerance * longest])
    return torch.cat(kept) if kept else pairs


def _to_tensor(rows: Array) -> Tensor:
    return torch.from_numpy(np.array(rows)).float()
