"""Queries on stored gradients: neighbours, outliers, duplicates, influence.

A store has a projected gradient of length 1 for each example, and its original length. All queries read the rows in
blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from persample.scanning.answers import Ranking, RunningTop
from persample.scanning.damping import Damping, Whitening, check_damping, choose_damping_of_directions
from persample.scanning.progress import Mode, show_progress
from persample.scanning.stored_gradients import StoredGradients

BLOCK_SIZE = 4096  # rows and pairs that are compared at once

# Duplicates are first compared in the directions of largest variance. The other directions together hold at most this
# share of the squared lengths.
LEFT_OUT_SHARE = 0.3


def find_neighbours(rows: StoredGradients, i: int, k: int) -> Ranking:
    """The `k` examples with gradients most similar to that of example `i`, by cosine."""
    own, top = rows[torch.tensor([i])], RunningTop(min(k, len(rows) - 1))
    for start, block in rows.iterate_blocks():
        cosines = own @ block.T
        if start <= i < start + len(block):
            cosines[0, i - start] = -torch.inf
        top.add(start, cosines)
    return Ranking(top.ids[0], top.scores[0])


def find_outliers(rows: StoredGradients, k: int, damping: Damping = "auto") -> Ranking:
    """The `k` examples with the most unusual gradient directions.

    The score is the leverage of a row of length 1, as a multiple of the mean leverage.
    """
    check_damping(damping)
    moment = rows.compute_second_moment()
    whitening = Whitening(moment, choose_damping_of_directions(moment) if damping == "auto" else damping)
    top, total = RunningTop(min(k, len(rows))), torch.zeros((), dtype=torch.float64)
    for start, block in rows.iterate_blocks():
        leverages = whitening.compute_squares(block)
        total += leverages.sum()
        top.add(start, leverages[None])
    mean = (total / len(rows)).clamp(min=torch.finfo(torch.float64).tiny)
    return Ranking(top.ids[0], (top.scores[0] / mean).float())


# ---- duplicates ----


def find_duplicates(rows: StoredGradients, tolerance: float, mode: Mode = "none") -> list[list[int]]:
    """Groups of examples with the same gradient, up to a relative difference of `tolerance`.

    Each gradient of a group is compared with that of the first example; the difference is relative to the longer one.
    The result is exact, although most pairs are compared in a few directions only. A row of length 1 is split into a
    part `u` in the directions of largest variance and a rest of length `r`. Then the cosine of two rows is at most
    `u·u' + r r'`, and only pairs for which this bound is large enough are compared in full. Where most pairs are, whole
    blocks are compared by one product, so that the work is at most that of comparing all pairs in full, twice.
    """
    bounds = _compute_bounds(rows)
    is_lead = torch.zeros(len(rows), dtype=torch.bool)
    groups: dict[int, list[int]] = {}

    def join(pairs: Tensor) -> None:
        for lead, member in sorted(_keep_duplicates(rows, pairs, tolerance).tolist()):
            if is_lead[lead] and is_lead[member]:
                is_lead[member] = False
                groups.setdefault(lead, [lead]).append(member)

    with show_progress("duplicates", len(rows), 0, mode) as advance:
        for own in torch.arange(len(rows)).split(_COMPARED_AT_ONCE):
            earlier = is_lead.nonzero().flatten()
            is_lead[own] = True
            for part in earlier.split(BLOCK_SIZE) if len(earlier) else ():
                join(_find_candidates(rows, bounds, part, own, tolerance))
            advance(len(own))
            own = own[is_lead[own]]
            if not len(own):
                continue
            pairs = _find_candidates(rows, bounds, own, own, tolerance)
            join(pairs[pairs[:, 0] < pairs[:, 1]])
    return list(groups.values())


_COMPARED_AT_ONCE = 512
_ROUNDING = 1e-4


def _compute_bounds(rows: StoredGradients) -> Tensor:
    """`(rows, directions + 1)`: the inner product of two of these rows is an upper bound on the cosine."""
    values, vectors = torch.linalg.eigh(rows.compute_second_moment())
    left_out = values.cumsum(0)  # eigenvalues are in ascending order
    kept = len(values) - int((left_out <= LEFT_OUT_SHARE * left_out[-1]).sum())
    basis = vectors[:, len(values) - kept :].float()

    def split(block: Tensor) -> Tensor:
        block = normalize(block)  # rounding to float16 has changed the lengths
        inside = block @ basis
        rest = (block.square().sum(1) - inside.square().sum(1)).clamp(min=0).sqrt()
        return torch.cat([inside, rest[:, None]], 1)

    return torch.cat([split(block) for _, block in rows.iterate_blocks()])


def _find_candidates(rows: StoredGradients, bounds: Tensor, some: Tensor, others: Tensor, tolerance: float) -> Tensor:
    """`(pairs, 2)`: the pairs of `some` and `others` that may be duplicates.

    If the bound leaves many, one product of the rows says which of them are within the tolerance, up to rounding.
    """
    min_cosine = (1 - tolerance**2) ** 0.5 - _ROUNDING  # no pair within the tolerance has a smaller cosine
    products = bounds[some] @ bounds[others].T
    # Few columns have a candidate, so that only one pass goes over the whole matrix.
    has_any = (products.amax(0) >= min_cosine).nonzero().flatten()
    is_close = products[:, has_any] >= min_cosine
    if int(is_close.sum()) > BLOCK_SIZE:
        is_close &= _compute_distances(rows, some, others[has_any]) <= tolerance**2 + _ROUNDING
    found = is_close.nonzero()
    return torch.stack([some[found[:, 0]], others[has_any[found[:, 1]]]], 1)


def _compute_distances(rows: StoredGradients, some: Tensor, others: Tensor) -> Tensor:
    """`(some, others)`: squared distances of gradients, relative to the squared length of the longer one."""
    left, right = rows[some], rows[others]
    lengths = [part.norm(dim=1) * rows.lengths[ids].float() for part, ids in ((left, some), (right, others))]
    one, other = lengths[0][:, None], lengths[1]
    ratio = torch.minimum(one, other) / torch.maximum(one, other).clamp(min=torch.finfo(torch.float32).tiny)
    return 1 + ratio * (ratio - 2 * normalize(left) @ normalize(right).T)


def _keep_duplicates(rows: StoredGradients, pairs: Tensor, tolerance: float) -> Tensor:
    """The pairs of gradients that differ, at their original lengths, by at most `tolerance` of the longer one."""
    kept = []
    for some in pairs.split(BLOCK_SIZE):
        one, other = (rows[ids] * rows.lengths[ids, None].float() for ids in some.T)
        longest = torch.maximum(one.norm(dim=1), other.norm(dim=1))
        kept.append(some[(one - other).norm(dim=1) <= tolerance * longest])
    return torch.cat(kept) if kept else pairs
