"""How well influence scores and rankings work on a user's own training."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.text import format_table
from persample.losses import LossFunction
from persample.scanning.errors import ScanError
from persample.scanning.exact import check_exact_method
from persample.scanning.influence import METHODS, check_method
from persample.scanning.progress import choose_bar
from persample.scanning.results import Scan
from persample.scanning.retraining import (
    SubsetRuns,
    Train,
    compute_test_losses,
    draw_subsets,
    flip_labels,
    take_examples,
    train_model,
)
from persample.scanning.run import scan
from persample.scanning.source import Source
from persample.scanning.statistics import Estimate, correlate_ranks, estimate_auc, estimate_lds

RANKINGS = ("loss", "norm", "self_influence", "whitened self-influence")
_WHITENED = " self-influence"  # after the name of a method


@dataclass(frozen=True)
class Trained:
    """Models trained on all the data, for a method of the user: `models`, their `data`, and their `scan`."""

    models: Sequence[nn.Module]
    data: Any
    scan: Scan


ScoreFunction = Callable[[Trained, Any], Tensor]
MethodOptions = str | Mapping[str, Any] | ScoreFunction


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of `evaluate`.

    `lds` and `mislabel_auc` have an estimate for each method and ranking. `ceiling` is the largest LDS that any method
    could reach with these trainings, which differ by chance; None if `repeats` is 1. `seconds` are the times of the
    parts. `runs` has the trainings on subsets.
    """

    lds: Mapping[str, Estimate]
    mislabel_auc: Mapping[str, Estimate]
    ceiling: float | None
    seconds: Mapping[str, float]
    runs: SubsetRuns

    def __repr__(self) -> str:
        subsets, repeats, tests = self.runs.losses.shape
        lines = [f"LDS over {subsets} subsets ({repeats} trainings each) and {tests} test samples, 95 % intervals:"]
        lines.append(_format_estimates(self.lds, 0.0))
        if self.ceiling is not None:
            lines.append(f"  (at most {self.ceiling:.2f} can be reached: trainings differ by chance)")
        if self.mislabel_auc:
            lines += ["Flipped labels, area under the ROC curve:", _format_estimates(self.mislabel_auc, 0.5)]
        return "\n".join(lines)


def evaluate(
    train: Train,
    data: Any,
    test_batch: Any,
    loss_fn: LossFunction,
    *,
    methods: Sequence[str] | Mapping[str, MethodOptions] = METHODS,
    rankings: Sequence[str] | Mapping[str, str | Callable[[Scan], Tensor]] = RANKINGS,
    subsets: int = 32,
    part: float = 0.5,
    repeats: int = 1,
    models: int = 1,
    flipped: float = 0.1,
    seed: int = 0,
    resamples: int = 500,
    progress: bool | None = None,
    **scan_options: Any,
) -> Evaluation:
    """Measure how well influence scores and rankings work for a model, by training it again and again.

    >>> def train(data, seed):
    ...     model = nn.Linear(4, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    ...         optimizer.step()
    ...     return model
    >>> x = torch.randn(80, 4)
    >>> y = (x[:, 0] > 0).long()
    >>> found = evaluate(train, (x[:60], y[:60]), (x[60:], y[60:]), nn.CrossEntropyLoss(), subsets=8, project=16)
    >>> sorted(found.lds), sorted(found.mislabel_auc)[:2]
    (['cosine', 'tracin', 'trak', 'whitened'], ['loss', 'norm'])

    The *linear datamodeling score* (LDS; Park et al., 2023): models are trained on random subsets of the data. For a
    test sample, the sum of the influence scores of a subset should predict the loss of the model trained on it. LDS is
    the rank correlation of the two over the subsets, averaged over the test samples: 0 for random scores, 1 at best.

    *Flipped labels*: a part of the labels is changed, a model is trained on them, and the examples are ranked. The area
    under the ROC curve is the probability that a flipped example comes before another: 0.5 for a random order.

    Intervals are 95 % bootstrap intervals over test samples and subsets, or over examples. They do not include the
    randomness of the models that are scanned; use several `models` or seeds for that.

    Args:
        train: called as `train(data, seed)`, returns a model, or a model and a list of checkpoints (state dicts). The
            data has the form of `data`: tensors stay tensors, another dataset becomes a `torch.utils.data.Subset`.
        data: the training data, as for `scan`.
        test_batch: samples with their targets, as the loss takes them.
        loss_fn: the loss, as for `scan`.
        methods: methods of `Scan.influence`. A dict gives names to methods, to options of `Scan.scores`, such as
            `{"method": "whitened", "damping": 0.3}` or `{"exact": True}`, or to functions of a `Trained` and the test
            batch that return scores `(tests, examples)`.
        rankings: columns of the scan, or "METHOD self-influence". A dict gives names to them, or to functions of a
            `Scan` that return a score for each example.
        subsets: the number of random subsets.
        part: the size of a subset, as a part of the data.
        repeats: trainings for each subset, with different seeds. With two or more, the ceiling is estimated.
        models: models trained on all the data for the scores, as an ensemble.
        flipped: the part of the labels to flip; 0 leaves out the flipped labels. Data without labels has none.
        seed: of subsets, flips and trainings.
        resamples: of the bootstrap.
        progress: show a progress bar (default: in a terminal).
        scan_options: options of `scan`, such as `project`.
    """
    examples = Source(data).size
    if examples is None:
        raise ScanError("evaluate needs a dataset with a length, because it draws random subsets of it.")
    if min(subsets, repeats, models) < 1 or subsets < 3:
        raise ScanError("evaluate needs at least 3 subsets, 1 repeat and 1 model.")
    for method in _name_all(methods).values():  # before hours of training
        if not callable(method):
            options = {"method": method} if isinstance(method, str) else method
            check = check_exact_method if options.get("exact") else check_method
            check(options.get("method", "ekfac" if options.get("exact") else METHODS[0]))
    generator = torch.Generator().manual_seed(seed)
    members = draw_subsets(examples, subsets, part, generator)
    flips = flip_labels(data, flipped, generator) if flipped and rankings else None
    total = subsets * repeats + models + (flips is not None)
    shows = sys.stderr.isatty() if progress is None else progress
    options = {"progress": False, **scan_options}
    seconds: dict[str, float] = {}
    with choose_bar()(desc="trainings", total=total, disable=not shows) as bar:
        with _measure_time(seconds, "trainings on subsets"):
            runs = retrain_on_subsets(train, data, test_batch, loss_fn, members, repeats, seed, bar)
        with _measure_time(seconds, "trainings on all data"):
            trained = _train_all(train, data, models, seed, bar)
        with _measure_time(seconds, "scan"):
            found = _scan_models(trained, data, loss_fn, options)
        lds = {}
        for name, method in _name_all(methods).items():
            with _measure_time(seconds, f"method {name}"):
                scores = _compute_scores(method, found, test_batch)
            lds[name] = estimate_lds(runs.predict(scores), runs.effects, resamples, generator)
        auc = {}
        if flips is not None:
            wrong, is_flipped = flips
            ranked = _scan_models(_train_all(train, wrong, 1, seed, bar), wrong, loss_fn, options).scan
            for name, ranking in _name_all(rankings).items():
                auc[name] = estimate_auc(_compute_ranking(ranking, ranked), is_flipped, resamples, generator)
    return Evaluation(lds, auc, estimate_ceiling(runs), seconds, runs)


def retrain_on_subsets(
    train: Train,
    data: Any,
    test_batch: Any,
    loss_fn: LossFunction,
    members: Tensor,
    repeats: int,
    seed: int,
    bar: Any = None,
) -> SubsetRuns:
    """Train on each subset, `repeats` times with different seeds, and compute the losses of the test samples."""
    losses = []
    for i, ids in enumerate(members):
        for repeat in range(repeats):
            model, _ = train_model(train, take_examples(data, ids), seed + 10_000 + i * repeats + repeat)
            losses.append(compute_test_losses(model, test_batch, loss_fn))
            if bar is not None:
                bar.update()
    return SubsetRuns(members, torch.stack(losses).reshape(len(members), repeats, -1))


def estimate_ceiling(runs: SubsetRuns) -> float | None:
    """The LDS of a perfect prediction of the mean loss, from the agreement of two halves of the repeats."""
    repeats = runs.losses.shape[1]
    if repeats < 2:
        return None
    halves = [runs.losses[:, start::2].double().mean(1).T for start in (0, 1)]
    agreement = max(0.0, float(correlate_ranks(*halves).mean()))
    return float((2 * agreement / (1 + agreement)) ** 0.5)


def _train_all(train: Train, data: Any, count: int, seed: int, bar: Any) -> list[tuple[nn.Module, list[Any]]]:
    trained = []
    for i in range(count):
        trained.append(train_model(train, data, seed + i))
        bar.update()
    return trained


def _scan_models(
    trained: Sequence[tuple[nn.Module, list[Any]]], data: Any, loss_fn: LossFunction, options: dict[str, Any]
) -> Trained:
    model = copy.deepcopy(trained[0][0])
    found = scan(model, loss_fn, data, checkpoints=[state for _, states in trained for state in states], **options)
    return Trained([model for model, _ in trained], data, found)


def _compute_scores(method: MethodOptions, trained: Trained, test_batch: Any) -> Tensor:
    if callable(method):
        scores = method(trained, test_batch)
    else:
        options = {"method": method} if isinstance(method, str) else dict(method)
        scores = trained.scan.scores(test_batch, **options)
    if scores.dim() != 2 or scores.shape[1] != len(trained.scan):
        raise ScanError(f"A method must return scores (tests, examples), got the shape {tuple(scores.shape)}.")
    return scores


def _compute_ranking(ranking: str | Callable[[Scan], Tensor], found: Scan) -> Tensor:
    """A score for each example, larger for examples that come first."""
    if callable(ranking):
        return ranking(found)
    if ranking.endswith(_WHITENED):
        ranked = found.self_influence(ranking.removesuffix(_WHITENED))  # type: ignore[arg-type]
    else:
        ranked = found.ranked(ranking)
    scores = torch.empty(len(found), dtype=torch.float64)
    scores[ranked.ids] = torch.arange(len(found), 0, -1, dtype=torch.float64)
    return scores


def _name_all(given: Any) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {name: name for name in given}


def _format_estimates(estimates: Mapping[str, Estimate], random: float) -> str:
    rows = [
        [name, str(found), "on par with random" if found.low <= random else ""] for name, found in estimates.items()
    ]
    return format_table(rows, ["method", "value", ""], indent="  ")


@contextmanager
def _measure_time(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
