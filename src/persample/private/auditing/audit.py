"""The audit: a training is run with canaries, its steps are tested, and the canaries give bounds of epsilon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.private.auditing.bounds import bound_one_run, bound_two_worlds
from persample.private.auditing.result import AuditResult
from persample.private.auditing.run import AuditRun, Canaries

_MOST_CANARIES = {"gradient": 1000, "input": 100}  # by default
_MOST_FAILURES = 0.05  # default canaries times delta: the bound of one run gets worse with this product
_LEAST_RUNS = 20


def audit(
    train: Callable[[AuditRun], Any],
    *,
    canaries: str | Sequence[Any] = "gradient",
    count: int | None = None,
    runs: int = 1,
    delta: float = 1e-5,
    confidence: float = 0.95,
    false_alarm: float = 1e-4,
    seed: int | None = None,
) -> AuditResult:
    """Test whether a private training does what it claims, and measure how much it reveals about single samples.

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
        confidence: probability with which the lower bound is smaller than the true epsilon, for any training.
        false_alarm: probability with which a direct test, or the bound for Gaussian mechanisms, accuses a training that
            does what it claims.
        seed: seed of coins and canaries; by default they differ in each audit. The noise must not depend on it.
    """
    kind = canaries if isinstance(canaries, str) else "input"
    _check_arguments(kind, canaries, count, runs)
    _check_probabilities(delta, confidence, false_alarm)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    samples = None if isinstance(canaries, str) else list(canaries)
    is_chosen = runs == 1 and count is None and samples is None
    if runs > 1:
        count = 1
    elif count is None:
        count = _choose_count(kind, delta) if samples is None else len(samples)
    kit = Canaries(kind, count, samples, generator, is_limit=is_chosen)
    if runs == 1:
        return _audit_one_run(train, kit, delta, confidence, false_alarm)
    return _audit_two_worlds(train, kit, runs, delta, confidence, false_alarm)


def _choose_count(kind: str, delta: float) -> int:
    most = _MOST_CANARIES[kind]
    return most if delta * most <= _MOST_FAILURES else max(20, int(_MOST_FAILURES / delta))


def _check_arguments(kind: str, canaries: str | Sequence[Any], count: int | None, runs: int) -> None:
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


def _check_probabilities(delta: float, confidence: float, false_alarm: float) -> None:
    if not (0 <= delta < 1 and 0 < confidence < 1 and 0 < false_alarm < 1):
        raise PerSampleError(
            f"delta, confidence and false_alarm must be between 0 and 1, got {delta}, {confidence} and {false_alarm}"
        )


def _audit_one_run(
    train: Callable[[AuditRun], Any], kit: Canaries, delta: float, confidence: float, false_alarm: float
) -> AuditResult:
    included = torch.rand(kit.count, generator=kit.generator) < 0.5
    run, returned = _run(train, kit, included)
    scores = run.get_scores()
    included = included[: len(scores)]
    found = bound_one_run(scores.numpy(), included.numpy(), delta, confidence)
    scores_in, scores_out = scores[included].numpy(), scores[~included].numpy()
    gaussian = None
    if kit.kind == "gradient" and min(len(scores_in), len(scores_out)) >= _LEAST_RUNS:
        gaussian = bound_two_worlds(scores_in, scores_out, delta, 1 - false_alarm / 2).gaussian
    return AuditResult(
        epsilon=found.epsilon,
        confidence=confidence,
        method="one run",
        canaries=kit.kind,
        gaussian=gaussian,
        evidence={"canaries": kit.count, "guesses": found.guesses, "correct": found.correct},
        scores_in=scores_in.tolist(),
        scores_out=scores_out.tolist(),
        **_test_directly(run, returned, delta, false_alarm),
    )


def _audit_two_worlds(
    train: Callable[[AuditRun], Any],
    kit: Canaries,
    runs: int,
    delta: float,
    confidence: float,
    false_alarm: float,
) -> AuditResult:
    worlds = torch.arange(runs)[torch.randperm(runs, generator=kit.generator)] < runs // 2
    scores: dict[bool, list[float]] = {True: [], False: []}
    made: list[tuple[AuditRun, Any]] = []
    for is_in in worlds.tolist():
        made.append(_run(train, kit, torch.tensor([is_in])))
        scores[is_in].append(float(made[-1][0].get_scores()))
        del made[1:]  # the steps of the first run are tested
    pair = np.array(scores[True]), np.array(scores[False])
    found = bound_two_worlds(*pair, delta, confidence)
    return AuditResult(
        epsilon=found.epsilon,
        confidence=confidence,
        method="two worlds",
        canaries=kit.kind,
        gaussian=bound_two_worlds(*pair, delta, 1 - false_alarm / 2).gaussian,
        evidence={
            "runs": runs,
            "of them evaluated": found.evaluated,
            "false positive rate at most": found.false_positive_rate,
            "false negative rate at most": found.false_negative_rate,
        },
        scores_in=scores[True],
        scores_out=scores[False],
        **_test_directly(*made[0], delta, false_alarm),
    )


def _test_directly(run: AuditRun, returned: Any, delta: float, false_alarm: float) -> dict[str, Any]:
    """The claim, and the direct tests of a run. They have half of the false alarms, the Gaussian bound the others."""
    claimed = _get_claim(returned, delta)
    tests, not_tested = run.test(returned, claimed, delta)
    return {
        "claimed": claimed,
        "delta": delta,
        "false_alarm": false_alarm,
        "tests": tests,
        "level": false_alarm / 2 / max(1, len(tests)),
        "not_tested": not_tested,
    }


def _run(train: Callable[[AuditRun], Any], kit: Canaries, included: Tensor) -> tuple[AuditRun, Any]:
    run = AuditRun(kit, included)
    try:
        returned = train(run)
    finally:
        run.stop()
    return run, returned


def _get_claim(returned: Any, delta: float) -> float | None:
    """The claimed epsilon: what the training function returned, or what the engine says that it returned."""
    if returned is None:
        return None
    return float(returned.get_epsilon(delta) if hasattr(returned, "get_epsilon") else returned)
