"""Private training with correlated noise: what is released, the batches in turn, accounting, restarts."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError
from persample.private import (
    BandedInverse,
    BandedInverseRoot,
    BandedMatrix,
    BatchMemoryManager,
    Cancelling,
    PrivacyEngine,
    audit,
    read_statement,
)
from persample.private.noise import Noise
from persample.private.strategies import Strategy
from tests.private.test_strategies import make_matrix
from tests.support.processes import in_two_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus

COUNT, BATCH = 64, 8
STRATEGIES = [BandedMatrix(16, 4, 3), BandedInverse(16, 8, 3), BandedInverseRoot(16, 4, 4), Cancelling(16, 8, 0.6)]


class Training:
    """A model whose data know their own index, and what was released in each step."""

    def __init__(self, strategy: Strategy | None, seed: int | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        data = TensorDataset(torch.randn(COUNT, 4), torch.randint(2, (COUNT,)), torch.arange(COUNT))
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = DataLoader(data, batch_size=BATCH, generator=generator)
        self.engine = PrivacyEngine(accountant="rdp")
        amount = {} if "target_epsilon" in options else {"noise_multiplier": 0.8}
        make = self.engine.make_private_with_epsilon if "target_epsilon" in options else self.engine.make_private
        _, self.optimizer, self.loader = make(
            module=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1), data_loader=loader,
            max_grad_norm=0.5, strategy=strategy, grad_samples=True, **amount, **options,
        )  # fmt: skip
        self.batches: list[list[int]] = []
        self.noise: list[Tensor] = []  # of the steps, relative to the bound

    def backward(self, batch: Any) -> None:
        x, y, _ = batch
        self.optimizer.zero_grad()
        if len(x):
            F.cross_entropy(self.model(x), y).backward()

    def step(self, batch: Any) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.batches.append(batch[2].tolist())
        params = list(self.model.parameters())
        sums = [torch.zeros_like(p) if p.summed_grad is None else p.summed_grad for p in params]
        rows = [p.grad * self.optimizer.expected_batch_size - total for p, total in zip(params, sums, strict=True)]
        self.noise.append(torch.cat([row.flatten() for row in rows]).double() / 0.5)

    def run(self, steps: int) -> None:
        while steps:
            for batch in islice(self.loader, steps):
                self.step(batch)
                steps -= 1


def get_gaps(batches: list[list[int]]) -> list[int]:
    """The numbers of steps between two batches with the same sample."""
    last: dict[int, int] = {}
    gaps = []
    for step, batch in enumerate(batches):
        gaps += [step - last[sample] for sample in batch if sample in last]
        last.update(dict.fromkeys(batch, step))
    return gaps


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_released_noise(strategy: Strategy) -> None:
    """C times the noise of the steps is the independent noise of the source, with the deviation that is counted."""
    training = Training(strategy)
    training.run(16)
    mechanism = training.optimizer.mechanism
    plain = Noise()
    plain._key = mechanism.noise._key
    want = []
    for _ in range(16):
        row = [torch.zeros_like(p) for p in training.model.parameters()]
        plain.add_to(row, 0.8 * mechanism.scale)
        want.append(torch.cat([part.flatten() for part in row]))
    found = make_matrix(strategy.coefficients) @ torch.stack(training.noise).numpy()
    np.testing.assert_allclose(found, torch.stack(want).numpy(), atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_history(strategy: Strategy) -> None:
    """A banded matrix: DP-SGD on each bin. Otherwise one Gaussian mechanism, whose noise covers the sensitivity."""
    training = Training(strategy)
    training.run(16)
    if isinstance(strategy, BandedMatrix):
        assert training.engine.accountant.history == [(0.8, 4 / 8, 4)]
        assert training.optimizer.mechanism.scale == pytest.approx(np.linalg.norm(strategy.taps))
    else:
        assert training.engine.accountant.history == [(0.8, 1.0, 1)]
        assert training.optimizer.mechanism.scale == strategy.sensitivity


def test_one_band_is_dp_sgd_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.private.noise.urandom", lambda count: bytes(count))
    trainings = [Training(strategy, seed=3) for strategy in (BandedMatrix(16, 1, bands=1), None)]
    for training in trainings:
        training.run(16)
    ours, plain = trainings
    assert ours.batches == plain.batches and ours.engine.accountant.history == plain.engine.accountant.history
    for p, want in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, want)


def test_batches_with_a_sample_are_apart() -> None:
    """Over epochs that are no multiple of the bins, and loops that end early; half of each bin on average."""
    training = Training(BandedMatrix(200, 3, bands=3))
    while len(training.batches) < 200:
        for batch in islice(training.loader, min(1 + len(training.batches) % 7, 200 - len(training.batches))):
            training.step(batch)
    assert set(map(lambda gap: gap % 3, get_gaps(training.batches))) == {0}
    assert sum(map(len, training.batches)) / 200 == pytest.approx(BATCH, rel=0.15)


def test_balls_in_bins() -> None:
    """With as many bins as batches, each sample is in one batch of each epoch."""
    training = Training(BandedInverseRoot(24, 8, bands=4))
    training.run(24)
    for start in range(0, 24, 8):
        assert sorted(chain.from_iterable(training.batches[start : start + 8])) == list(range(COUNT))
    assert set(get_gaps(training.batches)) == {8}


def test_workers_draw_for_the_next_steps() -> None:
    """Batches that workers have prepared when a loop ends early are no part of the training."""
    torch.manual_seed(0)
    model, engine = nn.Linear(1, 1), PrivacyEngine(accountant="rdp")
    data = DataLoader(TensorDataset(torch.arange(40.0).unsqueeze(1)), batch_size=4, num_workers=2)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0, strategy=BandedInverseRoot(9, 3, bands=2),
    )  # fmt: skip
    batches = []
    for steps in (1, 4, 4):
        for (x,) in islice(loader, steps):
            optimizer.zero_grad()
            if len(x):
                model(x).sum(1).mean().backward()
            optimizer.step()
            batches.append(x.flatten().long().tolist())
    gaps = get_gaps(batches)
    assert gaps and all(gap % 3 == 0 for gap in gaps)


# ---- what breaks the order of batches ----


def skip_a_batch(training: Training) -> None:
    for i, batch in enumerate(training.loader):
        if i != 2:
            training.step(batch)


def mix_two_loops(training: Training) -> None:
    first, second = iter(training.loader), iter(training.loader)
    training.step(next(first))
    for batch in islice(second, 2):
        training.step(batch)


def resume_an_old_loop(training: Training) -> None:
    first = iter(training.loader)
    training.step(next(first))
    for batch in islice(training.loader, 3):
        training.step(batch)
    training.step(next(first))


def step_without_a_batch(training: Training) -> None:
    training.step(next(iter(training.loader)))
    training.optimizer.zero_grad()
    training.optimizer.step()


def use_a_batch_twice(training: Training) -> None:
    batch = next(iter(training.loader))
    training.step(batch)
    training.step(batch)


def change_the_noise(training: Training) -> None:
    training.run(3)
    training.optimizer.noise_multiplier *= 2
    training.run(1)


def go_on_after_the_last_step(training: Training) -> None:
    training.run(17)


def freeze_a_parameter(training: Training) -> None:
    training.run(2)
    training.model[0].bias.requires_grad_(False)
    training.run(1)


@pytest.mark.parametrize("strategy", [BandedMatrix(16, 4, 3), BandedInverse(16, 4, 3)], ids=str)
@pytest.mark.parametrize(
    "attack",
    [
        skip_a_batch, mix_two_loops, resume_an_old_loop, step_without_a_batch, use_a_batch_twice, change_the_noise,
        go_on_after_the_last_step, freeze_a_parameter,
    ],
)  # fmt: skip
def test_attacks_are_refused(attack: Any, strategy: Strategy) -> None:
    with pytest.raises(PerSampleError):
        attack(Training(strategy))


def test_an_error_in_a_batch_ends_its_loop_only() -> None:
    training = Training(BandedInverse(16, 4, 3))
    training.run(3)
    with pytest.raises(ZeroDivisionError):
        for batch in training.loader:
            training.backward(batch)
            raise ZeroDivisionError
    training.run(9)
    assert all(gap % 4 == 0 for gap in get_gaps(training.batches))


@pytest.mark.parametrize("strategy", [BandedMatrix(16, 4, 3), Cancelling(16, 8, 0.6)], ids=str)
def test_a_draw_that_was_interrupted_is_counted(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is not made. The next ones take back its noise, and the accountant has its entry."""
    training, noise = Training(strategy), Training(strategy).optimizer.noise
    noise.set_state(training.optimizer.noise.get_state())
    for failing in (1, 6):
        training.run(failing - 1 - training.optimizer.noise.draws)
        with monkeypatch.context() as patch:
            patch.setattr(training.optimizer.noise, "_add_draw", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                training.run(1)
        training.run(1)
        entries = strategy.count_entries(training.optimizer.noise.draws)
        assert training.engine.accountant.history == [(0.8, training.optimizer.mechanism.rate, entries)]
    rows = torch.zeros(7, 44)
    for row in rows:
        noise.add_to([row[:24].view(6, 4), row[24:30], row[30:42].view(2, 6), row[42:]], 0.8)
    found, scale = training.noise[-1], training.optimizer.mechanism.scale
    torch.testing.assert_close(found, scale * rows[-1].double(), atol=1e-4, rtol=1e-4)


def test_parts_of_a_batch() -> None:
    training = Training(BandedInverse(16, 4, 3))
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=training.loader, max_physical_batch_size=3, optimizer=training.optimizer
        ) as parts:
            for batch in parts:
                training.backward(batch)
                training.optimizer.step()
    assert training.optimizer.mechanism.noise.draws == 16
    assert training.engine.accountant.history == [(0.8, 1.0, 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"poisson_sampling": False},
        {"noise_generator": torch.Generator()},
        {"unit_ids": list(range(COUNT))},
        {"rand_on_empty": True},
        {"grad_sample_mode": "no_op"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_refused_options(options: dict[str, Any]) -> None:
    with pytest.raises(PerSampleError, match="does not support"):
        Training(BandedMatrix(16, 4, 3), **options)


def test_refused_separation() -> None:
    with pytest.raises(PerSampleError, match="an epoch has 8 batches"):
        Training(BandedMatrix(16, 9, 3))


def test_refused_audit() -> None:
    def train(run: Any) -> None:
        training = Training(BandedMatrix(16, 4, 3))
        run.observe(training.optimizer, sample_rate=1 / 8)

    with pytest.raises(PerSampleError, match="correlated"):
        audit(train, delta=1e-3)


# ---- the budget ----


@pytest.mark.parametrize("strategy", [BandedMatrix(16, 4, 3), BandedInverse(16, 8, 3)], ids=str)
def test_budget(strategy: Strategy) -> None:
    training = Training(strategy, target_epsilon=3.0, target_delta=1e-3, epochs=2)
    training.run(16)
    assert 2.9 < training.engine.get_epsilon(1e-3) <= 3.0


def test_a_budget_for_fewer_steps_ends() -> None:
    """A banded matrix spends epsilon cycle by cycle."""
    training = Training(BandedMatrix(16, 4, 3), target_epsilon=3.0, target_delta=1e-3, steps=8)
    training.run(8)
    with pytest.raises(PerSampleError, match="budget is spent"):
        training.run(1)


def test_statement(tmp_path: Path) -> None:
    training = Training(BandedMatrix(16, 4, 3))
    training.run(16)
    training.engine.write_statement(tmp_path / "privacy.json", delta=1e-3)
    statement = read_statement(tmp_path / "privacy.json")
    assert statement.is_right
    assert "banded matrix" in str(statement) and "4 bins" in str(statement)


# ---- checkpoints ----


def save(training: Training, path: Path) -> Path:
    training.engine.save_checkpoint(path=path, module=training.model, optimizer=training.optimizer)
    return path


def load(training: Training, path: Path) -> None:
    training.engine.load_checkpoint(path=path, module=training.model, optimizer=training.optimizer)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_restart(strategy: Strategy, tmp_path: Path) -> None:
    """Noise and batches of both halves belong together, and the second half has new noise in each restart."""
    first = Training(strategy)
    first.run(7)
    path = save(first, tmp_path / "half.pt")
    noises = []
    for _ in range(2):
        second = Training(strategy)
        load(second, path)
        second.run(9)
        assert all(gap % strategy.separation == 0 for gap in get_gaps(first.batches + second.batches))
        entries = strategy.count_entries(16)
        assert second.engine.accountant.history == [(0.8, second.optimizer.mechanism.rate, entries)]
        fresh = make_matrix(strategy.coefficients) @ torch.stack(first.noise + second.noise).numpy()
        scale = 0.8 * second.optimizer.mechanism.scale
        assert abs(np.corrcoef(fresh[6], fresh[7])[0, 1]) < 0.5 and 0.7 < fresh.std() / scale < 1.3
        noises.append(fresh)
    np.testing.assert_allclose(noises[0][:7], noises[1][:7], atol=1e-4)
    assert np.abs(noises[0][7:] - noises[1][7:]).max() > 0.1


def test_a_restart_of_steps_that_were_made_is_refused(tmp_path: Path) -> None:
    training = Training(BandedInverse(16, 4, 3))
    training.run(4)
    path = save(training, tmp_path / "early.pt")
    training.run(2)
    with pytest.raises(PerSampleError, match="used twice"):
        load(training, path)


def test_a_second_continuation_in_one_engine_is_refused(tmp_path: Path) -> None:
    """Its noise is in part that of the first one, and the accountant would count one."""
    first = Training(BandedInverse(16, 4, 3))
    first.run(2)
    path = save(first, tmp_path / "checkpoint.pt")
    first.run(2)
    second = Training(BandedInverse(16, 4, 3))
    with pytest.raises(PerSampleError, match="counted once"):
        first.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)


@pytest.mark.parametrize("other", [BandedInverse(16, 4, 2), BandedInverse(16, 8, 3), BandedMatrix(16, 4, 3), None])
def test_a_restart_with_another_strategy_is_refused(other: Strategy | None, tmp_path: Path) -> None:
    first = Training(BandedInverse(16, 4, 3) if other is not None else None)
    first.run(4)
    path = save(first, tmp_path / "checkpoint.pt")
    with pytest.raises(PerSampleError, match="checkpoint"):
        load(Training(other or BandedInverse(16, 4, 3)), path)


# ---- several processes ----


@in_two_processes
def test_two_processes() -> None:
    """All processes use the bins of one seed, divide the samples, and make the same steps."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model, engine = nn.Linear(1, 1), PrivacyEngine(accountant="rdp")
    data = DataLoader(TensorDataset(torch.arange(40.0).unsqueeze(1)), batch_size=10)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0, distributed=True, strategy=BandedInverseRoot(8, 4, bands=2),
    )  # fmt: skip
    batches: list[list[int]] = []
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            if len(x):
                model(x).sum(1).mean().backward()
            optimizer.step()
            batches.append(x.flatten().long().tolist())
    optimizer.release()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (batches, [p.tolist() for p in model.parameters()], engine.accountant.history))
    (ours, weights, history), (theirs, same, _) = found
    assert weights == same and history == [(1.0, 1.0, 1)]
    together = [a + b for a, b in zip(ours, theirs, strict=True)]
    assert sorted(chain.from_iterable(together[:4])) == list(range(40)) and set(get_gaps(together)) == {4}
