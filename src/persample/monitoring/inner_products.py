"""Sums of rows and their inner products with a direction, both from the term of one parameter when it arrives."""

from __future__ import annotations

import torch
from torch import Tensor

from persample._internal.precision import widen
from persample.terms import Dense, Outer, Patches, Term, find_factors, prefers_onednn, widen_factors

# Positions from which a dense form costs about as much as the sum over the samples. Measured with MKL (one thread, ms,
# for the sum / the sum and an inner product from the factors / both from the dense form), as batch, positions, inputs,
# outputs:
#   8, 64, 128, 512   0.83 / 1.59 / 0.90      8, 256, 768, 768   25 / 52 / 29      32, 256, 288, 64   3.7 / 8.4 / 4.0
_MANY_POSITIONS = 16
_MOST_ENTRIES = 2**24  # of a dense form; reading a larger one costs more than computing it


def make_dense_if_cheap(term: Term) -> Term:
    """An equal term: the dense form if it costs about as much as one sum, so that both answers need one product."""
    if term.batch * term.shape.numel() > _MOST_ENTRIES:
        return term
    if isinstance(term, Outer):  # oneDNN, where it is faster, knows no stacks of products
        is_cheap = term.positions >= _MANY_POSITIONS and not prefers_onednn(term.shape[0], term.input.flatten(0, 1))
    else:
        is_cheap = isinstance(term, Patches)
    return Dense(widen_factors(term).dense()) if is_cheap else term


def add_rows(term: Term) -> Tensor:
    """The sum of the rows of a term."""
    if isinstance(term, Dense):
        return widen(term.values).sum(0)
    return term.sum(torch.ones(term.batch, device=next(find_factors(term)).device))


def multiply_with_sum(term: Term, other: Term) -> Tensor:
    """`(batch,)`: the inner product of each row with the sum of the rows of another term of the same weight."""
    if isinstance(term, Outer) and isinstance(other, Outer):
        own, others = term.batch * term.positions, other.batch * other.positions
        if own * others * sum(term.shape) < (own + others) * term.shape.numel():
            return term.gram(other).sum(1)
    return term.dot(add_rows(other))
