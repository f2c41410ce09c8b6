"""Audits: bounds are never too large, and large enough to find training that is not private."""

from __future__ import annotations

import builtins
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample.errors import PerSampleError
from persample.gradients.squared_norms import SquaredNorms
from persample.private import AuditResult, AuditRun, PrivacyEngine, audit
from persample.private.auditing import DirectTest, bounds
from persample.private.auditing.canaries import GradientCanaries, make_samples
from tests.support.planted_faults import plant_clip_factors

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus

Train = Callable[[AuditRun], Any]


# ---- statistics ----


def test_bound_of_one_run_without_delta_is_a_binomial_tail() -> None:
    assert bounds.bound_probability(50, 40, 31, 0.7, 0.0) == pytest.approx(
        stats.binom.sf(30, 40, math.exp(0.7) / (1 + math.exp(0.7)))
    )
    rate = 0.05 ** (1 / 100)  # all of 100 guesses are correct
    assert bounds.invert_one_run(100, 100, 100, 0.0, 0.05) == pytest.approx(math.log(rate / (1 - rate)), abs=1e-5)


def test_delta_in_the_bound_of_one_run() -> None:
    """The formula of the theorem, term by term."""
    rate = 1 / (1 + math.exp(-1.0))
    alpha = max(sum(stats.binom.pmf(30 - j, 40, rate) for j in range(1, i + 1)) / i for i in range(1, 31))
    expected = stats.binom.sf(29, 40, rate) + 2 * 60 * 1e-3 * alpha
    assert bounds.bound_probability(60, 40, 30, 1.0, 1e-3) == pytest.approx(expected)


@pytest.mark.parametrize("count, epsilon, delta", [(60, 1.0, 0.0), (200, 1.0, 0.0), (200, 3.0, 0.0), (60, 1.0, 0.002)])
def test_one_run_is_calibrated(count: int, epsilon: float, delta: float) -> None:
    """On randomised response, where the theorem is tight: each bit is kept with probability e^eps / (1 + e^eps).

    With delta, each bit is also shown with that probability.
    """
    generator = np.random.default_rng(0)
    found = []
    for _ in range(100):
        included = generator.random(count) < 0.5
        kept = generator.random(count) < 1 / (1 + math.exp(-epsilon))
        scores = np.where(included == kept, 1.0, -1.0) + 0.001 * generator.standard_normal(count)
        shown = generator.random(count) < delta
        scores[shown] = np.where(included[shown], 2.0, -2.0)
        found.append(bounds.bound_one_run(scores, included, delta, 0.95).epsilon)
    assert np.mean(np.array(found) > epsilon) <= 0.05
    if count == 200:
        assert np.mean(found) > 0.4 * epsilon


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_two_worlds_are_calibrated(mu: float) -> None:
    """On a Gaussian mechanism, whose epsilon is known. The bound for Gaussian mechanisms is tight there."""
    generator = np.random.default_rng(1)
    true = bounds.convert_gaussian(mu, 1e-5)
    found = [
        bounds.bound_two_worlds(generator.normal(mu, 1, 150), generator.normal(0, 1, 150), 1e-5, 0.9) for _ in range(60)
    ]
    assert all(bound.epsilon < true for bound in found)
    assert np.mean([bound.gaussian > true for bound in found]) <= 0.1
    if mu >= 1:
        assert np.mean([bound.gaussian for bound in found]) > 0.35 * true
        assert np.mean([bound.epsilon for bound in found]) > 0.3


def test_confidence_of_two_worlds_is_used_up() -> None:
    """Rates at 30 % confidence fail often: the test above could fail."""
    generator = np.random.default_rng(2)
    true = bounds.convert_gaussian(1.0, 1e-5)
    found = [
        bounds.bound_two_worlds(generator.normal(1, 1, 100), generator.normal(0, 1, 100), 1e-5, 0.3).gaussian
        for _ in range(60)
    ]
    assert np.mean(np.array(found) > true) > 0.1


def test_conversions() -> None:
    assert bounds.convert_gaussian(bounds.compute_mu(0.5, 0.5), 1e-5) == 0.0
    assert bounds.compute_mu(0.1, 0.2) == pytest.approx(stats.norm.isf(0.1) + stats.norm.isf(0.2))
    assert bounds.convert_rates(0.01, 0.5, 0.0) == pytest.approx(math.log(50))
    assert bounds.convert_rates(0.5, 0.01, 0.1) == pytest.approx(math.log(0.4 / 0.01))
    assert bounds.convert_rates(1.0, 1.0, 0.0) == 0.0
    assert bounds.bound_rate(100, 100, 0.05) == 1.0
    for mu, delta in ((0.3, 1e-5), (2.0, 1e-6)):  # delta of epsilon, by the definition
        epsilon = bounds.convert_gaussian(mu, delta)
        z = np.linspace(-15, 15, 300_001)
        excess = stats.norm.pdf(z, mu) - math.exp(epsilon) * stats.norm.pdf(z)
        assert np.trapezoid(excess.clip(min=0), z) == pytest.approx(delta, rel=1e-3)


# ---- canaries ----


def test_gradient_canaries_are_orthonormal() -> None:
    parameters = [torch.empty(5, 7), torch.empty(11)]
    canaries = GradientCanaries(parameters, 8, torch.Generator().manual_seed(0))
    rows = torch.stack([canaries.add_up(torch.arange(8) == i) for i in range(8)])
    torch.testing.assert_close(rows @ rows.T, torch.eye(8))
    vector = torch.randn(46)
    torch.testing.assert_close(canaries.project(vector).float(), rows @ vector)
    with pytest.raises(PerSampleError, match="has 46 parameters, too few for 47"):
        GradientCanaries(parameters, 47, torch.Generator())


def test_samples_are_made_like_those_of_the_dataset() -> None:
    dataset = [{"x": torch.full((3,), float(i)) + torch.arange(3), "ids": torch.tensor([i]), "y": i} for i in range(9)]
    made = make_samples(dataset, 5, torch.Generator().manual_seed(0))
    for sample in made:
        assert sample["x"].shape == (3,) and not any(torch.equal(sample["x"], other["x"]) for other in dataset)
        assert sample["y"] in range(9) and sample["ids"].item() == sample["y"]


# ---- trainings ----

GENERATOR = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(32, 10, generator=GENERATOR), torch.randint(4, (32,), generator=GENERATOR))
OUTLIER = 300 * torch.randn(10, generator=GENERATOR), torch.tensor(2)


def make_train(
    noise: float = 2.0,
    batch_size: int = 32,
    *,
    width: int = 200,
    engine_type: Any = PrivacyEngine,
    get_generator: Callable[[], torch.Generator | None] = lambda: None,
    get_claim: Callable[[Any], Any] = lambda engine: engine,
    reverse: bool = False,
) -> Train:
    """A training of one epoch. With 32 samples in a batch, that is one step with all samples."""

    def train(run: AuditRun) -> Any:
        engine = engine_type(accountant="rdp")
        model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 4))
        nn.init.zeros_(model[2].weight)  # the gradient of an outlier is large, whatever its label
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters[::-1] if reverse else parameters, lr=0.05)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(run.add_canaries(DATA), batch_size=batch_size),
            noise_multiplier=noise, max_grad_norm=1.0, noise_generator=get_generator(),
        )  # fmt: skip
        run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.cross_entropy)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return get_claim(engine)

    return train


def make_generators(start: int) -> Callable[[], torch.Generator]:
    """Fresh noise in each run, the same in each run of the test."""
    seeds = iter(range(start, start + 10_000))
    return lambda: torch.Generator().manual_seed(next(seeds))


@pytest.mark.parametrize("batch_size", [8, 32])
def test_right_training_does_not_exceed_its_claim(batch_size: int) -> None:
    torch.manual_seed(0)
    train = make_train(1.0, batch_size, get_generator=make_generators(0))
    found = [audit(train, count=400, delta=1e-5, seed=seed) for seed in range(10)]
    assert all(result.epsilon < result.claimed and not result.exceeds for result in found)
    if batch_size == 32:  # a Gaussian mechanism with epsilon 4.38
        assert np.mean([result.epsilon for result in found]) > 0.7
        assert 0 < np.mean([result.gaussian for result in found]) < 4.38


def test_two_worlds_of_a_right_training() -> None:
    torch.manual_seed(0)
    train = make_train(0.25, get_generator=make_generators(10_000))
    result = audit(train, runs=100, seed=0)
    assert 1 < result.epsilon < result.gaussian < result.claimed and not result.exceeds
    result = audit(train, canaries=[OUTLIER], runs=60, seed=0)
    assert not result.exceeds


def keep_all(norms: Tensor, max_norm: float) -> Tensor:
    return torch.ones_like(norms)


def underestimate(norms: Tensor, max_norm: float) -> Tensor:
    """As norms of which rounding has lost most (105 times too small): `max_norm` is exceeded by this factor."""
    return (105 * max_norm / norms).clamp(max=1.0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("compute", [keep_all, underestimate])
def test_broken_clipping_is_found(compute: Any, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plant_clip_factors(monkeypatch, compute)
    result = audit(make_train(5.0, reverse=reverse), canaries=[OUTLIER], runs=60, seed=0)
    assert result.exceeds and result.epsilon > 1.2 * result.claimed, str(result)


def test_broken_clipping_is_found_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plant_clip_factors(monkeypatch, keep_all)
    outliers = [(100 * torch.randn(10), torch.tensor(i % 4)) for i in range(24)]
    result = audit(make_train(15.0), canaries=outliers, delta=1e-5, seed=0)
    assert result.exceeds, str(result)


SEQUENCES = TensorDataset(
    torch.randn(32, 2, 64, generator=GENERATOR), 0.1 * torch.randn(32, 2, 64, generator=GENERATOR)
)
# Two positions that are nearly equal, with targets of opposite signs: their contributions to the gradient cancel.
CANCELLING = (
    torch.randn(1, 64, generator=GENERATOR) * torch.tensor([[1.0], [1.0001]]),
    torch.tensor([[1e6], [-1e6]]).expand(2, 64),
)


def train_on_sequences(run: AuditRun) -> Any:
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(64, 64, bias=False)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), noise_multiplier=5.0, max_grad_norm=1.0,
        data_loader=DataLoader(run.add_canaries(SEQUENCES), batch_size=32),
    )  # fmt: skip
    run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.mse_loss)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize("is_safe", [False, True])
def test_norms_that_cancel_are_found(is_safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if not is_safe:
        monkeypatch.setattr(SquaredNorms, "find_doubtful", lambda *args: [])
    result = audit(train_on_sequences, canaries=[CANCELLING], runs=40, seed=0)
    assert result.exceeds is not is_safe, str(result)


def test_repeated_noise_is_found() -> None:
    """Each run seeds its noise with the same number."""
    torch.manual_seed(0)
    train = make_train(4.0, get_generator=lambda: torch.Generator().manual_seed(42))
    result = audit(train, runs=60, seed=0)
    assert result.exceeds, str(result)
    assert not audit(make_train(4.0, get_generator=make_generators(20_000)), runs=60, seed=0).exceeds


@pytest.mark.parametrize("runs, count", [(1, 400), (60, None)])
def test_missing_noise_is_found(runs: int, count: int | None) -> None:
    """The noise is a tenth of what the claim assumes."""
    torch.manual_seed(0)
    claim = copy.copy(PrivacyEngine(accountant="rdp"))
    claim.accountant.step(noise_multiplier=3.0, sample_rate=1.0)
    train = make_train(0.3, get_generator=make_generators(30_000), get_claim=lambda engine: claim)
    result = audit(train, runs=runs, count=count, seed=0)
    assert result.exceeds and result.claimed == pytest.approx(claim.get_epsilon(1e-5)), str(result)


@pytest.mark.parametrize("canaries", ["gradient", "input"])
def test_training_with_opacus(canaries: str) -> None:
    torch.manual_seed(0)
    train = make_train(1.0, engine_type=opacus.PrivacyEngine, get_generator=make_generators(40_000))
    result = audit(train, canaries=canaries, count=1000 if canaries == "gradient" else 10, seed=0)
    assert not result.exceeds and result.claimed > 4
    if canaries == "gradient":
        assert result.gaussian > 0.5


def test_canaries_do_not_change_the_number_of_batches() -> None:
    sizes = []

    def train(run: AuditRun) -> None:
        sizes.append(len(run.add_canaries(DATA)))
        return make_train(4.0, batch_size=16)(run)

    audit(train, canaries=[OUTLIER], runs=20, seed=0)
    assert set(sizes) == {31, 32} and sizes.count(32) == 10


def test_hooks_are_removed_and_random_numbers_stay() -> None:
    model = nn.Linear(10, 4)
    optimizers = []

    def train(run: AuditRun) -> float:
        _, optimizer, _ = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(DATA, batch_size=32),
        )  # fmt: skip
        before = torch.get_rng_state()
        run.observe(optimizer, sample_rate=1.0)
        assert torch.equal(torch.get_rng_state(), before)
        F.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
        optimizer.step()
        optimizers.append(optimizer)
        return 3.0

    result = audit(train, count=44)
    assert result.claimed == 3.0
    (optimizer,) = optimizers
    optimizer.release()
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.original_optimizer.step()
    assert not model.weight.grad.any()


# ---- results ----


def make_result(**changes: Any) -> AuditResult:
    fields: dict[str, Any] = {
        "epsilon": 2.5, "claimed": 1.0, "delta": 1e-5, "confidence": 0.95, "method": "two worlds", "canaries": "input",
        "gaussian": 3.25, "evidence": {"runs": 200, "false positive rate at most": 0.0183},
        "scores_in": [1.0, 2.0], "scores_out": [0.0, 0.5],
    }  # fmt: skip
    return AuditResult(**{**fields, **changes})


def test_result_as_text_and_json() -> None:
    text = str(make_result())
    for part in ("two worlds, input canaries", "200 runs, 0.018 false", "1.000 at delta 1e-05", "2.500 with 95 %",
                 "3.250 with 99.995 %", "leaks more than it claims: lower bound, if Gaussian."):  # fmt: skip
        assert part in text
    assert "No contradiction" in str(make_result(claimed=4.0))
    only_gaussian = make_result(claimed=3.0)
    assert only_gaussian.exceeds and str(only_gaussian).endswith("leaks more than it claims: if Gaussian.")
    tests = [DirectTest("noise", "half of it", 1e-9), DirectTest("clipping", "1.000 times the bound", 1.0)]
    failed = make_result(claimed=4.0, tests=tests, level=1e-5, not_tested={"batch sizes": "no data"})
    assert failed.exceeds and failed.failed == tests[:1] and "FAILED: half of it (p = 1e-09)" in str(failed)
    assert "passed: 1.000 times" in str(failed) and "not tested: no data" in str(failed)
    found = json.loads(json.dumps(failed.to_dict()))
    assert [test["failed"] for test in found["tests"]] == [True, False]
    assert found["not_tested"] == {"batch sizes": "no data"}
    assert "no claim" in str(make_result(claimed=None, gaussian=None))
    assert json.loads(json.dumps(make_result().to_dict()))["exceeds"] is True


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_result().plot(tmp_path / "audit.svg")
    text = path.read_text()
    assert text.startswith("<?xml") and "lower bound" in text and "without: 2" in text
    assert make_result().plot(tmp_path / "again.svg").read_text() == text
    make_result(gaussian=None, claimed=None, method="one run").plot(path)

    load = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PerSampleError, match="needs matplotlib"):
        make_result().plot(path)


# ---- errors ----


def train_nothing(run: AuditRun) -> None:
    run.add_canaries(DATA)


def observe_other(run: AuditRun) -> None:
    run.observe(torch.optim.SGD(nn.Linear(2, 2).parameters()), sample_rate=0.5)


def observe_without(*names: str, **changes: Any) -> Train:
    def train(run: AuditRun) -> None:
        model = nn.Linear(10, 4)
        _, optimizer, _ = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(DATA),
        )  # fmt: skip
        if "canaries" not in names:
            run.add_canaries(DATA)
        options = {"model": model, "loss_fn": F.cross_entropy, "sample_rate": 0.5, **changes}
        run.observe(optimizer, **{name: value for name, value in options.items() if name not in names})

    return train


def change_rate(run: AuditRun) -> Any:
    observe_without(sample_rate=0.25 if run._included.any() else 0.5)(run)
    run.steps = 1


@pytest.mark.parametrize(
    "train, options, message",
    [
        (train_nothing, {}, "made no step that the audit has seen"),
        (observe_other, {}, "takes the private optimizer that make_private returns, got a SGD"),
        (observe_without("model"), {"canaries": "input", "count": 5}, "pass model= and loss_fn="),
        (observe_without("canaries"), {"canaries": "input", "count": 5}, "Train on run.add_canaries"),
        (observe_without(model=nn.Linear(10, 4)), {"canaries": "input", "count": 5}, "do not belong to the model"),
        (observe_without(sample_rate=3.0), {}, "sample_rate must be the probability"),
        (observe_without(), {"count": 1000}, "too few for 1000 canaries"),
        (change_rate, {"runs": 20}, "The sample rate differs between runs"),
        (train_nothing, {"canaries": "input", "count": 32}, "too few to replace some by 32 canaries"),
        (train_nothing, {"canaries": "hue"}, "must be 'gradient', 'input' or a list"),
        (train_nothing, {"canaries": []}, "Got 0 samples"),
        (train_nothing, {"canaries": [OUTLIER], "count": 3}, "Got 1 samples as canaries, and count=3"),
        (train_nothing, {"runs": 40, "count": 3}, "takes one canary"),
        (train_nothing, {"runs": 40, "canaries": [OUTLIER] * 2}, "takes one canary"),
        (train_nothing, {"runs": 5}, "runs must be 1, or at least 20"),
        (train_nothing, {"count": 0}, "count must be positive"),
        (train_nothing, {"delta": 2.0}, "between 0 and 1"),
        (train_nothing, {"confidence": 1.0}, "between 0 and 1"),
        (train_nothing, {"false_alarm": 0.0}, "between 0 and 1"),
    ],
)
def test_errors(train: Train, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PerSampleError, match=message):
        audit(train, **options)
