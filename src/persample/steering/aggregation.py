"""Sums of rows other than the mean: without conflicts, robust, normalised. No row is made dense.

Each aggregator is a weighted sum of rows. The weights follow from norms, inner products and the Gram matrix, which come
from the structure of the gradients. With `record(units=...)` the rows are those of users, tasks or domains; several
losses have a Gram matrix of their mean gradients.

    normalise        w_i = 1 / (n |g_i|)
    trim             w_i = 1 / kept for the rows with the smallest distance from the mean of all rows, else 0
    median of means  the geometric median of the means of groups of rows (Weiszfeld's iteration on the Gram matrix)
    conflict-free    the vector closest to the mean that has no negative inner product with any row: min |Jᵀw| over
                     w ≥ 1/n, the projection of the mean on the dual cone of the rows (Lopez-Paz and Ranzato, 2017)
"""

from __future__ import annotations

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients import LossGradients, PerSampleGradients

_STEPS = 1000  # of iterations on small matrices
_TOLERANCE = 1e-12


def normalise(grads: PerSampleGradients, least: float = 1e-12) -> Tensor:
    """`(rows,)`: the weights with which all rows count alike, whatever their norms. Rows of zeros count nothing."""
    norms = grads.norms().double()
    return torch.where(norms > least, 1 / (norms.clamp(min=least) * len(norms)), 0.0)


def trim(grads: PerSampleGradients, share: float = 0.1) -> Tensor:
    """`(rows,)`: the weights of the mean without the share of the rows that lie farthest from the mean of all."""
    if not 0 <= share < 1:
        raise PerSampleError(f"share must be at least 0 and below 1, got {share}.")
    gram = grads.gram().double()
    count = len(gram)
    distances = gram.diagonal() - 2 * gram.mean(1) + gram.mean()
    kept = max(1, count - int(share * count))
    weights = torch.zeros(count, dtype=torch.float64, device=gram.device)
    weights[distances.argsort(stable=True)[:kept]] = 1 / kept
    return weights


def median_of_means(grads: PerSampleGradients, groups: int) -> Tensor:
    """`(rows,)`: the weights of the geometric median of the means of some groups of rows, taken in turns.

    Up to half of the groups may contain rows that are arbitrarily wrong.
    """
    gram = grads.gram().double()
    count = len(gram)
    if not 0 < groups <= count:
        raise PerSampleError(f"groups must be between 1 and the {count} rows, got {groups}.")
    members = torch.nn.functional.one_hot(torch.arange(count, device=gram.device) % groups, groups).double()
    means = members / members.sum(0)
    return means @ find_median_weights(means.mT @ gram @ means)


def find_median_weights(gram: Tensor) -> Tensor:
    """`(n,)`: the weights of the geometric median of n vectors, from their Gram matrix."""
    weights = torch.full_like(gram[0], 1 / len(gram))
    least = _TOLERANCE * float(gram.diagonal().mean().clamp(min=0).sqrt()) + torch.finfo(gram.dtype).tiny
    for _ in range(_STEPS):
        distances = (gram.diagonal() - 2 * gram @ weights + weights @ gram @ weights).clamp(min=0).sqrt()
        inverse = 1 / distances.clamp(min=least)
        updated = inverse / inverse.sum()
        if (updated - weights).abs().max() < _TOLERANCE:
            break
        weights = updated
    return weights


def avoid_conflicts(grads: PerSampleGradients | LossGradients, each: bool = False) -> Tensor:
    """`(rows,)`: the weights of the vector closest to the mean that has no negative inner product with any row.

    It is meant for few rows: those of units (`record(units=users)`), for `grads.sum(weights)`; or for the mean
    gradients of several losses (`record(losses=names)`), for `grads.mean(weights)`.

    Args:
        grads: the rows.
        each: project each row by itself, and take the mean of the projections (UPGrad of Quinton and Rey, 2024). A row
            that is scaled then scales its own part of the result, and nothing else.

    >>> import persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, losses=["a", "b"]) as grads:
    ...     out = model(torch.randn(5, 3))
    ...     out[:, 0].mean().backward(retain_graph=True)
    ...     (-out).sum(1).mean().backward()
    >>> avoid_conflicts(grads).shape
    torch.Size([2])
    """
    gram = grads.mean_gram() if isinstance(grads, LossGradients) else grads.gram().double()
    starts = torch.eye(len(gram)).to(gram) if each else torch.full_like(gram[:1], 1 / len(gram))
    return torch.stack([find_conflict_free_weights(gram, start) for start in starts]).mean(0)


def find_conflict_free_weights(gram: Tensor, start: Tensor) -> Tensor:
    """`(n,)`: `start` and the non-negative multipliers that project the sum of n vectors with these weights.

    The projection is on their dual cone. The quadratic program min ½ uᵀGu + uᵀG start over u ≥ 0 is solved by
    coordinate descent.
    """
    extra, diagonal = torch.zeros_like(start), gram.diagonal()
    usable = (diagonal > torch.finfo(gram.dtype).tiny).nonzero().flatten().tolist()
    for _ in range(_STEPS):
        before = extra.clone()
        for i in usable:
            slope = gram[i] @ (start + extra)
            extra[i] = (extra[i] - slope / diagonal[i]).clamp(min=0)
        if (extra - before).abs().max() <= _TOLERANCE:
            break
    return start + extra
