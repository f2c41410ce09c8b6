"""The private optimizer trusts nobody: what counts in a step, which noise it gets, and how steps end."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import opacus.utils.batch_memory_manager as opacus_manager
import pytest
import torch
import torch.nn.functional as F
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError, record
from persample.private import BatchMemoryManager, PrivacyEngine, PrivateOptimizer
from persample.private.errors import PrivateTrainingError
from persample.private.noise import Noise, Normals, RandomBytes
from tests.support.modules import flatten_rows, make_mlp

pytestmark = pytest.mark.filterwarnings("ignore")
B, C = 6, 0.3
STARTED: list[PrivateOptimizer] = []


@pytest.fixture(autouse=True)
def release_optimizers() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().release()


def make_model() -> nn.Module:
    return make_mlp(6, 8, 3, dtype=torch.float32)


def make_optimizer(model: nn.Module, inner: Any = None, **options: Any) -> PrivateOptimizer:
    """By default without noise: after a step, `grad` is the clipped sum."""
    settings: dict[str, Any] = {
        "noise_multiplier": 0.0, "max_grad_norm": C, "loss_reduction": "sum", "poisson_sampling": False,
        "expected_batch_size": None, **options,
    }  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=0.0) if inner is None else inner
    STARTED.append(PrivateOptimizer(inner, module=model, **settings))
    return STARTED[-1]


def make_samples(batch: int = B) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(1)) * 3


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def get_grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def clip_rows(model: nn.Module, x: Tensor, bound: float = C) -> Tensor:
    """The sum of clipped rows by the definition."""
    model = copy.deepcopy(model)  # which is not in private training
    with record(model, loss_reduction="sum") as grads:
        compute_loss(model, x).backward()
    rows = flatten_rows(grads.dense())
    return (bound / rows.norm(dim=1)).clamp(max=1) @ rows


# ---- the sum belongs to the optimizer ----


def scale_grads(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.mul_(1000)  # type: ignore[union-attr]


def scale_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.mul_(1000)  # type: ignore[union-attr]


def write_by_numpy(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.numpy()[:] = 77.0  # type: ignore[union-attr]


def replace_grads(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 77.0)


def fill_storage(model: nn.Module) -> None:
    for p in model.parameters():
        torch.from_dlpack(p.grad).fill_(77.0)  # type: ignore[arg-type]


def remove_some(model: nn.Module) -> None:
    next(model.parameters()).grad = None


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "mul_": scale_grads,
    "data": scale_data,
    "numpy": write_by_numpy,
    "another tensor": replace_grads,
    "dlpack": fill_storage,
    "one gradient removed": remove_some,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_backward_and_step_do_not_count(change: str) -> None:
    model, x = make_model(), make_samples()
    expected = clip_rows(model, x)
    optimizer = make_optimizer(model)
    optimizer.zero_grad()
    compute_loss(model, x).backward()
    torch.testing.assert_close(get_grads(model), expected)  # readers see the sum
    CHANGES[change](model)
    optimizer.step()
    torch.testing.assert_close(get_grads(model), expected)


def test_changes_between_accumulated_batches_do_not_count() -> None:
    model, x = make_model(), make_samples()
    expected = clip_rows(model, x)
    optimizer = make_optimizer(model)
    for part in x.split(2):
        compute_loss(model, part).backward()
        scale_grads(model)
    optimizer.step()
    torch.testing.assert_close(get_grads(model), expected)


def test_gradients_from_before_do_not_count() -> None:
    """Neither those of trained parameters, nor those of frozen ones, which SGD would use."""
    model, x = make_model(), make_samples()
    model[0].bias.requires_grad_(False)
    before = model[0].bias.clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e4)
    optimizer = make_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    compute_loss(model, x).backward()
    assert all(p.grad.norm() <= B * C for p in model.parameters() if p.requires_grad)  # type: ignore[union-attr]
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e4)
    optimizer.step()
    assert torch.equal(before, model[0].bias) and model[0].bias.grad is None
    total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert total.norm() <= B * C * (1 + 1e-4)


def test_a_step_without_samples_is_noise_only() -> None:
    model = make_model()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e4)
    optimizer = make_optimizer(model, noise_multiplier=1.0)
    optimizer.step()
    assert get_grads(model).norm() < 100 * C


def test_parameters_frozen_between_backward_and_step_keep_their_values() -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    compute_loss(model, x).backward()
    model[2].requires_grad_(False)
    before = model[2].weight.clone()
    optimizer.step()
    assert torch.equal(before, model[2].weight)


def test_parameters_that_are_trained_from_the_middle_of_a_step_on_get_noise_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 2))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, noise_multiplier=1.0)
    loss = model(1000 * torch.ones(1, 30)).square().sum()
    model[0].requires_grad_(True)
    loss.backward()
    optimizer.step()
    optimizer.release()
    assert float(model[0].weight.grad.std()) == pytest.approx(C, rel=0.1)


def test_parameters_of_other_modules_are_refused() -> None:
    model, x, other = make_model(), make_samples(), nn.Linear(2, 2)
    optimizer = make_optimizer(model)
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(PerSampleError, match="do not belong to the module"):
        compute_loss(model, x)


# ---- settings of a step ----


def test_the_bound_of_a_step_is_that_of_its_first_samples() -> None:
    model, x = make_model(), make_samples()
    expected, lower = clip_rows(model, x), clip_rows(model, x, C / 10)
    optimizer = make_optimizer(model)
    for part in x.split(2):
        compute_loss(model, part).backward()
        optimizer.max_grad_norm = C / 10
    optimizer.step()
    torch.testing.assert_close(get_grads(model), expected)
    optimizer.zero_grad()
    compute_loss(model, x).backward()
    optimizer.step()
    torch.testing.assert_close(get_grads(model), lower)


@pytest.mark.parametrize("changed", ["max_grad_norm", "noise_multiplier"])
@pytest.mark.parametrize("when", ["before the loss", "before the step"])
def test_noise_and_accountant_take_what_the_step_began_with(changed: str, when: str) -> None:
    model, x = nn.Linear(100, 100), torch.randn(4, 100)
    engine = PrivacyEngine(accountant="rdp")
    optimizer = make_optimizer(model, noise_multiplier=2.0)
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x)
        if when == "before the loss":
            setattr(optimizer, changed, 1e-3)
        (0 * out.square().sum()).backward()
        if when == "before the step":
            setattr(optimizer, changed, 1e-3)
        deviations = (2.0 * C, 1e-3 * (2.0 if changed == "max_grad_norm" else C))
        optimizer.step()
        made = sum(steps for _, _, steps in engine.accountant.history)
        assert get_grads(model).std() == pytest.approx(deviations[made - 1], rel=0.05)
        assert getattr(optimizer, changed) == 1e-3  # as it was set
    noise = [2.0, 2.0 if changed == "max_grad_norm" else 1e-3]
    assert [n for n, _, steps in engine.accountant.history for _ in range(steps)] == noise


def test_a_schedule_in_the_hook_has_effect() -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model, noise_multiplier=1.0)
    optimizer.attach_step_hook(lambda made: setattr(made, "noise_multiplier", 0.5))
    compute_loss(model, x).backward()
    optimizer.step()
    assert optimizer.noise_multiplier == 0.5


# ---- zero_grad ----


@pytest.mark.parametrize("clear", ["optimizer", "optimizer in place", "model"])
def test_cleared_gradients_do_not_count(clear: str) -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model, loss_reduction="mean", expected_batch_size=B)
    expected = clip_rows(model, x) / B

    def zero_grad() -> None:
        owner = optimizer if clear.startswith("optimizer") else model
        owner.zero_grad(set_to_none=not clear.endswith("in place"))

    for _ in range(2):
        compute_loss(model, 5 * x).div(B).backward()  # given up
        zero_grad()
        compute_loss(model, x).div(B).backward()
        assert optimizer.accumulated_iterations == 1
        optimizer.step()
        torch.testing.assert_close(get_grads(model), expected)
        zero_grad()
    compute_loss(model, x).div(B).backward()
    zero_grad()
    optimizer.step()
    assert not get_grads(model).any()


def test_a_batch_without_gradient_still_counts() -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model, loss_reduction="mean", expected_batch_size=B)
    for factor in (0, 0, 1):
        (factor * compute_loss(model, x).div(B)).backward()
    assert optimizer.accumulated_iterations == 3


# ---- release ----


def test_a_step_after_release_is_an_ordinary_step() -> None:
    model, x = make_model(), make_samples()
    plain = copy.deepcopy(model)
    optimizer = make_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=10.0)
    optimizer.release()
    optimizer.release()
    steps = [optimizer, torch.optim.SGD(plain.parameters(), lr=0.1)]
    for trained, step in zip((model, plain), steps, strict=True):
        for _ in range(2):
            step.zero_grad()
            compute_loss(trained, x).backward()
            step.step()
        step.zero_grad()
        step.step(lambda trained=trained: _run_backward(trained, x))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def _run_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = compute_loss(model, x)
    loss.backward()
    return loss


def test_sums_without_noise_are_not_used_after_release() -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0)
    compute_loss(model, x).backward()
    optimizer.release()
    with pytest.raises(PerSampleError, match="without noise, from a backward pass before release"):
        optimizer.step()
    compute_loss(model, x).backward()  # adds to what is there
    with pytest.raises(PerSampleError, match="without noise, from a backward pass before release"):
        optimizer.step()
    model.zero_grad()
    compute_loss(model, x).backward()
    optimizer.step()


# ---- dtypes ----


def test_low_precision_sums_are_rounded_once() -> None:
    """1,024 samples of 1 and one of 0.5 are 1,024.5; in bfloat16, which has 8 bits, small parts would be lost."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = make_optimizer(model, max_grad_norm=1.0, poisson_sampling=False)
    for part in torch.ones(260, 1, dtype=torch.bfloat16).split(1):
        model(part).float().sum().backward()
    optimizer.step()
    assert model.weight.grad.dtype == torch.bfloat16 and model.weight.grad.item() == 260  # type: ignore[union-attr]


def test_noise_of_complex_parameters() -> None:
    model = nn.Linear(100, 100, dtype=torch.complex64)
    optimizer = make_optimizer(model, noise_multiplier=2.0)
    optimizer.step()
    for part in (get_grads(model).real, get_grads(model).imag):
        assert part.std() == pytest.approx(2 * C, rel=0.05)


# ---- noise ----


def draw(model: nn.Module | None = None, **options: Any) -> Tensor:
    model = make_model() if model is None else model
    optimizer = make_optimizer(model, noise_multiplier=1.0, **options)
    optimizer.step()
    optimizer.release()
    return get_grads(model)


def test_noise_does_not_follow_the_seed() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        draws.append(draw())
    assert abs(torch.corrcoef(torch.stack(draws))[0, 1]) < 0.5
    state = torch.get_rng_state()
    optimizer = make_optimizer(make_model(), noise_multiplier=1.0)
    torch.set_rng_state(state)
    optimizer.step()
    assert torch.equal(state, torch.get_rng_state())  # nor does it touch the global generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_the_same_with_any_number_of_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.private.noise._CHUNK", 100)
    monkeypatch.setattr("persample.private.noise._MIN_THREADED", 0)
    noise, found = Noise(), []
    state = noise.get_state()
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        totals = [torch.zeros(shape, dtype=dtype) for shape in ((30, 30), (7,), (), (0, 3), (101, 11))]
        noise.set_state(state)
        noise.add_to(totals, 2.0)
        found.append(torch.cat([total.flatten() for total in totals]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    noise.add_to(totals, 2.0)  # the next draw is another one, and is added
    later = torch.cat([total.flatten() for total in totals]) - found[0]
    assert abs(torch.corrcoef(torch.stack([found[0], later]))[0, 1]) < 0.1


def test_distribution_of_the_noise() -> None:
    total = torch.zeros(2_000_000)
    Noise().add_to([total], 3.0)
    z = (total / 3).double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(float(z.pow(power).mean()) - moment) < 0.03
    for quantile in (-4.0, -2.0, 0.5, 3.0):
        share = 0.5 * (1 + torch.erf(torch.tensor(quantile / 2**0.5))).double()
        assert abs(float((z < quantile).double().mean() - share)) < 5 * float((share * (1 - share) / len(z)).sqrt())
    parts = z[: 30 * 2**16].view(30, -1)  # of different chunks
    assert (torch.corrcoef(parts) - torch.eye(30)).abs().max() < 0.025
    pairs = parts.view(30, 2, -1).transpose(0, 1).flatten(1)  # the two results of one transform
    for function in (torch.abs, torch.square, torch.sign):
        assert abs(torch.corrcoef(function(pairs))[0, 1]) < 0.005


IMPOSSIBLE = [("max_grad_norm", v) for v in (math.inf, math.nan, 0.0, -1.0)]
IMPOSSIBLE += [("noise_multiplier", v) for v in (math.inf, math.nan, -1.0)]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name, value", IMPOSSIBLE)
def test_impossible_bounds_and_noise_are_refused(name: str, value: float, later: bool) -> None:
    model, settings = nn.Linear(3, 2), {"max_grad_norm": C, "noise_multiplier": 1.0}
    weight = model.weight.detach().clone()
    with pytest.raises(PerSampleError, match=f"{name} must be"):
        optimizer = PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            module=model,
            expected_batch_size=B,
            **(settings if later else {**settings, name: value}),
        )
        STARTED.append(optimizer)
        setattr(optimizer, name, value)
        model(torch.randn(B, 3)).square().sum(1).mean().backward()
        optimizer.step()
    assert torch.equal(model.weight, weight) and not _get_current_function_mode_stack()


def encrypt_counter(key: bytes, start: int, blocks: int) -> bytes:
    """The stream of AES-256 in counter mode, block by block."""
    cipher = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    return b"".join(cipher.update((start + i).to_bytes(16, "big")) for i in range(blocks))


@pytest.mark.parametrize("dtype, count", [(torch.float32, 1000), (torch.float32, 7), (torch.float64, 1001)])
def test_transform_of_the_noise(dtype: torch.dtype, count: int) -> None:
    source, key, half = Normals(dtype), os.urandom(32), -(-count // 2)
    found = source.draw(RandomBytes(key, start=5), count, 3.0).copy()
    assert np.array_equal(found, source.draw(RandomBytes(key, start=5), count, 3.0))
    for other in (bytes([key[0] ^ 1]) + key[1:], key[:31] + bytes([key[31] ^ 128])):  # the first and last bit count
        assert not np.array_equal(found, source.draw(RandomBytes(other, start=5), count, 3.0))
    size = 31 if dtype == torch.float32 else 63
    drawn = np.frombuffer(encrypt_counter(key, 5, 600), dtype=np.int32 if size == 31 else np.int64)
    uniform = (np.bitwise_and(drawn[:half], 2**size - 1) + 0.5) / 2**size
    radius, angle = np.sqrt(-2 * np.log(uniform)), np.pi * drawn[half : 2 * half] / 2**size
    expected = 3 * np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    assert found.dtype == np.dtype(str(dtype)[6:])
    np.testing.assert_allclose(found, expected, atol=3e-5 if size == 31 else 1e-12)


@pytest.mark.parametrize("word, expected", [(0, 2**-32), (2**31 - 1, 1.0), (-(2**31), 2**-32), (-1, 1.0)])
def test_extreme_words_give_finite_noise(word: int, expected: float) -> None:
    class Words(RandomBytes):
        def read_into(self, target: memoryview, count: int) -> None:
            target[:count] = np.full(count // 4, word, dtype=np.int32).tobytes()

    found = Normals(torch.float32).draw(Words(bytes(32), 0), 8, 1.0)
    radius = np.hypot(*found.reshape(2, 4).astype(np.float64))
    np.testing.assert_allclose(radius, np.sqrt(-2 * np.log(expected)), atol=1e-6)


@pytest.mark.parametrize("chunk, scale", [(10, 1), (64, 1), (2**17, 2000)])
def test_no_block_of_the_cipher_is_used_twice(chunk: int, scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several draws, of tensors of both dtypes, in chunks."""
    used: list[range] = []

    class Blocks(RandomBytes):
        def __init__(self, key: bytes, start: int) -> None:
            super().__init__(key, start)
            self.start = start

        def read_into(self, target: memoryview, count: int) -> None:
            used.append(range(self.start, self.start - (-count // 16)))
            super().read_into(target, count)

    monkeypatch.setattr("persample.private.noise._CHUNK", chunk)
    monkeypatch.setattr("persample.private.noise.RandomBytes", Blocks)
    noise = Noise()
    for _ in range(3):
        sizes = [(500 * scale, torch.float32), (301 * scale, torch.float64), (77 * scale, torch.float32)]
        noise.add_to([torch.zeros(size, dtype=dtype) for size, dtype in sizes], 1.0)
    used.sort(key=lambda blocks: blocks.start)
    assert len(used) > 3 * 3 and sum(map(len, used)) > 3 * 500 * scale // 4
    assert all(before.stop <= after.start for before, after in pairwise(used))


def test_noise_of_devices() -> None:
    """It comes from torch's generator, with a seed for each draw and each group."""
    noise = Noise()

    def draw(group: int = 0) -> Tensor:
        total = torch.zeros(1000)
        noise._add_on_device([total[:600], total[600:]], 2.0, noise._draws, group)
        return total

    noise._draws += 1
    state, first = noise.get_state(), draw()
    assert 1.8 < first.std() < 2.2 and torch.equal(draw(), first)
    assert abs(torch.corrcoef(torch.stack([first, draw(group=1)]))[0, 1]) < 0.3
    noise._draws += 1
    assert abs(torch.corrcoef(torch.stack([first, draw()]))[0, 1]) < 0.3
    noise.set_state(state)
    assert torch.equal(draw(), first)


def test_an_error_in_a_draw_does_not_repeat_its_noise() -> None:
    noise, first, second = Noise(), torch.zeros(100), torch.zeros(100)
    with pytest.raises(RuntimeError):
        noise.add_to([first, torch.zeros(3, 3, dtype=torch.float64).t()[:, :2]], 1.0)
    noise.add_to([second], 1.0)
    assert first.any() and abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.5


def test_errors_of_other_threads_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.private.noise._CHUNK", 10)
    monkeypatch.setattr("persample.private.noise._MIN_THREADED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    noise = Noise()
    start, calls = noise._start_stream, []

    def fail_once(*args: Any) -> RandomBytes:
        calls.append(args)
        if len(calls) == 5:
            raise MemoryError
        return start(*args)

    monkeypatch.setattr(noise, "_start_stream", fail_once)
    with pytest.raises(MemoryError):
        noise.add_to([torch.zeros(1000)], 1.0)


def test_a_fork_does_not_draw_the_noise_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, first, again = Noise(), torch.zeros(100), torch.zeros(100)
    state, process = noise.get_state(), os.getpid()
    noise.add_to([first], 1.0)
    noise.set_state(state)
    monkeypatch.setattr("persample.private.noise.getpid", lambda: process + 1)
    assert not torch.equal(noise.get_state(), state)
    noise.add_to([again], 1.0)
    assert abs(torch.corrcoef(torch.stack([first, again]))[0, 1]) < 0.5


def test_keys_are_new_after_a_checkpoint(tmp_path: Path) -> None:
    """Two branches of a training from one checkpoint would have the same noise, which cancels in their difference."""
    path, model = tmp_path / "checkpoint.pt", make_model()
    engine, draws = PrivacyEngine(), []
    for generator in (None, torch.Generator().manual_seed(3)):
        optimizer = make_optimizer(model, noise_multiplier=1.0, generator=generator)
        batches = torch.Generator().manual_seed(1)
        optimizer.sources.append(batches)
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
        drawn = []
        for _ in range(2):
            torch.manual_seed(42)
            if generator is not None:
                generator.manual_seed(3)
            batches.manual_seed(1)
            engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
            optimizer.step()
            draws.append(get_grads(model))
            drawn.append(torch.rand(8, generator=batches))
        assert not torch.equal(*drawn)
        optimizer.release()
    assert len({tuple(draw.tolist()) for draw in draws}) == 4


# ---- parts of split batches ----


def make_loader(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(make_samples(24)), batch_size=12, num_workers=workers)


def split(optimizer: PrivateOptimizer, most: int = 3, workers: int = 0) -> Any:
    return BatchMemoryManager(
        data_loader=make_loader(workers), max_physical_batch_size=most, optimizer=optimizer
    ).__enter__()


FAILURES = ["forward", "loss", "backward", "before the model"]


@pytest.mark.parametrize("where, workers", [*((where, 0) for where in FAILURES), ("loss", 1)])
@pytest.mark.parametrize("failing", [0, 2, 3, 5, 7])
def test_the_part_after_a_failed_part_is_refused(where: str, workers: int, failing: int) -> None:
    """Two batches of four parts; the last part of the first batch has number 3."""
    model, data = make_model(), make_samples(24).split(12)
    optimizer = make_optimizer(model)
    expected = [clip_rows(model, x) for x in data]
    loader = split(optimizer, workers=workers)
    found, parts = [], []
    with pytest.raises(PrivateTrainingError, match="A part of a batch has failed"):
        for i, (x,) in enumerate(loader):
            parts.append(i)
            try:
                run_part(model, optimizer, x, where if i == failing else None)
            except ValueError:
                continue
            if next(model.parameters()).grad is not None:
                found.append(get_grads(model))
    assert parts == [*range(failing + 1)] and len(found) == failing // 4
    for (x,) in loader:  # the failed batch leaves nothing for the next loop
        run_part(model, optimizer, x, None)
        if next(model.parameters()).grad is not None:
            found.append(get_grads(model))
    for total, want in zip(found[-2:], expected, strict=True):
        torch.testing.assert_close(total, want)


@pytest.mark.parametrize("goes_on", ["with the next part", "with step()"])
@pytest.mark.parametrize("size", [12, 3])
def test_no_sample_takes_others_out_of_the_sum(size: int, goes_on: str) -> None:
    """One of 12 equal samples is replaced by one whose label is out of range; the loop catches the error."""
    samples, labels = make_samples(1).repeat(12, 1), torch.zeros(12, dtype=torch.long)

    def train(labels: Tensor) -> Tensor | None:
        model = make_model()
        optimizer = make_optimizer(model)
        data = DataLoader(TensorDataset(samples, labels), batch_size=12)
        manager = BatchMemoryManager(data_loader=data, max_physical_batch_size=size, optimizer=optimizer)
        try:
            for x, y in manager.__enter__():
                optimizer.zero_grad()
                try:
                    F.cross_entropy(model(x), y, reduction="sum").backward()
                except IndexError:
                    if goes_on == "with the next part":
                        continue
                optimizer.step()
        except PrivateTrainingError:
            return None
        return torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
        )

    whole, other = train(labels), train(torch.where(torch.arange(12) == 5, 99, labels))
    assert whole is not None and whole.norm() > 11 * C
    assert other is None or (whole - other).norm() <= 2 * C * (1 + 1e-4)


def run_part(model: nn.Module, optimizer: PrivateOptimizer, x: Tensor, fails: str | None) -> None:
    optimizer.zero_grad()
    handle = model.register_forward_hook(_fail) if fails == "forward" else None
    try:
        if fails == "before the model":
            raise ValueError
        out = model(x)
        if fails == "loss":
            raise ValueError
        if fails == "backward":
            out.register_hook(_fail)
        out.square().sum().backward()
    finally:
        if handle is not None:
            handle.remove()
    optimizer.step()


def _fail(*args: Any) -> None:
    raise ValueError


def test_a_loop_that_starts_again_counts_no_sample_twice() -> None:
    model, x = make_model(), make_samples(24)
    optimizer = make_optimizer(model)
    expected = clip_rows(model, x[:12])
    loader = split(optimizer)
    for _ in range(14):
        for i, (part,) in enumerate(loader):
            if i == 2:
                break  # as after an error
            run_part(model, optimizer, part, None)
    for i, (part,) in enumerate(loader):
        run_part(model, optimizer, part, None)
        if i == 3:
            break
    torch.testing.assert_close(get_grads(model), expected)


def test_a_failed_part_with_the_manager_of_opacus_is_refused() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    manager = opacus_manager.BatchMemoryManager(
        data_loader=make_loader(), max_physical_batch_size=3, optimizer=optimizer
    )
    with manager as parts, pytest.raises(PerSampleError, match="A part of a split batch has failed"):
        for i, (x,) in enumerate(parts):
            try:
                run_part(model, optimizer, x, "backward" if i == 1 else None)
            except ValueError:
                continue


# ---- other optimizers, scalers and copies ----


def test_lbfgs_is_refused() -> None:
    model = make_model()
    with pytest.raises(PerSampleError, match="LBFGS evaluates the loss several times"):
        make_optimizer(model, torch.optim.LBFGS(model.parameters()))
    assert not model._forward_hooks


def test_grad_scaler() -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(compute_loss(model, x)).backward()
    with pytest.raises(PerSampleError, match="GradScaler scales the loss"):
        scaler.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(compute_loss(model, x)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(get_grads(model), clip_rows(model, x))


def test_closures_return_their_loss() -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model)
    loss = optimizer.step(lambda: _run_backward(model, x))
    torch.testing.assert_close(loss, compute_loss(model, x))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())])
def test_copies_of_the_optimizer_are_refused(duplicate: Callable[[Any], Any]) -> None:
    optimizer = make_optimizer(make_model())
    with pytest.raises(PerSampleError, match="the copy would draw the same noise"):
        duplicate(optimizer)


@pytest.mark.parametrize("stage", ["forward", "backward", "step"])
def test_state_of_the_optimizer_is_saved_in_the_middle_of_training(stage: str) -> None:
    model, x = make_model(), make_samples()
    optimizer = make_optimizer(model, torch.optim.Adam(model.parameters(), lr=0.1))
    loss = compute_loss(model, x)
    if stage != "forward":
        loss.backward()
    if stage == "step":
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = make_model()
    again.load_state_dict(saved["model"])
    fresh = make_optimizer(again, torch.optim.Adam(again.parameters(), lr=0.1))
    fresh.load_state_dict(saved["optimizer"])
    assert bool(fresh.state) == (stage == "step")


# ---- steps that end ----


@pytest.mark.parametrize("end", ["dropped", "no backward", "loss raises", "model raises", "backward raises", "refused"])
def test_a_step_leaves_nothing_behind(end: str) -> None:
    model, x = make_model(), make_samples()
    engine = PrivacyEngine()
    model, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=make_loader(),
        noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction="sum", poisson_sampling=False,
    )  # fmt: skip
    out = model(x)
    if end == "loss raises":
        with pytest.raises(ValueError, match="nothing"):
            raise ValueError("nothing")
    elif end == "model raises":
        with pytest.raises(RuntimeError):
            model(x[:, :2])
    elif end == "backward raises":
        out.register_hook(_fail)
        with pytest.raises(ValueError):
            out.sum().backward()
    elif end == "refused":
        with pytest.raises(PerSampleError):
            F.mse_loss(out.softmax(0), torch.zeros(B, 3)).backward()
    del out
    if end in ("dropped", "no backward", "loss raises"):
        del model, optimizer, engine
        gc.collect()
        assert not _get_current_function_mode_stack()
    else:
        optimizer.zero_grad()
        compute_loss(model, x).backward()
        optimizer.step()
        optimizer.release()
    other = make_model()
    with record(other, loss_reduction="sum") as grads:
        compute_loss(other, x).backward()
    assert len(grads.norms()) == B


# ---- losses ----


def test_a_sum_is_refused_if_a_mean_is_expected() -> None:
    model, x = make_model(), make_samples()
    make_optimizer(model, loss_reduction="mean", expected_batch_size=B)
    with pytest.raises(PerSampleError, match="is a sum over the samples"):
        compute_loss(model, x).backward()


@pytest.mark.parametrize("declared", [False, True])
def test_masked_means_over_the_batch_are_refused(declared: bool) -> None:
    model, x = nn.Linear(6, 3), torch.randn(B, 4, 6)
    labels, mask = torch.randint(3, (B, 4)), torch.rand(B, 4) > 0.5
    optimizer = make_optimizer(model, loss_reduction="mean", expected_batch_size=B)
    if declared:
        optimizer.add_samples((x, labels, mask))
    losses = F.cross_entropy(model(x).transpose(1, 2), labels, reduction="none")
    with pytest.raises(PerSampleError):
        ((losses * mask).sum() / mask.sum()).backward()
    optimizer.zero_grad()
    losses = F.cross_entropy(model(x).transpose(1, 2), labels, reduction="none")
    ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean().backward()
    optimizer.step()


def test_the_optimizer_tells_how_many_passes_it_makes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    optimizer = PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        module=model,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        recording={"memory": 0},
    )
    with caplog.at_level("INFO", "persample.private"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert optimizer.passes == 2
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "Private training clips in 2 backward passes"
    ]
