"""Choose what to train on: of a pool of examples those that lower a validation loss most, and are different.

A step with the learning rate η on a subset S changes the validation loss, up to terms of third order, by

    -η Σ ⟨g_i, v⟩  +  η²/2 Σ Σ ⟨g_i, H g_k⟩          i, k in S

with the gradients g_i, that of the validation loss v, and its Hessian H. With H a multiple c of the identity this is a
choice by values and the Gram matrix alone, both from one backward pass of the pool. It is made greedily (Wang
et al., 2024, GREATS): the next example is that with the largest gain, where k runs over those chosen before,

    ⟨g_i, v⟩ - ηc (½⟨g_i, g_i⟩ + Σ_k ⟨g_i, g_k⟩)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients


def select(
    grads: PerSampleGradients, count: int, direction: Mapping[str, Tensor] | None = None, diversity: float = 0.1
) -> Tensor:
    """`(count,)`: the rows to train on, best first.

    Args:
        grads: the recording of a pool of examples.
        count: how many rows to choose.
        direction: `{name: shape}`, what the chosen rows should agree with, such as the gradient of a validation loss;
            by default the mean of the pool.
        diversity: how much similarity to rows chosen before counts: ηc above, times `count`. 0 takes the largest
            values; with 1 the mean of the chosen rows comes as close to the direction as a greedy choice can.

    >>> import persample
    >>> model = torch.nn.Linear(3, 1)
    >>> x, y = torch.randn(16, 3), torch.randn(16, 1)
    >>> with persample.record(model) as grads:
    ...     (model(x) - y).square().mean().backward()
    >>> chosen = select(grads, 4)
    >>> for p, total in zip(model.parameters(), weighted_sum(grads, chosen).values()):
    ...     p.grad = total
    """
    if not 0 < count <= grads.row_count:
        raise PerSampleError(f"count must be between 1 and the {grads.row_count} rows of the pool, got {count}.")
    values = grads.dot(grads.mean() if direction is None else direction).double()
    if not diversity:
        return values.argsort(descending=True, stable=True)[:count]
    return choose_greedily(values, grads.gram().double(), count, diversity)


def choose_greedily(values: Tensor, gram: Tensor, count: int, diversity: float) -> Tensor:
    """`(count,)`: the greedy choice by the values `(rows,)` and the Gram matrix `(rows, rows)` of the rows."""
    factor, chosen = diversity / count, []
    gains = values - factor * gram.diagonal() / 2
    for _ in range(count):
        best = int(gains.argmax())
        chosen.append(best)
        gains = gains - factor * gram[best]
        gains[best] = -torch.inf
    return torch.tensor(chosen, device=values.device)


def weighted_sum(grads: PerSampleGradients, chosen: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """`{name: shape}`: the mean of the chosen rows, or their sum with weights, from the recording of the pool.

    No second backward pass is needed.
    """
    each = torch.full((len(chosen),), 1 / len(chosen)) if weights is None else weights
    every = torch.zeros(grads.row_count, dtype=torch.float32, device=chosen.device)
    return grads.sum(every.index_put_((chosen,), each.to(every), accumulate=True))
