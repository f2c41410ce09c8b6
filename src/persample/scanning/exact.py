"""Influence from whole gradients: nothing is projected, and nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from persample._internal.options import make_options, show_options
from persample.losses import LossFunction
from persample.scanning.errors import ScanError
from persample.scanning.passes import Fitted, Passes, PassKeywords, PassOptions
from persample.scanning.preconditioners import PRECONDITIONERS, Name, compress
from persample.terms import Dense, Term

USUAL_DAMPING = 0.1  # of the mean eigenvalue of each parameter: docs/internals/scan_evidence.md


@dataclass(frozen=True)
class Question:
    """Queries, and how their gradients are preconditioned; see `score`."""

    queries: Any
    method: Name = "ekfac"
    damping: float = USUAL_DAMPING
    query_rank: int | None = None
    rather_than: Any = None

    def __post_init__(self) -> None:
        check_exact_method(self.method)
        if not 0 < self.damping < float("inf"):
            raise ScanError(
                f"damping must be a positive number, relative to the mean second moment, got {self.damping!r}."
            )
        if self.query_rank is not None and self.query_rank < 1:
            raise ScanError(f"query_rank must be a positive number or None, got {self.query_rank!r}.")


@show_options(PassOptions, PassKeywords)
def score(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    *,
    method: Name = "ekfac",
    damping: float = USUAL_DAMPING,
    query_rank: int | None = None,
    rather_than: Any = None,
    **options: Unpack[PassKeywords],
) -> Tensor:
    """`(queries, examples)`: the influence of each example of `data` on each sample of a batch, from whole gradients.

    A training step on an example with a positive score lowers the loss of the query. Nothing is projected and nothing
    stored, so the next queries cost the same again; `scan` stores rows for many queries.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
    >>> score(model, nn.CrossEntropyLoss(), (x, y), (x[:5], y[:5])).shape
    torch.Size([5, 100])
    >>> score(model, nn.CrossEntropyLoss(), (x, y), (x[:5], y[:5]), rather_than=(x[:5], 1 - y[:5])).shape
    torch.Size([5, 100])

    Args:
        data: the training data, as for `scan`; the gradients of the queries and one batch are in memory at a time.
        queries: a batch of samples with their targets, as the loss takes them.
        method: how the gradients of the queries are preconditioned. "ekfac" divides by the second moments along the
            eigenvectors of Kronecker factors, in three passes over the data; "kfac" takes the product of both factors
            for the second moments, in two passes; "block" divides by the full second moment of each parameter, for
            parameters with more than 1,024 entries by an approximation of that rank at most, in two passes; "diagonal"
            divides by the second moment of each entry, in two passes; "identity" by nothing, in one pass: exact inner
            products.
        damping: what is added to the second moments, relative to their mean for each parameter.
        query_rank: keep the gradient of each query for a weight as a matrix of this rank, after the preconditioning.
            This saves memory and time for wide layers.
        rather_than: another batch of as many samples. The score is then the effect on the difference of the losses,
            `loss(queries) - loss(rather_than)`: why the model says one rather than the other.
        **options: see `PassOptions`.
    """
    question = Question(queries, method, damping, query_rank, rather_than)
    passes = Passes(model, loss_fn, data, make_options(PassOptions, "score", options, PassKeywords))
    total, count = torch.zeros(()), 0
    for scores in iterate_scores(passes, question):
        total, count = total + scores[0], count + 1
    return total / count


def iterate_scores(passes: Passes, question: Question) -> Iterator[Tensor]:
    """`(1, queries, examples)`: the scores with each checkpoint."""
    with passes.load_each() as loaded:
        for _ in loaded:
            yield multiply(passes, find_directions(passes, passes.fit(question.method), question))


def check_exact_method(method: str) -> Name:
    """The preconditioner with this name; an error if there is none."""
    if method not in PRECONDITIONERS:
        raise ScanError(f"method must be one of {', '.join(map(repr, PRECONDITIONERS))}, got {method!r}.")
    return cast(Name, method)


def find_directions(passes: Passes, fitted: Fitted, question: Question) -> Mapping[str, Term]:
    """The preconditioned gradients of the queries by parameter."""

    def apply(name: str, term: Term) -> Dense | None:
        return fitted[name].apply(term, question.damping) if name in fitted else None

    def subtract(name: str, term: Term) -> Term | None:
        solved = apply(name, term)
        if solved is not None and name in others:
            solved = Dense(solved.values - others[name].values)
        return solved if solved is None or question.query_rank is None else compress(solved, question.query_rank)

    others: Mapping[str, Dense] = {}
    if question.rather_than is not None:
        sizes = [passes.count_queries(batch) for batch in (question.rather_than, question.queries)]
        if sizes[0] != sizes[1]:
            raise ScanError(f"rather_than has {sizes[0]} samples, not one for each of the {sizes[1]} queries.")
        others = {
            name: term for name, term in passes.pass_queries(question.rather_than, apply)[1].items() if term is not None
        }
    _, directions = passes.pass_queries(question.queries, subtract)
    missing = {name: Dense(-term.values) for name, term in others.items() if name not in directions}
    return {**missing, **{name: term for name, term in directions.items() if term is not None}}


def multiply(passes: Passes, directions: Mapping[str, Term]) -> Tensor:
    """`(1, queries, examples)`: the inner products of directions with the gradients of all examples."""
    count = max((term.batch for term in directions.values()), default=0)

    def compute(name: str, term: Term) -> Tensor:
        if name not in directions:
            return torch.zeros(term.batch, 1, count)
        return term.gram(directions[name])[:, None]

    return passes.add_up(compute, (1, count))
