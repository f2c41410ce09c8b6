"""A target epsilon is never exceeded, and the epsilon of unchanged trainings is that of Opacus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus import schedulers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError
from persample.private import BatchMemoryManager, PrivacyEngine, PrivateOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")
DELTA = 1e-3
STARTED: list[PrivateOptimizer] = []


@pytest.fixture(autouse=True)
def release_optimizers() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().release()


def make_private(engine: Any, samples: int = 40, batch: int = 8, drop_last: bool = False, **options: Any) -> Any:
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(samples, 3), torch.randint(2, (samples,)))
    found = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_delta=DELTA, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=batch, drop_last=drop_last), **{"target_epsilon": 3.0, **options},
    )  # fmt: skip
    if isinstance(found[1], PrivateOptimizer):
        STARTED.append(found[1])
    return found


def make_steps(model: nn.Module, optimizer: Any, loader: Any, most: float = float("inf")) -> int:
    """Make steps for one epoch; return their number."""
    made = 0
    for x, y in loader:
        if made >= most:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        made += 1
    return made


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
@pytest.mark.parametrize("sizes", [{}, {"batch": 7}, {"batch": 7, "drop_last": True}, {"samples": 93, "batch": 1}])
def test_the_target_holds_for_the_batches_of_the_loader(accountant: str, sizes: Any) -> None:
    """Also for 93 batches: a Poisson sampler of rate 1/93 yields int(1 / (1 / 93)) = 92 of them."""
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = make_private(engine, epochs=2, **sizes)
    made = sum(make_steps(model, optimizer, loader) for _ in range(2))
    assert made == 2 * len(loader)
    assert 2.9 < engine.get_epsilon(DELTA) <= 3.0


@pytest.mark.parametrize("epochs, steps", [(0.6, 3), (2.5, 13), (1, 5), (0.01, 1), (1.1, 6)])
def test_fractions_of_epochs_are_rounded_up(epochs: float, steps: int) -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = make_private(engine, epochs=epochs)
    while steps > 0:
        steps -= make_steps(model, optimizer, loader, steps)
    assert 2.9 < engine.get_epsilon(DELTA) <= 3.0


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_steps_beyond_the_plan_are_refused(accountant: str) -> None:
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = make_private(engine, steps=6)
    make_steps(model, optimizer, loader)
    with pytest.raises(PerSampleError, match=r"The privacy budget is spent after .* steps"):
        for _ in range(10):
            before = model.weight.detach().clone()
            make_steps(model, optimizer, loader, 1)
    assert torch.equal(before, model.weight)
    assert all(p.grad is None for p in model.parameters())
    assert 2.9 < engine.get_epsilon(DELTA) <= 3.0


def test_split_batches_count_once() -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = make_private(engine, epochs=2)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    with manager as parts:
        for _ in range(2):
            make_steps(model, optimizer, parts)
    assert engine.accountant.history[0][2] == 10 and engine.get_epsilon(DELTA) <= 3.0


def test_accumulated_batches_spend_more() -> None:
    """Two batches in a step double the sample rate: fewer steps are allowed than planned."""
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = make_private(engine, epochs=4, poisson_sampling=False)
    made = 0
    with pytest.raises(PerSampleError, match="The privacy budget is spent"):
        for _ in range(20):
            optimizer.zero_grad()
            for x, y in list(loader)[:2]:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            made += 1
    assert 0 < made < 10 and 2 < engine.get_epsilon(DELTA) <= 3.0


@pytest.mark.parametrize("gamma", [0.7, 1.3])
def test_scheduled_noise_stays_within_the_target(gamma: float) -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = make_private(engine, epochs=3)
    noise = schedulers.ExponentialNoise(optimizer, gamma=gamma)
    try:
        for _ in range(3):
            make_steps(model, optimizer, loader)
            noise.step()
        assert gamma > 1
    except PerSampleError:
        assert gamma < 1
    assert 1 < engine.get_epsilon(DELTA) <= 3.0


def test_noise_of_zero_is_refused() -> None:
    model, optimizer, loader = make_private(PrivacyEngine(accountant="rdp"), epochs=1)
    optimizer.noise_multiplier = 0.0
    with pytest.raises(PerSampleError, match="The privacy budget is spent"):
        make_steps(model, optimizer, loader)


def test_what_was_spent_before_is_part_of_the_target() -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = make_private(engine, target_epsilon=2.0, epochs=1)
    make_steps(model, optimizer, loader)
    optimizer.release()
    model, optimizer, loader = make_private(engine, target_epsilon=4.0, epochs=3)
    for _ in range(3):
        make_steps(model, optimizer, loader)
    assert 3.9 < engine.get_epsilon(DELTA) <= 4.0
    optimizer.release()
    with pytest.raises(PerSampleError, match="The privacy budget is spent: the steps so far have epsilon"):
        make_private(engine, target_epsilon=4.0, epochs=1)


def test_two_optimizers_share_a_budget() -> None:
    engine = PrivacyEngine(accountant="rdp")
    trainings = [make_private(engine, epochs=2) for _ in range(2)]
    made = []
    with pytest.raises(PerSampleError, match="The privacy budget is spent"):
        for _ in range(2):
            for training in trainings:
                made.append(make_steps(*training))
    assert engine.get_epsilon(DELTA) <= 3.0


@pytest.mark.parametrize("options, message", [
    ({}, "either epochs or steps"),
    ({"epochs": 1, "steps": 1}, "either epochs or steps"),
    ({"epochs": 0}, "epochs must be positive"),
    ({"steps": -1}, "steps must be positive"),
])  # fmt: skip
def test_wrong_plans(options: Any, message: str) -> None:
    with pytest.raises(PerSampleError, match=message):
        make_private(PrivacyEngine(), **options)


def test_a_target_that_cannot_be_reached_leaves_the_model_as_it_is() -> None:
    model, engine = nn.Linear(3, 2), PrivacyEngine(accountant="rdp")
    engine.accountant.history = [(0.5, 0.5, 50)]
    with pytest.raises(PerSampleError, match="The privacy budget is spent"):
        engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, epochs=1,
            data_loader=DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4), target_epsilon=1.0,
            target_delta=DELTA,
        )  # fmt: skip
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("accountant, epochs", [("rdp", 1), ("rdp", 3), ("gdp", 3), ("prv", 3)])
def test_noise_and_epsilon_equal_those_of_opacus(accountant: str, epochs: int) -> None:
    found = []
    for engine in (PrivacyEngine(accountant=accountant), opacus.PrivacyEngine(accountant=accountant)):
        torch.manual_seed(0)
        with getattr(torch.backends, "__allow_nonbracketed_mutation")():
            model, optimizer, loader = make_private(engine, epochs=epochs)
            for _ in range(epochs):
                make_steps(model, optimizer, loader)
        found.append((optimizer.noise_multiplier, engine.get_epsilon(DELTA)))
    assert found[0] == found[1]
