"""Influence from whole gradients: nothing is projected, and nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from persample._internal.options import make_options, show_options
from persample.losses import LossFunction
from persample.scanning.errors import ScanError
from persample.scanning.passes import Fitted, Passes, PassKeywords, PassOptions
from persample.scanning.preconditioners import PRECONDITIONERS, Name, StepSizes, compress
from persample.scanning.step_sizes import Adam, get_step_sizes
from persample.terms import Dense, Term

# A parameter, or a parameter and an index of its entries: `("attention.weight", slice(0, 64))`.
Part = str | tuple[str, Any]
Groups = Mapping[str, Sequence[Part]]

USUAL_DAMPING = 0.1  # of the mean eigenvalue of each parameter: docs/internals/scan_evidence.md


@dataclass(frozen=True)
class Question:
    """Queries, and how their gradients are preconditioned and compared; see `score`."""

    queries: Any
    method: Name | None = None
    damping: float = USUAL_DAMPING
    query_rank: int | None = None
    rather_than: Any = None
    cosine: bool = False
    query_share: float = 0.0
    adam: Adam | Sequence[Adam] | None = None

    def __post_init__(self) -> None:
        if self.method is not None:
            check_exact_method(self.method)
        if not 0 < self.damping < float("inf"):
            raise ScanError(
                f"damping must be a positive number, relative to the mean second moment, got {self.damping!r}."
            )
        if self.query_rank is not None and self.query_rank < 1:
            raise ScanError(f"query_rank must be a positive number or None, got {self.query_rank!r}.")
        if not 0 <= self.query_share < 1:
            raise ScanError(f"query_share must be a number from 0 to below 1, got {self.query_share!r}.")
        if self.adam is not None and (self.method is not None or self.query_share):
            raise ScanError("adam takes the place of method and query_share.")
        if self.cosine and self.rather_than is not None:
            raise ScanError("cosine is not defined for a difference of two losses: leave rather_than out.")

    def fit(self, passes: Passes, checkpoint: int) -> Fitted:
        """The preconditioner of each parameter, with the checkpoint that is loaded."""
        if self.adam is None:
            return passes.fit(self.method or "ekfac", self.queries, self.query_share)
        given = self.adam if isinstance(self.adam, Sequence) else [self.adam] * passes.checkpoints.count
        if len(given) != passes.checkpoints.count:
            raise ScanError(f"Got {len(given)} states of Adam for {passes.checkpoints.count} checkpoints.")
        sizes = get_step_sizes(given[checkpoint], passes.parameters)
        return {name: StepSizes(part) for name, part in sizes.items()}


@show_options(PassOptions, PassKeywords)
def score(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    *,
    method: Name | None = None,
    damping: float = USUAL_DAMPING,
    query_rank: int | None = None,
    rather_than: Any = None,
    cosine: bool = False,
    query_share: float = 0.0,
    adam: Adam | Sequence[Adam] | None = None,
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
        method: how the gradients of the queries are preconditioned, by default "ekfac". "ekfac" divides by the second
            moments along the eigenvectors of Kronecker factors, in three passes over the data; "kfac" takes the product
            of both factors for the second moments, in two passes; "block" divides by the full second moment of each
            parameter, for parameters with more than 1,024 entries by an approximation of that rank at most, in two
            passes; "diagonal" divides by the second moment of each entry, in two passes; "identity" by nothing, in one
            pass: exact inner products.
        damping: what is added to the second moments, relative to their mean for each parameter.
        query_rank: keep the gradient of each query for a weight as a matrix of this rank, after the preconditioning.
            This saves memory and time for wide layers.
        rather_than: another batch of as many samples. The score is then the effect on the difference of the losses,
            `loss(queries) - loss(rather_than)`: why the model says one rather than the other.
        cosine: divide by the lengths of both gradients after the preconditioning, as TrackStar does. Long gradients, of
            unusual or wrong examples, do not come first then.
        query_share: the share of the queries in the second moments, the rest is that of the data. What all queries have
            in common then counts less.
        adam: in place of `method`: the Adam optimizer of the training, or its second moments by parameter name; or one
            of them for each checkpoint. An example then counts by the step that Adam does for its gradient, without
            momentum, as in LESS.
        **options: see `PassOptions`.
    """
    question = Question(queries, method, damping, query_rank, rather_than, cosine, query_share, adam)
    passes = Passes(model, loss_fn, data, make_options(PassOptions, "score", options, PassKeywords))
    total, count = torch.zeros(()), 0
    for scores in iterate_scores(passes, question):
        total, count = total + scores[0], count + 1
    return total / count


def iterate_scores(passes: Passes, question: Question, groups: Groups | None = None) -> Iterator[Tensor]:
    """`(groups, queries, examples)`: the scores with each checkpoint, by default of one group with all parameters."""
    with passes.load_each() as loaded:
        for checkpoint in loaded:
            fitted = question.fit(passes, checkpoint)
            yield multiply(passes, question, fitted, find_directions(passes, fitted, question), groups)


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


def multiply(
    passes: Passes, question: Question, fitted: Fitted, directions: Mapping[str, Term], groups: Groups | None = None
) -> Tensor:
    """`(groups, queries, examples)`: the inner products of directions with the gradients of all examples."""
    count = max((term.batch for term in directions.values()), default=0)
    parts = split_directions(directions, groups)
    size = 1 if groups is None else len(groups)

    def compute(name: str, term: Term) -> Tensor:
        found = torch.zeros(term.batch, size + question.cosine, count)
        for group, direction in parts.get(name, ()):
            inner = term.gram(direction)
            found = found.to(torch.promote_types(found.dtype, inner.dtype)).to(inner.device)
            found[:, group] += inner
        if question.cosine and name in fitted:
            found[:, -1] = fitted[name].compute_squares(term, question.damping)[:, None]
        return found

    scores = passes.add_up(compute, (size + question.cosine, count))
    if not question.cosine:
        return scores
    _, squares = passes.pass_queries(
        question.queries,
        lambda name, term: fitted[name].compute_query_squares(term, question.damping) if name in fitted else 0.0,
    )
    lengths = sum(squares.values(), torch.zeros(count)).to(scores.device).sqrt()
    products = scores[-1].sqrt() * lengths[:, None]
    return torch.where(products > 0, scores[:-1] / products, 0.0)


# ---- parts of a model ----


def split_directions(directions: Mapping[str, Term], groups: Groups | None) -> dict[str, list[tuple[int, Term]]]:
    """For each parameter the numbers of its groups, with directions that are zero outside of the group."""
    if groups is None:
        return {name: [(0, term)] for name, term in directions.items()}
    found: dict[str, list[tuple[int, Term]]] = {}
    for number, parts in enumerate(groups.values()):
        for part in parts:
            name, index = (part, None) if isinstance(part, str) else part
            if name in directions:
                term = directions[name]
                found.setdefault(name, []).append((number, term if index is None else _select(term, name, index)))
    return found


def check_groups(groups: Groups, names: Sequence[str]) -> None:
    """Raise if a group has a parameter that does not exist."""
    if not groups:
        raise ScanError("groups is empty: pass a dict from the name of each group to its parameters.")
    for group, parts in groups.items():
        if isinstance(parts, str):
            raise ScanError(f"The group {group!r} must be a list of parameters, got {parts!r}.")
        for part in parts:
            name = part if isinstance(part, str) else part[0]
            if name not in names:
                raise ScanError(f"The group {group!r} contains {name!r}, which is not a parameter that counts.")


def _select(term: Term, name: str, index: Any) -> Term:
    """Gradients that are zero outside of some entries of the parameter."""
    mask = torch.zeros(term.shape, dtype=torch.bool)
    try:
        mask[index] = True
    except (IndexError, TypeError) as error:
        raise ScanError(
            f"{index!r} is no index of {name!r}, which has the shape {tuple(term.shape)}: {error}"
        ) from None
    rows = term.dense()
    return Dense(rows * mask.to(rows.device))
