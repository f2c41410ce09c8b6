"""A plan of a private training: its parts agree, and the training cannot leave it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError
from persample.private import BandedInverse, BandedMatrix, PrivacyEngine, PrivacyPlan, read_statement
from persample.private.budget import Budget
from persample.private.plan import PlannedTraining

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus


def start(plan: PrivacyPlan, count: int = 100, **options: Any) -> PlannedTraining:
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(count, 3), torch.arange(count) % 2)
    return plan.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **options)


def run(training: PlannedTraining, steps: int) -> list[int]:
    sizes: list[int] = []
    while len(sizes) < steps:
        for x, y in islice(training.loader, steps - len(sizes)):
            training.optimizer.zero_grad()
            if len(x):
                F.cross_entropy(training.module(x), y).backward()
            training.optimizer.step()
            sizes.append(len(x))
    return sizes


PLANS = [
    PrivacyPlan.for_epsilon(2.0, 1e-4, steps=25, sample_rate=0.3, expected_batch_size=30, accountant="rdp"),
    PrivacyPlan.for_epsilon(
        2.0, 1e-4, steps=24, sample_rate=0.1, expected_batch_size=9, accountant="rdp", strategy=BandedMatrix(24, 5, 3)
    ),
    PrivacyPlan.for_epsilon(
        2.0, 1e-4, steps=24, data_size=100, expected_batch_size=10, accountant="rdp", strategy=BandedInverse(24, 10, 3)
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan.strategy).__name__)
def test_a_training_spends_what_the_plan_says(plan: PrivacyPlan, tmp_path: Path) -> None:
    training = start(plan)
    sizes = run(training, plan.steps)
    assert sum(sizes) / len(sizes) == pytest.approx(100 * plan.sample_rate, rel=0.35)
    assert training.engine.accountant.history == plan.history
    assert training.engine.get_epsilon(1e-4) == plan.epsilon <= 2.0
    assert training.optimizer.expected_batch_size == plan.expected_batch_size
    training.engine.write_statement(tmp_path / "privacy.json", delta=1e-4)
    assert read_statement(tmp_path / "privacy.json").is_right
    with pytest.raises(PerSampleError, match="are made"):
        run(training, 1)


def test_another_accountant_agrees() -> None:
    plan = PLANS[0]
    accountant = dp_accounting.rdp.RdpAccountant().compose(plan.to_dp_accounting())
    assert accountant.get_epsilon(1e-4) == pytest.approx(plan.epsilon, rel=0.05)


def test_sizes_of_neighbours_give_the_same_numbers() -> None:
    """Rate, noise and divisor do not depend on the number of examples, in contrast to those of the engine."""
    found = [start(PLANS[0], count) for count in (100, 101, 137)]
    assert len({(t.optimizer.expected_batch_size, t.optimizer.noise_multiplier, len(t.loader)) for t in found}) == 1


def test_other_noise_is_refused() -> None:
    training = start(PLANS[0])
    run(training, 2)
    training.optimizer.noise_multiplier /= 2
    with pytest.raises(PerSampleError, match="The plan has noise_multiplier"):
        run(training, 1)


def test_a_restart_continues_the_plan(tmp_path: Path) -> None:
    first = start(PLANS[0])
    run(first, 20)
    path = tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)
    second = start(PLANS[0])
    second.engine.load_checkpoint(path=path, module=second.module, optimizer=second.optimizer)
    run(second, 5)
    assert second.engine.accountant.history == PLANS[0].history
    with pytest.raises(PerSampleError, match="are made"):
        run(second, 1)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    """Its steps have spent more than the plan says."""
    first, second = start(replace(PLANS[0], noise_multiplier=0.5)), start(PLANS[0])
    run(first, 2)
    path = tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)
    second.engine.load_checkpoint(path=path, module=second.module, optimizer=second.optimizer)
    with pytest.raises(PerSampleError, match="the steps before have"):
        run(second, 1)


def test_a_mode_with_a_criterion() -> None:
    training = start(PLANS[0], grad_sample_mode="ghost")
    run(training, 2)
    assert training.engine.accountant.history == [(PLANS[0].noise_multiplier, 0.3, 2)]


def test_gradients_of_others_are_refused() -> None:
    with pytest.raises(PerSampleError):
        start(PLANS[0], grad_sample_mode="no_op")


def test_loaders_with_workers() -> None:
    training = start(PLANS[0], loader=partial(DataLoader, num_workers=1))
    assert training.loader.num_workers == 1


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"steps": 2.5},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"expected_batch_size": 0},
        {"sample_rate": 0.0},
        {"sample_rate": 1.5},
        {"delta": 0.0},
        {"strategy": BandedMatrix(30, 5, 3)},
    ],
    ids=str,
)
def test_refused_plans(change: dict[str, Any]) -> None:
    numbers = {"steps": 24, "sample_rate": 0.1, "expected_batch_size": 10, "noise_multiplier": 1.0, "delta": 1e-5}
    with pytest.raises(PerSampleError):
        PrivacyPlan(**{**numbers, **change})


@pytest.mark.parametrize("sizes", [{}, {"sample_rate": 0.1, "data_size": 100}, {"data_size": 0}], ids=str)
def test_the_rate_is_given_once(sizes: dict[str, Any]) -> None:
    with pytest.raises(PerSampleError, match="either sample_rate or data_size"):
        PrivacyPlan.for_epsilon(1.0, 1e-5, steps=10, expected_batch_size=10, **sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"sample_rate": 0.1, "poisson_sampling": False},
        {"sample_rate": 0.1, "unit_ids": list(range(100))},
        {"sample_rate": 0.3, "strategy": BandedMatrix(24, 3, 3)},
        {"sample_rate": 0.1, "grad_sample_mode": "no_op"},
        {"expected_batch_size": 10, "grad_sample_mode": "no_op"},
        {"sample_rate": 2.0},
        {"expected_batch_size": 0},
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(PerSampleError):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(torch.randn(100, 3)), batch_size=10), **options,
        )  # fmt: skip


@pytest.mark.parametrize("options", [{"sample_rate": 0.1}, {"strategy": BandedMatrix(24, 3, 3)}], ids=str)
def test_trainers_refuse_another_rate(options: dict[str, Any]) -> None:
    with pytest.raises(PerSampleError, match="Trainers draw their batches themselves"):
        Budget(noise_multiplier=1.0).make_private(PrivacyEngine(), 10, **options)


def test_the_rate_of_the_engine_is_counted() -> None:
    model, engine = nn.Linear(3, 2), PrivacyEngine(accountant="rdp")
    data = DataLoader(TensorDataset(torch.randn(100, 3), torch.arange(100) % 2), batch_size=10)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=2.0, target_delta=1e-4,
        max_grad_norm=1.0, data_loader=data, epochs=2, sample_rate=0.3, expected_batch_size=31,
    )  # fmt: skip
    run(PlannedTraining(model, optimizer, loader, engine), 6)
    assert engine.accountant.history == [(optimizer.noise_multiplier, 0.3, 6)]
    assert optimizer.expected_batch_size == 31 and engine.get_epsilon(1e-4) <= 2.0
    with pytest.raises(PerSampleError, match="budget is spent"):
        run(PlannedTraining(model, optimizer, loader, engine), 1)
