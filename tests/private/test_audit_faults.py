"""Direct tests of audits: they find planted faults, and nothing in right trainings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle
from types import SimpleNamespace
from typing import Any

import opacus
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from persample.private import AuditRun, PrivacyEngine, audit
from persample.private.auditing import accounting_tests, noise_tests, sampling_tests
from persample.private.auditing.direct import NotTested
from persample.private.auditing.watching import StepWatch
from persample.private.errors import PrivateTrainingError
from persample.private.handed_out import HandedOut
from tests.support.audited import ADAPTIVE, Training, draw_training
from tests.support.planted_faults import FAULTS

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus


# ---- planted faults ----


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    result = audit(Training(examples_per_unit=2 if "units" in fault else 1), seed=0)
    name = fault.partition(" (")[0]
    assert name in [test.name for test in result.failed], str(result)
    assert result.exceeds and "The training leaks more than it claims: " in str(result)


class WithLoop(Training):
    """A training whose loop is at fault."""

    def __init__(self, change: Callable[[Any], None], **settings: Any) -> None:
        super().__init__(**settings)
        object.__setattr__(self, "change", change)

    def _make_steps(self, model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            for _ in range(self.change(optimizer)):  # type: ignore[attr-defined]
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


def seed_noise(optimizer: Any) -> int:
    optimizer.generator.manual_seed(7)
    return 1


def halve_noise(optimizer: Any) -> int:
    """In each second step. The accountant counts the noise of the first."""
    optimizer.noise_multiplier = next(NOISES)
    return 1


NOISES = cycle([1.0, 0.5])


def test_faults_of_the_loop_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    train = WithLoop(seed_noise, options={"noise_generator": torch.Generator()})
    assert [test.name for test in audit(train).failed] == ["noise over steps"]
    with pytest.raises(PrivateTrainingError, match="used for a step before"):
        audit(WithLoop(lambda optimizer: 2))
    monkeypatch.setattr(HandedOut, "check_unused", lambda *args: None)
    assert [test.name for test in audit(WithLoop(lambda optimizer: 2)).failed] == ["repeated samples"]
    assert not audit(WithLoop(halve_noise)).exceeds, "the accountant counts both"


@pytest.mark.parametrize("noise, is_found", [(0.3, True), (0.5, True), (1.0, False), (1.5, False)])
def test_claimed_number_is_compared_with_the_settings(noise: float, is_found: bool) -> None:
    claimed = audit(Training()).claimed

    def train(run: AuditRun) -> float | None:
        Training(noise=noise)(run)
        return claimed

    assert [test.name for test in audit(train).failed] == ["claimed epsilon"] * is_found


@pytest.mark.parametrize("count, steps", [(97, 10), (1000, 3)])
def test_population_of_units_is_not_underestimated(count: int, steps: int) -> None:
    """The optimizer knows the expected batch size as a whole number: 9 instead of 9.7."""
    watch = StepWatch(SimpleNamespace(param_groups=[], expected_batch_size=count // steps, units="ids"), 1 / steps)
    assert count <= watch._count_population() <= count + 2 * steps


def test_loader_may_draw_from_a_part_of_the_data() -> None:
    def train(run: AuditRun) -> Any:
        add_canaries = run.add_canaries
        run.add_canaries = lambda dataset: Subset(add_canaries(dataset), range(100))  # type: ignore[method-assign]
        return Training(steps=5, epochs=4)(run)

    (found,) = [test for test in audit(train).tests if test.name == "batch sizes"]
    assert "of 102 claimed" in found.finding and found.p_value > 1e-6


def test_rate_of_the_user_is_compared_with_the_batches() -> None:
    class Wrong(AuditRun):
        def observe(self, optimizer: Any, *, sample_rate: float, **options: Any) -> None:
            super().observe(optimizer, sample_rate=sample_rate / 10, **options)

    def train(run: AuditRun) -> Any:
        run.__class__ = Wrong
        return Training()(run)

    assert "batch sizes" in [test.name for test in audit(train).failed]


# ---- right trainings ----


@pytest.mark.parametrize(
    "training",
    [
        Training(model="cnn", steps=1),
        Training(steps=50, options={"clipping": "automatic"}),
        Training(options={"clipping": "per_layer", "max_grad_norm": [0.5] * 4}),
        Training(model="words", examples_per_unit=4, options={"normalize_clipping": True}),
        Training(options=ADAPTIVE, epochs=3),
        Training(physical_batch_size=8, optimizer="Adam", options={"grad_samples": True}),
        Training(returns="epsilon", accountant="prv"),
        Training(accountant="gdp", returns="epsilon", noise=2.0),
        *(draw_training(torch.Generator().manual_seed(seed)) for seed in range(6)),
    ],
    ids=str,
)
def test_right_training_passes(training: Training) -> None:
    result = audit(training, seed=0)
    assert not result.exceeds, str(result)
    names = [test.name for test in result.tests]
    assert len(names) >= 6 and ("clipping of units" if training.examples_per_unit > 1 else "clipping") in names


def test_what_is_not_tested_has_a_reason() -> None:
    def train(run: AuditRun, options: Any = {}) -> Any:  # noqa: B006
        data = TensorDataset(torch.randn(64, 5), torch.randint(3, (64,)))
        engine, model = PrivacyEngine(), nn.Linear(5, 3, bias=False)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            noise_multiplier=1.0, data_loader=DataLoader(data, batch_size=16), **options,
        )  # fmt: skip
        run.observe(optimizer, sample_rate=1 / len(loader))
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return engine

    result = audit(train)
    assert result.not_tested == {
        "clipping": "the training does not use run.add_canaries(dataset)",
        "noise over parameters": "there are no two parameters with noise to compare",
        "repeated samples": "the training does not use run.add_canaries(dataset)",
    }
    assert (
        "clipping               not tested: the training does not use" in str(result)
        and result.evidence["canaries"] == 15
    )
    result = audit(lambda run: train(run, {"poisson_sampling": False}))
    assert result.not_tested["batch sizes"] == "batches are no Poisson samples: epsilon is an estimate"


@pytest.mark.parametrize("noise", [1.0, 0.5])
def test_training_with_opacus(noise: float) -> None:
    def train(run: AuditRun) -> Any:
        claim, engine, model = opacus.PrivacyEngine(), opacus.PrivacyEngine(), nn.Linear(10, 40)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            noise_multiplier=noise, data_loader=DataLoader(run.add_canaries(Training().make_data()), batch_size=64),
        )  # fmt: skip
        optimizer.attach_step_hook(lambda _: claim.accountant.step(noise_multiplier=1.0, sample_rate=1 / len(loader)))
        run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.cross_entropy)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return claim

    result = audit(train, seed=0)
    assert not result.not_tested
    assert [test.name for test in result.failed] == ([] if noise == 1 else ["noise"]), str(result)


# ---- statistics ----


def test_p_values_of_right_noise_are_uniform() -> None:
    """At least: the p-values of several parameters and pairs are bounds."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {"deviation": [], "steps": [], "parameters": []}
    for _ in range(200):
        record = noise_tests.NoiseRecord(["weight", "bias"])
        for _ in range(4):
            record.add([torch.randn(30, generator=generator) * 2, torch.randn(5, generator=generator) * 2])
        found["deviation"].append(noise_tests.test_deviation(record, [2.0] * 4).p_value)
        found["steps"].append(noise_tests.test_correlation_over_steps(record).p_value)
        found["parameters"].append(noise_tests.test_correlation_over_parameters(record).p_value)
    for p_values in found.values():
        assert stats.kstest(p_values, "uniform", alternative="greater").pvalue > 1e-3
        assert min(p_values) < 0.1


def test_larger_noise_is_no_finding() -> None:
    record = noise_tests.NoiseRecord(["weight"])
    record.add([3 * torch.randn(100)])
    assert noise_tests.test_deviation(record, [1.0]).p_value == 1
    with pytest.raises(NotTested, match="no noise is claimed"):
        noise_tests.test_deviation(record, [0.0])


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_are_recognised_in_the_loaded_samples(ahead: int) -> None:
    """Loaders may load a batch before the step with the last one."""
    batches = [[0, 1, 2], [3], [], [4, 5], [6, 7, 8, 9]]
    drawn, sizes = list(chain(*batches)), [len(batch) for batch in batches]
    marks = [sum(sizes[: i + 1 + ahead]) for i in range(len(sizes))]
    assert sampling_tests.test_repeated_samples(drawn, marks, sizes, 10, 0.2).p_value == 1
    repeated = [0, 1, 2, 3, 4, 4, 6, 7, 8, 9]
    assert sampling_tests.test_repeated_samples(repeated, marks, sizes, 10, 0.2).p_value == 0
    with pytest.raises(NotTested, match="other numbers of samples"):
        sampling_tests.test_repeated_samples(drawn, [mark + 3 for mark in marks], sizes, 10, 0.2)
    with pytest.raises(NotTested, match="loads no samples"):
        sampling_tests.test_repeated_samples([], [0] * 5, sizes, 10, 0.2)


def test_steps_that_were_not_counted() -> None:
    assert accounting_tests.test_counted_steps([(1.0, 0.1, 3)], 4).p_value == 0
    assert accounting_tests.list_claims([(1.0, 0.1, 1), (2.0, 0.1, 1)], 4)[0] == [1.0, 2.0, 2.0, 2.0]


def test_epsilon_without_noise_is_infinite() -> None:
    assert accounting_tests.test_claimed_epsilon(8.0, [0.0], 0.1, 1e-5).p_value == 0
    assert accounting_tests.test_claimed_epsilon(9.0, [1.0, 2.0], 0.5, 1e-5).p_value == 1


@pytest.mark.parametrize("options", [{}, {"model": None, "loss_fn": None}, {"loss_fn": lambda model, batch: 1 / 0}])
def test_clipping_is_tested_without_a_loss(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(AuditRun):
        def observe(self, *args: Any, **given: Any) -> None:
            super().observe(*args, **{**given, **options})

    def train(run: AuditRun) -> Any:
        run.__class__ = Changed
        return Training()(run)

    FAULTS["clipping (at 10 C)"](monkeypatch)
    result = audit(train)
    if callable(options.get("loss_fn")):
        assert "ZeroDivisionError: division by zero" in result.not_tested["clipping"]
    else:
        assert [test.name for test in result.failed] == ["clipping"]
