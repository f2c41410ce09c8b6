"""The audit, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample._internal.text import format_table
from persample.errors import PerSampleError
from persample.private.auditing.bounds import bound_one_run, bound_two_worlds
from persample.private.auditing.plot import write_plot
from persample.private.auditing.run import AuditRun, Canaries

_MOST_CANARIES = {"gradient": 1000, "input": 100}  # by default
_MOST_FAILURES = 0.05  # default canaries times delta: the bound of one run gets worse with this product
_LEAST_RUNS = 20


@dataclass(frozen=True)
class AuditResult:
    """The empirical lower bound of epsilon, beside the claimed epsilon.

    `epsilon` is smaller than the true epsilon with a probability of at least `confidence`, whatever the training does.
    A small bound does not prove that the training is private: a better canary may reveal more.

    `gaussian` is a larger bound, which holds if the mechanism is Gaussian, or close to it as many steps of DP-SGD are.
    With one run it also takes the scores of the canaries for independent. `exceeds` ignores it.

    >>> result = AuditResult(0.4, 1.2, 1e-5, 0.95, "one run", "gradient", None, {"canaries": 100.0}, [1.0], [0.0])
    >>> result.exceeds, result.to_dict()["epsilon"]
    (False, 0.4)
    """

    epsilon: float
    claimed: float | None
    delta: float
    confidence: float
    method: str  # "one run" or "two worlds"
    canaries: str  # "gradient" or "input"
    gaussian: float | None  # a bound under assumptions, see the class
    evidence: dict[str, float]
    scores_in: list[float] = field(repr=False)
    scores_out: list[float] = field(repr=False)

    @property
    def exceeds(self) -> bool:
        """Whether the training leaks more than it claims, with this confidence."""
        return self.claimed is not None and self.epsilon > self.claimed

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {**vars(self), "exceeds": self.exceeds}

    def plot(self, path: str | Path) -> Path:
        """Write a plot as SVG: the scores, and the bounds beside the claim."""
        return write_plot(self, Path(path))

    def __str__(self) -> str:
        percent = f"{100 * self.confidence:g} %"
        rows = [
            ["method", f"{self.method}, {self.canaries} canaries"],
            ["evidence", ", ".join(f"{_format(value)} {name}" for name, value in self.evidence.items())],
            ["claimed epsilon", "unknown" if self.claimed is None else f"{self.claimed:.3f} at delta {self.delta:g}"],
            ["lower bound", f"{self.epsilon:.3f} with {percent} confidence, {_BOUNDS[self.method]}"],
        ]
        if self.gaussian is not None:
            rows.append(["if Gaussian", f"{self.gaussian:.3f} with {percent} confidence, Gaussian mechanism assumed"])
        return f"{format_table(rows)}\n{self._describe_verdict()}"

    def _describe_verdict(self) -> str:
        if self.claimed is None:
            return "There is no claim to compare with: return the engine or its epsilon from the training function."
        if self.exceeds:
            return "The training leaks more than it claims."
        return "No contradiction to the claim was found."


_BOUNDS = {"one run": "Steinke et al. (2023)", "two worlds": "Clopper-Pearson"}


def audit(
    train: Callable[[AuditRun], Any],
    *,
    canaries: str | Sequence[Any] = "gradient",
    count: int | None = None,
    runs: int = 1,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditResult:
    """Measure how much a private training reveals about single samples.

    `train(run)` trains a model privately and returns the engine, or the epsilon that it claims at `delta`. It trains on
    `run.add_canaries(dataset)`, and calls `run.observe(optimizer, sample_rate=1 / len(loader))` before the first step.
    It must draw fresh noise in each call.

    >>> import warnings; warnings.simplefilter("ignore")
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from persample.private import PrivacyEngine
    >>> data = TensorDataset(torch.randn(64, 20), torch.randint(5, (64,)))
    >>> def train(run):
    ...     model, engine = torch.nn.Linear(20, 5), PrivacyEngine(accountant="rdp")
    ...     model, optimizer, loader = engine.make_private(
    ...         module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=2.0,
    ...         data_loader=DataLoader(run.add_canaries(data), batch_size=16), max_grad_norm=1.0)
    ...     run.observe(optimizer, sample_rate=1 / len(loader))
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(model(x), y).backward()
    ...         optimizer.step()
    ...     return engine
    >>> result = audit(train, count=100, delta=1e-3)
    >>> result.epsilon < result.claimed, result.exceeds
    (True, False)

    Args:
        canaries: "gradient": gradients of the largest allowed norm are added where the noise is added. They test noise
            and accounting, and need no data. "input": samples of noise are added to the data, with random labels; or a
            list of samples that are added. These test clipping as well; `observe` needs the model and the loss.
        count: number of canaries in one run; by default 1,000 gradients or 100 samples, or fewer if delta is large.
        runs: 1: one run, in which each canary is included by the toss of a coin (Steinke, Nasr and Jagielski, 2023).
            More: half of the runs include one canary, the other half do not; some hundred are needed.
        delta: delta of the claim and of the bound.
        confidence: probability with which the bound is smaller than the true epsilon.
        seed: seed of coins and canaries; by default they differ in each audit. The noise must not depend on it.
    """
    kind = canaries if isinstance(canaries, str) else "input"
    _check_arguments(kind, canaries, count, runs, delta, confidence)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    samples = None if isinstance(canaries, str) else list(canaries)
    if runs > 1:
        count = 1
    elif count is None:
        count = _choose_count(kind, delta) if samples is None else len(samples)
    kit = Canaries(kind, count, samples, generator)
    if runs == 1:
        return _audit_one_run(train, kit, delta, confidence)
    return _audit_two_worlds(train, kit, runs, delta, confidence)


def _choose_count(kind: str, delta: float) -> int:
    most = _MOST_CANARIES[kind]
    return most if delta * most <= _MOST_FAILURES else max(20, int(_MOST_FAILURES / delta))


def _check_arguments(
    kind: str, canaries: str | Sequence[Any], count: int | None, runs: int, delta: float, confidence: float
) -> None:
    if kind not in _MOST_CANARIES:
        raise PerSampleError(f"canaries must be 'gradient', 'input' or a list of samples, got {canaries!r}")
    if not isinstance(canaries, str) and (not len(canaries) or count not in (None, len(canaries))):
        raise PerSampleError(f"Got {len(canaries)} samples as canaries, and count={count}.")
    if runs > 1 and (count not in (None, 1) or (not isinstance(canaries, str) and len(canaries) > 1)):
        raise PerSampleError("An audit of several runs takes one canary. For several canaries, use runs=1.")
    if runs != 1 and runs < _LEAST_RUNS:
        raise PerSampleError(f"runs must be 1, or at least {_LEAST_RUNS} and preferably some hundred, got {runs}")
    if count is not None and count < 1:
        raise PerSampleError(f"count must be positive, got {count}")
    if not (0 <= delta < 1 and 0 < confidence < 1):
        raise PerSampleError(f"delta and confidence must be between 0 and 1, got {delta} and {confidence}")


def _audit_one_run(train: Callable[[AuditRun], Any], kit: Canaries, delta: float, confidence: float) -> AuditResult:
    included = torch.rand(kit.count, generator=kit.generator) < 0.5
    scores, returned = _run(train, kit, included)
    found = bound_one_run(scores.numpy(), included.numpy(), delta, confidence)
    scores_in, scores_out = scores[included].numpy(), scores[~included].numpy()
    gaussian = None
    if kit.kind == "gradient" and min(len(scores_in), len(scores_out)) >= _LEAST_RUNS:
        gaussian = bound_two_worlds(scores_in, scores_out, delta, confidence).gaussian
    return AuditResult(
        epsilon=found.epsilon,
        claimed=_get_claim(returned, delta),
        delta=delta,
        confidence=confidence,
        method="one run",
        canaries=kit.kind,
        gaussian=gaussian,
        evidence={"canaries": kit.count, "guesses": found.guesses, "correct": found.correct},
        scores_in=scores_in.tolist(),
        scores_out=scores_out.tolist(),
    )


def _audit_two_worlds(
    train: Callable[[AuditRun], Any], kit: Canaries, runs: int, delta: float, confidence: float
) -> AuditResult:
    worlds = torch.arange(runs)[torch.randperm(runs, generator=kit.generator)] < runs // 2
    scores: dict[bool, list[float]] = {True: [], False: []}
    for is_in in worlds.tolist():
        found_scores, returned = _run(train, kit, torch.tensor([is_in]))
        scores[is_in].append(float(found_scores))
    found = bound_two_worlds(np.array(scores[True]), np.array(scores[False]), delta, confidence)
    return AuditResult(
        epsilon=found.epsilon,
        claimed=_get_claim(returned, delta),
        delta=delta,
        confidence=confidence,
        method="two worlds",
        canaries=kit.kind,
        gaussian=found.gaussian,
        evidence={
            "runs": runs,
            "of them evaluated": found.evaluated,
            "false positive rate at most": found.false_positive_rate,
            "false negative rate at most": found.false_negative_rate,
        },
        scores_in=scores[True],
        scores_out=scores[False],
    )


def _run(train: Callable[[AuditRun], Any], kit: Canaries, included: Tensor) -> tuple[Tensor, Any]:
    run = AuditRun(kit, included)
    try:
        returned = train(run)
    finally:
        run.stop()
    return run.get_scores(), returned


def _get_claim(returned: Any, delta: float) -> float | None:
    """The claimed epsilon: what the training function returned, or what the engine says that it returned."""
    if returned is None:
        return None
    return float(returned.get_epsilon(delta) if hasattr(returned, "get_epsilon") else returned)


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
