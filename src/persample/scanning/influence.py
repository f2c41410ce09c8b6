"""Influence of stored gradients on test samples, by several methods.

Every method is a sum over checkpoints of products of test directions with stored rows; the methods differ in the
directions and in the weights of the rows. So all of them need one pass over the rows, and no matrix of all scores.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from persample.scanning.answers import Influence, RunningTop
from persample.scanning.damping import (
    Damping,
    Whitening,
    check_damping,
    choose_damping,
    compare_with_step,
    is_of_training,
)
from persample.scanning.errors import ScanError
from persample.scanning.preconditioners import PRECONDITIONERS
from persample.scanning.steps import read_steps
from persample.scanning.store import Store
from persample.scanning.stored_gradients import StoredGradients

Method = Literal["tracin", "cosine", "whitened", "trak"]
METHODS: tuple[Method, ...] = get_args(Method)
DAMPED: tuple[Method, ...] = ("whitened", "trak")

GOOD_NUMBER = 4  # of checkpoints: more have not been measured, see docs/internals/scan_evidence.md

# The scores of two halves of the entries of each row are compared on this many examples. A mean correlation below the
# bound means that the scores are on par with random ones.
COMPARED_EXAMPLES, LEAST_CORRELATION = 2048, 0.05
FEWEST_EXAMPLES = 64  # with fewer, the correlation itself is too uncertain


class RandomScores(UserWarning):
    """The scores of a query are on par with random scores."""


@dataclass(frozen=True)
class TestGradients:
    """The projected gradients and the losses of a test batch with one checkpoint, and its learning rate."""

    __test__ = False  # not a class of tests

    rows: Tensor
    losses: Tensor
    learning_rate: float


@dataclass(frozen=True)
class Part:
    """The contribution of one checkpoint to the scores: `directions @ rows.T`, times the `scale` of each row."""

    stored: StoredGradients
    directions: Tensor
    scale: Tensor


class InfluenceScores:
    """The score of every stored example for some test samples, computed in blocks."""

    def __init__(self, parts: Sequence[Part], weights: Tensor | None = None) -> None:
        self._parts, self._weights = parts, weights

    def iterate_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """`(start, scores)` with scores of shape `(samples, examples of the block)`."""
        for blocks in zip(*(part.stored.iterate_blocks() for part in self._parts), strict=True):
            start, total = blocks[0][0], torch.zeros(())
            for part, (_, block) in zip(self._parts, blocks, strict=True):
                scale = part.scale[start : start + len(block)]
                total = total + (part.directions.float() @ block.T) * scale.float()
            if self._weights is not None:
                total = total * self._weights[start : start + total.shape[1]].float()
            yield start, total

    def compute(self) -> Tensor:
        """`(samples, examples)`: all scores."""
        return torch.cat([scores for _, scores in self.iterate_blocks()], dim=1)

    def rank(self, k: int) -> Influence:
        """The `k` largest and the `k` smallest scores of each sample."""
        best, worst = RunningTop(k), RunningTop(k, largest=False)
        for start, scores in self.iterate_blocks():
            best.add(start, scores)
            worst.add(start, scores)
        return Influence(best.ids, best.scores, worst.ids, worst.scores)


class StoredModel:
    """The stored gradients of one checkpoint with what the methods derive from them, computed once.

    `step` is what the training subtracted from the weights until the next checkpoint, projected; None if unknown.
    `loss` is the name of the loss.
    """

    def __init__(self, stored: StoredGradients, step: Tensor | None = None, loss: str = "") -> None:
        self.stored = stored
        self._step, self._loss = step, loss
        self._moments: dict[Method, Tensor] = {}
        self._whitenings: dict[tuple[Method, float], Whitening] = {}

    @cached_property
    def residuals(self) -> Tensor:
        """The derivative of each example's loss; see `compute_residuals`."""
        losses = self.stored.read_losses().double()
        return self.compute_residuals(torch.where(self.stored.lengths > 0, losses, 0.0))

    def compute_residuals(self, losses: Tensor) -> Tensor:
        """`compute_residuals` for the loss of this model."""
        return compute_residuals(losses, self._loss in _SQUARED_LOSSES)

    @cached_property
    def step_cosines(self) -> Tensor | None:
        """How well each candidate for the damping predicts the step to the next checkpoint; None if it is unknown."""
        if self._step is None:
            return None
        mean = self.stored.compute_sum(self.stored.lengths) / len(self.stored)
        return compare_with_step(self._get_moment("whitened"), self.stored.blocks, mean, self._step)

    def get_scale(self, method: Method) -> Tensor:
        """The factor from a stored row to the feature that `method` whitens."""
        lengths = self.stored.lengths.double()
        return lengths / self.residuals if method == "trak" else lengths

    def whiten(self, rows: Tensor, method: Method, damping: float) -> Tensor:
        """Rows times the damped inverse of the second moment of the features of `method`.

        Rows that were whitened before they were projected stay as they are with an infinite damping.
        """
        return rows if damping == math.inf else self._get_whitening(method, damping).solve(rows)

    def _get_whitening(self, method: Method, damping: float) -> Whitening:
        key = (method, damping)
        if key not in self._whitenings:
            self._whitenings[key] = Whitening(self._get_moment(method), damping, self.stored.blocks)
        return self._whitenings[key]

    def _get_moment(self, method: Method) -> Tensor:
        if method not in self._moments:
            self._moments[method] = self.stored.compute_second_moment(self.get_scale(method))
        return self._moments[method]


def load_models(store: Store) -> list[StoredModel]:
    """The stored gradients of all checkpoints."""
    loss = store.read_settings()["loss"]
    return [StoredModel(StoredGradients(store, k), step, loss) for k, step in enumerate(read_steps(store))]


def find_damping(models: Sequence[StoredModel], method: Method, damping: Damping) -> float:
    """The damping as a number: "auto" is chosen by the steps of the training between the checkpoints, if any.

    Rows that were whitened before they were projected are not whitened again: "auto" is infinite.
    """
    check_damping(damping)
    if damping != "auto" or method not in DAMPED:
        return 0.0 if damping == "auto" else float(damping)
    if models[0].stored.are_whitened:
        return math.inf
    return choose_damping([model.step_cosines for model in models if model.step_cosines is not None])


def describe_training(models: Sequence[StoredModel]) -> str:
    """What the scanned checkpoints are, and the damping that follows from them."""
    if models[0].stored.are_whitened:
        return f"{len(models)} model{'s' * (len(models) > 1)}, with gradients that were whitened before the projection"
    strength = f'"auto" is a damping of {find_damping(models, "whitened", "auto"):.2g}'
    if len(models) == 1:
        return f"one model; {strength}. Scores are better with about {GOOD_NUMBER} checkpoints of its training."
    known = [model.step_cosines for model in models[:-1]]
    count = sum(part is not None and is_of_training(part) for part in known)
    if count == len(known):
        return f"{len(models)} checkpoints of one training; {strength}"
    return (
        f"{len(models)} checkpoints, of which {len(known) - count} are not followed by a later one of the same "
        f"training; {strength}"
    )


def make_scores(
    models: Sequence[StoredModel], tests: Sequence[TestGradients], method: Method, damping: Damping, of_loss: bool
) -> InfluenceScores:
    """The scores of a method. `of_loss`: the test gradients are those of the loss, not of another function."""
    check_method(method)
    strength = find_damping(models, method, damping)
    total_rate = sum(test.learning_rate for test in tests)
    parts = []
    for model, test in zip(models, tests, strict=True):
        rows, rate = test.rows.double(), test.learning_rate
        if method in DAMPED:
            if method == "trak" and of_loss:
                rows = rows / model.compute_residuals(test.losses)[:, None]
            rows, rate = model.whiten(rows, method, strength), 1 / len(tests)
        elif method == "cosine":
            rows, rate = normalize(rows), rate / total_rate
        scale = (model.stored.lengths > 0).double() if method == "cosine" else model.get_scale(method)
        parts.append(Part(model.stored, rate * rows, scale))
    weights = torch.stack([model.residuals for model in models]).mean(0) if method == "trak" else None
    return InfluenceScores(parts, weights)


def compute_self_influence(
    models: Sequence[StoredModel], rates: Sequence[float], method: Method, damping: Damping
) -> Tensor:
    """`(examples,)`: the score of each stored example for itself."""
    check_method(method)
    if method == "cosine":
        raise ScanError("The cosine of a gradient with itself is 1: choose another method for self_influence.")
    strength = find_damping(models, method, damping)
    total = torch.zeros(len(models[0].stored), dtype=torch.float64)
    for model, rate in zip(models, rates, strict=True):
        scale = model.get_scale(method)
        if method not in DAMPED:
            total += rate * scale.square()
            continue
        blocks = (block.double() for _, block in model.stored.iterate_blocks())
        squares = torch.cat([(model.whiten(block, method, strength) * block).sum(1) for block in blocks])
        total += squares * scale.square() / len(models)
    if method == "trak":
        total *= torch.stack([model.residuals for model in models]).mean(0)
    return total


def check_method(method: str, are_whitened: bool = False) -> Method:
    """The method with this name; an error if there is none, or none for rows that were whitened before."""
    if method not in METHODS:
        advice = " Other methods need exact=True." if method in PRECONDITIONERS else ""
        raise ScanError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}.{advice}")
    if are_whitened and method not in ("whitened", "cosine"):
        raise ScanError(
            f"method={method!r} needs plain gradients, and those of this scan were whitened (precondition). Use "
            "'whitened' or 'cosine'."
        )
    return method


def check_trak_loss(name: str) -> None:
    """Raise if the loss with this name is one of torch that "trak" has no formula for."""
    is_torch = hasattr(nn, name) or hasattr(nn.functional, name)
    if is_torch and name not in _LABEL_LOSSES + _SQUARED_LOSSES:
        raise ScanError(
            f"method='trak' needs a loss that is -log p of each sample's label, such as cross-entropy, or a squared "
            f"error, but the loss of the scan is {name}. Use method='whitened'."
        )


_LABEL_LOSSES = (
    "CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss", "BCELoss", "binary_cross_entropy", "BCEWithLogitsLoss",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
_SQUARED_LOSSES = ("MSELoss", "mse_loss")


def compute_residuals(losses: Tensor, is_squared: bool = False) -> Tensor:
    """The absolute derivative of each loss in the function `f` whose gradients "trak" whitens.

    For losses `-log p`, `f` is the margin `log(p / (1 - p))`, and the derivative is `1 - p`. For squared errors, `f` is
    the root of the loss, and the derivative `2 f`: the whitening is then that of the Gauss-Newton matrix. The gradient
    of `f` is that of the loss divided by the derivative.

    >>> compute_residuals(torch.tensor([0.0, 0.6931472]))
    tensor([1.1921e-07, 5.0000e-01])
    >>> compute_residuals(torch.tensor([0.25, 9.0]), is_squared=True)
    tensor([1., 6.])
    """
    if bool((losses < 0).any()):
        raise ScanError(
            "method='trak' needs losses that are -log p of each sample's label, or squared errors, but some losses of "
            "the scan are negative. Use method='whitened'."
        )
    residuals = 2 * losses.sqrt() if is_squared else -torch.expm1(-losses)
    return residuals.clamp(min=torch.finfo(torch.float32).eps)


# ---- are the scores better than random? ----


def warn_if_random(
    models: Sequence[StoredModel], tests: Sequence[TestGradients], method: Method, damping: Damping
) -> float:
    """Warn if the scores are mostly noise of the projection; return the correlation that shows it.

    The entries of the rows are split into those with even and with odd numbers. Both halves are projections of the
    same gradients, so that both give scores of the same examples, with independent errors. If the two scores of
    a sample correlate on average by less than `LEAST_CORRELATION`, their common part, which is what a score is about,
    is lost in the errors. The examples are `COMPARED_EXAMPLES` evenly spaced ones; fewer than `FEWEST_EXAMPLES` are not
    compared.
    """
    if len(models[0].stored) < FEWEST_EXAMPLES:
        return 1.0
    strength = find_damping(models, method, damping)
    halves = [_score_sample(models, tests, method, strength, first) for first in (0, 1)]
    correlation = float(_correlate(*halves).mean())
    if correlation < LEAST_CORRELATION:
        warnings.warn(
            f"The influence scores are on par with random: two halves of the projected gradients give scores with a "
            f"correlation of {correlation:.2f}. Scan with a larger `project`, choose another `method` or a larger "
            "`damping`, or measure the quality of the scores by persample.evaluate.",
            RandomScores,
            stacklevel=4,  # the caller of Scan.influence or Scan.scores
        )
    return correlation


def _score_sample(
    models: Sequence[StoredModel], tests: Sequence[TestGradients], method: Method, damping: float, first: int
) -> Tensor:
    """Scores from every second entry of the rows, for evenly spaced examples."""
    half, total = slice(first, None, 2), torch.zeros(())
    for model, test in zip(models, tests, strict=True):
        ids, rows = model.stored.sample_rows(COMPARED_EXAMPLES)
        features = rows[:, half].double() * (1.0 if method == "cosine" else model.get_scale(method)[ids, None])
        own = test.rows[:, half].double()
        if method in DAMPED:
            if damping < math.inf:
                blocks = None if model.stored.blocks is None else model.stored.blocks[half]
                own = Whitening(features.T @ features / len(features), damping, blocks).solve(own)
            features = features * (model.residuals[ids, None] if method == "trak" else 1.0)
        total = total + test.learning_rate * own @ features.T
    return total


def _correlate(one: Tensor, other: Tensor) -> Tensor:
    """Correlation of each row of one matrix with the same row of the other; 1 if either is constant."""
    one, other = (part - part.mean(1, keepdim=True) for part in (one, other))
    lengths = one.norm(dim=1) * other.norm(dim=1)
    return torch.where(lengths > 0, (one * other).sum(1) / lengths.clamp(min=1e-300), 1.0)
