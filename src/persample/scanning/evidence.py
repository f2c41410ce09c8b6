"""Influence from whole gradients with evidence: what the scores cover, and how far they can be trusted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.options import make_options
from persample.batches import Batch
from persample.losses import LossFunction, compute_loss
from persample.scanning.answers import Influence, rank_scores
from persample.scanning.batch_losses import BatchLosses
from persample.scanning.errors import ScanError
from persample.scanning.exact import Groups, Question, check_groups, find_directions, iterate_scores, multiply
from persample.scanning.passes import SHARD_SIZE, Fitted, Passes, PassKeywords, PassOptions
from persample.scanning.statistics import correlate_ranks
from persample.terms import Dense

# How many queries and examples are replayed, and the least agreement of their scores. The scores of two checkpoints
# with a mean rank correlation below the bound are noise.
QUERIES, EXAMPLES, LEAST_AGREEMENT, LEAST_CORRELATION = 3, 6, 0.9, 0.05


@dataclass(frozen=True)
class Evidence:
    """Scores `(queries, examples)`, and how far they can be trusted.

    Attributes:
        scores: the mean over the checkpoints.
        errors: the standard error of each score over the checkpoints; None with one checkpoint.
        correlations: for each query the mean rank correlation of the scores of two checkpoints; None with one.
        agreement: the correlation of a few scores with those of the same queries and examples, each alone, by plain
            autograd in float64; None if the model does not run in float64.
        coverage: the share of the model's parameters that the scores are about.
    """

    scores: Tensor
    errors: Tensor | None
    correlations: Tensor | None
    agreement: float | None
    coverage: float

    def find_faults(self) -> list[str]:
        """Why the scores are noise; empty if nothing speaks for it."""
        faults = []
        if self.agreement is not None and not self.agreement >= LEAST_AGREEMENT:
            faults.append(
                f"a few scores, computed again in float64, have a correlation of {self.agreement:.2f} with them: run "
                "the model in a wider dtype"
            )
        if self.correlations is not None and not float(self.correlations.mean()) >= LEAST_CORRELATION:
            faults.append(
                f"the scores of different checkpoints have a mean rank correlation of {self.correlations.mean():.2f}: "
                "take other checkpoints of one training, or another method"
            )
        return faults

    def rank(self, k: int) -> Influence:
        """The `k` examples with the largest and the smallest scores of each query; an error if scores are noise."""
        if faults := self.find_faults():
            raise ScanError(f"These scores are not ranked, because {'; and '.join(faults)}.")
        return rank_scores(self.scores, min(k, self.scores.shape[1]))


def score_with_evidence(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    **options: Any,
) -> Evidence:
    """`score` with the evidence for it, for a few more passes of single examples.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
    >>> found = score_with_evidence(model, nn.CrossEntropyLoss(), (x, y), (x[:5], y[:5]), damping=0.1)
    >>> found.coverage, round(found.agreement, 3), found.rank(3).for_ids.shape
    (1.0, 1.0, torch.Size([5, 3]))

    All options are those of `score`.
    """
    run, asked = _prepare(model, loss_fn, data, queries, options)
    found, agreement, covered = [], None, 0
    with run.load_each() as loaded:
        for checkpoint in loaded:
            fitted = asked.fit(run, checkpoint)
            directions = find_directions(run, fitted, asked)
            found.append(multiply(run, asked, fitted, directions)[0])
            if checkpoint == 0:
                agreement = replay_some(run, asked, fitted, found[0])
            covered = max(covered, sum(run.parameters[name].numel() for name in directions))
    stacked = torch.stack(found)
    count, errors, correlations = len(found), None, None
    if count > 1:
        errors = stacked.std(0) / count**0.5
        pairs = [(i, j) for i in range(count) for j in range(i)]
        correlations = torch.stack([correlate_ranks(stacked[i], stacked[j]) for i, j in pairs]).mean(0)
    return Evidence(stacked.mean(0), errors, correlations, agreement, covered / count_entries(model))


def score_parts(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    groups: Groups,
    **options: Any,
) -> dict[str, Tensor]:
    """`score` for each group of parameters, from the same passes: the scores of disjoint groups add up to the score.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
    >>> groups = {"first": ["0.weight", "0.bias"], "class 1": [("2.weight", 1), ("2.bias", 1)]}
    >>> found = score_parts(model, nn.CrossEntropyLoss(), (x, y), (x[:5], y[:5]), groups)
    >>> {name: part.shape for name, part in found.items()}
    {'first': torch.Size([5, 100]), 'class 1': torch.Size([5, 100])}

    Args:
        groups: for each name a list of parameters, or of pairs of a parameter and an index of its entries: the rows of
            a head, or of an expert.
        **options: those of `score`. With `query_rank`, the entries of a group are those of the approximation. With
            `cosine`, the lengths are those of all parameters.
    """
    run, asked = _prepare(model, loss_fn, data, queries, options)
    check_groups(groups, list(run.parameters))
    found = list(iterate_scores(run, asked, groups))
    return dict(zip(groups, torch.stack(found).mean(0), strict=True))


def _prepare(
    model: nn.Module, loss_fn: LossFunction, data: Any, queries: Any, options: Mapping[str, Any]
) -> tuple[Passes, Question]:
    """The passes and the question of the options of `score`."""
    asked = {field.name for field in fields(Question)}
    own = {name: value for name, value in options.items() if name in asked}
    others: Any = {name: value for name, value in options.items() if name not in asked}
    passes = Passes(model, loss_fn, data, make_options(PassOptions, "score", others, PassKeywords))
    return passes, Question(queries, **own)


def count_entries(model: nn.Module) -> int:
    """The number of entries of all parameters, trained or not."""
    return max(1, sum(p.numel() for p in model.parameters()))


# ---- replays ----


def replay_some(passes: Passes, question: Question, fitted: Fitted, scores: Tensor) -> float | None:
    """The correlation of a few scores with those from single samples in float64; None if the model does not run so."""
    batch = next(iter(passes.source.iterate_batches(SHARD_SIZE, lambda shard: True)))
    places = _spread(len(batch.ids), EXAMPLES)
    chosen = _spread(scores.shape[0], QUERIES)
    try:
        wide = copy.deepcopy(passes.measurement.model).double()
        examples, asked = passes.measurement.losses, passes.queried.losses
        rows = [_differentiate(wide, passes, examples, batch.batch, len(batch.ids), i) for i in places]
        own = [_differentiate(wide, passes, asked, question.queries, len(scores), j) for j in chosen]
        if question.rather_than is not None:
            other = [_differentiate(wide, passes, asked, question.rather_than, len(scores), j) for j in chosen]
            pairs = zip(own, other, strict=True)
            own = [{name: part - minus[name] for name, part in one.items()} for one, minus in pairs]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # an op or the model's code needs another dtype
        return None
    found = torch.tensor([[_compare(fitted, question, one, row) for row in rows] for one in own]).double()
    given = scores[chosen][:, [batch.ids[i] for i in places]].double().cpu()
    both = torch.stack([found.flatten(), given.flatten()])
    both = both / both.abs().amax(1, keepdim=True).clamp(min=1e-300)
    return float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else float(bool((both[0] == both[1]).all()))


def _spread(count: int, wanted: int) -> list[int]:
    return torch.linspace(0, count - 1, min(count, wanted)).round().long().tolist()


def _differentiate(
    model: nn.Module, passes: Passes, losses: BatchLosses, batch: Any, size: int, i: int
) -> dict[str, Tensor]:
    """The gradient of one sample alone, in float64."""
    alone = Batch(losses.prepare(batch), passes.batch_dim, size, losses.takes_pairs).take_samples(i, i + 1, _widen)
    loss = compute_loss(model, alone, losses.loss_fn).sum()
    own = dict(model.named_parameters())
    chosen = [own[name] for name in passes.parameters]
    grads = torch.autograd.grad(loss, chosen, allow_unused=True)
    pairs = zip(passes.parameters, chosen, grads, strict=True)
    return {name: torch.zeros_like(p) if grad is None else grad for name, p, grad in pairs}


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _compare(fitted: Fitted, question: Question, query: Mapping[str, Tensor], row: Mapping[str, Tensor]) -> float:
    """The score of one query and one example from their dense gradients."""
    inner, squares = 0.0, [0.0, 0.0]
    for name, own in fitted.items():
        left, right = Dense(query[name][None]), Dense(row[name][None])
        inner += float(own.apply(left, question.damping).inner(right))
        if question.cosine:
            squares[0] += float(own.compute_query_squares(left, question.damping))
            squares[1] += float(own.compute_squares(right, question.damping))
    product = (squares[0] * squares[1]) ** 0.5 if question.cosine else 1.0
    return inner / product if product else 0.0
