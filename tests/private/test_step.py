"""`Step`: a private training step in one call equals a loop over samples, refuses attacks, and changes nothing then."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError, SamplesMixed
from persample.private import BatchMemoryManager, PrivacyEngine, PrivateOptimizer, Step
from persample.private.loader import hand_out_batches
from persample.private.noise import add_noise_of
from tests.private.test_attacks import ALLOWED, BOUND, CHANGES, B, Model, make_data

pytestmark = pytest.mark.filterwarnings("ignore")
D, C = 4, 0.3
STARTED: list[PrivateOptimizer] = []


@pytest.fixture(autouse=True)
def release_optimizers() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().release()


class Net(nn.Module):
    """Two layers, a buffer that counts calls, and dropout or code between the layers."""

    def __init__(self, code: Callable[[Net, Tensor], Tensor] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 5), nn.Linear(5, 3)
        self.gate = nn.Parameter(torch.zeros(()))
        self.dropout, self.code = nn.Dropout(dropout), code
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        h = self.dropout(torch.tanh(self.first(x))) + self.gate
        return self.last(h if self.code is None else self.code(self, h))


def make_model(*args: Any, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(*args, **options).double()


def make_step(model: nn.Module, loss_fn: Any, inner: Any = None, verify: int = 100, **options: Any) -> Step:
    """By default without noise, with a sum of losses."""
    settings: dict[str, Any] = {
        "noise_multiplier": 0.0, "max_grad_norm": C, "loss_reduction": "sum", "expected_batch_size": None, **options,
    }  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=1.0) if inner is None else inner
    STARTED.append(PrivateOptimizer(inner, module=model, **settings))
    return Step(model, loss_fn, STARTED[-1], verify=verify)


def make_batch(batch: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, D, generator=generator, dtype=torch.float64) * 3
    return x, torch.randint(3, (batch,), generator=generator)


def cross_entropy(model: Any, batch: Any) -> Tensor:
    x, y = batch.values() if isinstance(batch, dict) else batch
    return F.cross_entropy(model(x), y, reduction="none")


def squares(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def flatten(tensors: Any) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def compute_rows(model: nn.Module, loss_fn: Any, samples: list[Any]) -> Tensor:
    """The gradient of each sample by plain autograd, in a copy of the model."""
    model = copy.deepcopy(model)
    rows = []
    for sample in samples:
        found = torch.autograd.grad(loss_fn(model, sample).sum(), list(model.parameters()), allow_unused=True)
        pairs = zip(found, model.parameters(), strict=True)
        rows.append(flatten(torch.zeros_like(p) if g is None else g for g, p in pairs))
    return torch.stack(rows)


def clip(rows: Tensor, bound: float = C) -> Tensor:
    return (bound / rows.norm(dim=1)).clamp(max=1) @ rows


# ---- the step equals a loop over the samples ----

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"inputs": x, "targets": y},
    "tensor": lambda x, y: x,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_equals_a_loop_over_samples_with_the_same_noise(form: str, loss_reduction: str) -> None:
    model, make, noise = make_model(), FORMS[form], 0.7
    loss_fn = squares if form == "tensor" else cross_entropy
    step = make_step(
        model, loss_fn, noise_multiplier=noise, generator=torch.Generator().manual_seed(5), verify=1,
        loss_reduction=loss_reduction, expected_batch_size=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for seed, size in enumerate([6, 3, 1, 5]):
        x, y = make_batch(size, seed)
        rows = compute_rows(model, loss_fn, [make(x[i : i + 1], y[i : i + 1]) for i in range(size)])
        expected, before = clip(rows), flatten(model.parameters()).detach()
        drawn = [torch.zeros_like(p) for p in model.parameters()]
        for part in drawn:
            add_noise_of(generator, part, noise * C)
        plain = loss_fn(copy.deepcopy(model), make(x, y)).detach()
        losses = step(make(x, y))
        assert not losses.requires_grad
        torch.testing.assert_close(losses, plain)
        expected = (expected + flatten(drawn)) / (4 if loss_reduction == "mean" else 1)
        torch.testing.assert_close(before - flatten(model.parameters()).detach(), expected, rtol=1e-7, atol=1e-9)
    assert step.optimizer.verifications == {
        "verified with 2 samples": 3,
        "not verified: the batch has fewer than two samples": 1,
    }


def test_bounds_per_layer() -> None:
    model, (x, y) = make_model(), make_batch()
    bounds = [0.1, 0.2, 0.3, 0.15, 0.25]
    rows = compute_rows(model, cross_entropy, [(x[i : i + 1], y[i : i + 1]) for i in range(6)])
    parts = rows.split([p.numel() for p in model.parameters()], 1)
    make_step(model, cross_entropy, clipping="per_layer", max_grad_norm=bounds)((x, y))
    expected = torch.cat([clip(part, bound) for part, bound in zip(parts, bounds, strict=True)])
    torch.testing.assert_close(flatten(p.grad for p in model.parameters()), expected)


def test_augmentations_in_the_loss_function_belong_to_their_sample() -> None:
    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(torch.stack([x, -x], 1).flatten(0, 1)).square().sum(1).view(-1, 2).mean(1)

    model, (x, _) = make_model(), make_batch()
    rows = compute_rows(model, loss_fn, list(x.split(1)))
    make_step(model, loss_fn)(x)
    torch.testing.assert_close(flatten(p.grad for p in model.parameters()), clip(rows))


def test_consecutive_samples_of_a_unit() -> None:
    model, (x, _) = make_model(), make_batch()
    rows = compute_rows(model, squares, list(x.split(1))).view(3, 2, -1).mean(1)
    make_step(model, squares, recording={"units": 2})(x)
    torch.testing.assert_close(flatten(p.grad for p in model.parameters()), clip(rows))


def test_a_model_in_eval_mode_has_no_dropout() -> None:
    model, (x, _) = make_model(dropout=0.5).eval(), make_batch()
    rows = compute_rows(model, squares, list(x.split(1)))
    step = make_step(model, squares)
    step(x)
    torch.testing.assert_close(flatten(p.grad for p in model.parameters()), clip(rows))


def test_an_empty_batch_makes_a_step_of_noise() -> None:
    def refuse(model: Any, batch: Any) -> Tensor:
        raise AssertionError("called")

    model = make_model()
    before = flatten(model.parameters()).detach()
    step = make_step(model, refuse, noise_multiplier=2.0, generator=torch.Generator().manual_seed(5))
    assert step((torch.zeros(0, D), torch.zeros(0).long())).shape == (0,)
    noise = (before - flatten(model.parameters()).detach()) / (2 * C)
    assert 0.5 < noise.std() < 1.5


# ---- the engine ----


def train(by_step: bool, epochs: int = 2, parts: int = 0, **options: Any) -> tuple[Any, Any, nn.Module]:
    """A training by the engine, in 24 steps of Poisson batches, by `Step` or by a loop of Opacus' kind."""
    model, engine = make_model(), PrivacyEngine()
    x, y = make_batch(48)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, generator=torch.Generator().manual_seed(3))
    settings = {"noise_multiplier": 0.5, "noise_generator": torch.Generator().manual_seed(4), **options}
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, max_grad_norm=C,
        **settings,
    )  # fmt: skip
    STARTED.append(optimizer)
    step = Step(model, cross_entropy, optimizer, verify=3) if by_step else None
    for _ in range(epochs):
        batches: Any = loader
        if parts:
            batches = BatchMemoryManager(data_loader=loader, max_physical_batch_size=parts, optimizer=optimizer)
            batches = batches.__enter__()
        for batch in batches:
            if step is not None:
                step(batch)
            else:
                optimizer.zero_grad()
                cross_entropy(model, batch).mean().backward()
                optimizer.step()
    return engine, optimizer, model


@pytest.mark.parametrize(
    "options",
    [{}, {"parts": 2}, {"unit_ids": [i % 24 for i in range(48)]}, {"loss_reduction": "mean", "clipping": "automatic"}],
    ids=["samples", "parts of batches", "units", "automatic"],
)
def test_trains_as_the_loop_does(options: dict[str, Any]) -> None:
    engine, _, model = train(True, **options)
    other, _, expected = train(False, **options)
    torch.testing.assert_close(flatten(model.parameters()), flatten(expected.parameters()), rtol=1e-9, atol=1e-12)
    assert engine.get_epsilon(1e-5) == other.get_epsilon(1e-5) > 0


def test_a_step_goes_on_where_a_loop_has_ended() -> None:
    _, optimizer, model = train(False, epochs=1)
    step, loader = Step(model, cross_entropy, optimizer), start_loader(optimizer)
    before = flatten(model.parameters()).clone()
    for batch in loader:
        step(batch)
    assert not torch.equal(flatten(model.parameters()), before)


def start_loader(optimizer: Any) -> Any:
    x, y = make_batch(48)
    return hand_out_batches(DataLoader(TensorDataset(x, y), batch_size=4), optimizer)


def test_adaptive_bounds_follow_the_step() -> None:
    _, optimizer, _ = train(
        True, clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=10,
        min_clipbound=0.01, unclipped_num_std=1.0,
    )  # fmt: skip
    assert optimizer.max_grad_norm != C


# ---- attacks ----


def compute_sum(loss_fn: Any, steps_before: int, left_out: int | None, forward: Any = None) -> Tensor:
    """The private sum of a step of the model of the attacks, without one of the samples."""
    torch.manual_seed(0)
    model = Model(forward)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    step = make_step(model, loss_fn, inner, max_grad_norm=BOUND)
    try:
        for seed in range(steps_before):
            step(make_data(seed))
        x, y = make_data(steps_before)
        kept = [i for i in range(B) if i != left_out]
        step((x[kept], y[kept]))
        return flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    finally:
        step.optimizer.release()


def measure(loss_fn: Any, steps_before: int, forward: Any = None) -> float | None:
    """The largest change of the sum by one sample, in units of the bound; None if a step is refused."""
    try:
        whole = compute_sum(loss_fn, steps_before, None, forward)
        others = [compute_sum(loss_fn, steps_before, i, forward) for i in range(B)]
    except PerSampleError:
        return None
    return max(float((whole - other).norm()) for other in others) / BOUND


def change_losses(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return lambda model, batch: change((model(batch[0]).squeeze(1) - batch[1]).square(), batch[1])


def mix_by_numpy(losses: Tensor, y: Tensor) -> Tensor:
    return losses * torch.from_numpy(np.roll(losses.detach().numpy(), 1) + 1)


def hook_losses(losses: Tensor, y: Tensor) -> Tensor:
    factor = 5 - losses.detach().max()
    losses.register_hook(lambda gradient: gradient * factor)
    return losses


def hook_node(losses: Tensor, y: Tensor) -> Tensor:
    factor = 5 - losses.detach().numpy().max().item()
    losses.grad_fn.register_prehook(lambda gs: tuple(g * factor for g in gs))  # type: ignore[union-attr]
    return losses


FURTHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mean of the batch": lambda losses, y: losses * (5 - losses.detach().mean()),
    "a mean of the targets": lambda losses, y: losses * (5 - y.mean()),
    "the size of the batch": lambda losses, y: losses / len(losses),
    "another sample by numpy": mix_by_numpy,
    "ranks": lambda losses, y: losses * losses.detach().argsort(),
    "numbers of the samples": lambda losses, y: losses * torch.arange(len(losses)),
    "weights by a rank of lists": lambda losses, y: losses * torch.tensor([float(v == max(y.tolist())) for v in y]),
    "a sum": lambda losses, y: losses.sum().expand(len(losses)),
    "a hook of the losses": hook_losses,
    "a hook of a node": hook_node,
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", [*CHANGES, *FURTHER])
def test_no_loss_function_exceeds_the_bound(name: str, steps_before: int) -> None:
    change = measure(change_losses({**CHANGES, **FURTHER}[name]), steps_before)
    assert change is None or change <= ALLOWED


@pytest.mark.parametrize("name", ["nothing", "a log of numbers", "a weight of each sample"])
def test_harmless_loss_functions_are_accepted(name: str) -> None:
    seen: list[float] = []

    def change(losses: Tensor, y: Tensor) -> Tensor:
        if name == "a log of numbers":
            seen.append(losses.mean().item())
        return losses * (y + 1) if name == "a weight of each sample" else losses

    measured = measure(change_losses(change), 2)
    assert measured is not None and 0.5 < measured <= ALLOWED


class MixedBackward(torch.autograd.Function):
    """A copy whose backward gives each sample the gradient of another one."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(np.roll(gradient.numpy(), 1, 0).copy())


def mix_behind_gate(model: Any, h: Tensor) -> Tensor:
    return h + model.gate * torch.from_numpy(np.roll(h.detach().numpy(), 1, 0))


def mix_backward(model: Any, h: Tensor) -> Tensor:
    return MixedBackward.apply(h)


@pytest.mark.parametrize("code", [mix_behind_gate, mix_backward])
def test_gradients_that_are_mixed_behind_equal_outputs(code: Any) -> None:
    model = make_model(code)
    step = make_step(model, cross_entropy)
    with pytest.raises(PerSampleError):
        step(make_batch())


# ---- repeated verification ----


class Late:
    """Mixes samples from a pass on, in the model or in the loss, in a thread that no mode of torch sees."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, model: Any, h: Tensor) -> Tensor:
        def mix() -> None:
            h.data.add_(h.data.roll(1, 0) * float(self.is_on))

        thread = Thread(target=mix)
        thread.start()
        thread.join()
        return h


@pytest.mark.parametrize("verify", [1, 4])
@pytest.mark.parametrize("in_loss", [False, True])
def test_mixing_that_starts_later_is_caught(in_loss: bool, verify: int) -> None:
    late = Late()
    model = make_model(None if in_loss else late)
    loss_fn = (lambda m, b: late(m, m(b)).square().sum(1)) if in_loss else squares
    step = make_step(model, loss_fn, verify=verify)
    for seed in range(3):
        step(make_batch(6, seed)[0])
    late.is_on = True
    with pytest.raises(SamplesMixed):
        for seed in range(verify):
            step(make_batch(6, seed)[0])
    with pytest.raises(SamplesMixed):  # also if the loop goes on
        step(make_batch(6)[0])
    late.is_on = False
    step(make_batch(6)[0])


def test_the_verification_is_repeated_within_the_given_number_of_passes() -> None:
    model = make_model()
    calls: list[int] = []
    step = make_step(model, lambda m, x: (calls.append(len(x)), squares(m, x))[1], verify=5)
    marks = []
    for seed in range(60):
        calls.clear()
        step(make_batch(6, seed)[0])
        marks.append(len(calls) > 1)
    due = [i for i, mark in enumerate(marks) if mark]
    gaps = {b - a for a, b in pairwise(due)}
    assert marks[0] and max(gaps) <= 5 and len(gaps) > 1


# ---- what is refused changes nothing ----


def raise_error(model: Any, x: Tensor) -> Tensor:
    torch.rand(1), random.random(), np.random.rand()
    squares(model, x)
    raise ValueError("an error of the user")


def need_two(model: Any, x: Tensor) -> Tensor:
    if len(x) < 2 or torch.equal(x[0], x[1]):
        raise ValueError("two samples are needed")
    return squares(model, x)


REFUSED: dict[str, Any] = {
    "a mean": lambda m, x: squares(m, x).mean(),
    "logits": lambda m, x: m(x),
    "a number": lambda m, x: squares(m, x).sum().item(),
    "two losses of a sample": lambda m, x: squares(m, x).repeat(2),
    "some samples": lambda m, x: squares(m, x)[:3],
    "no gradient": lambda m, x: squares(m, x).detach(),
    "samples mixed": lambda m, x: squares(m, x) * squares(m, x).detach().mean(),
    "samples mixed by numpy": lambda m, x: mix_by_numpy(squares(m, x), x),
    "not verified": need_two,
    "an error": raise_error,
}


def read_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        "model": {name: t.clone() for name, t in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.original_optimizer.state_dict()),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # type: ignore[index]
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_changes_nothing(name: str) -> None:
    refused = False

    def loss_fn(model: Any, x: Tensor) -> Any:
        return REFUSED[name](model, x) if refused else squares(model, x)

    model = make_model(dropout=0.5)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    step = make_step(model, loss_fn, inner, verify=1, noise_multiplier=1.0)
    for seed in range(2):
        step(make_batch(6, seed)[0])
    before, refused = read_state(model, step.optimizer), True
    with pytest.raises((PerSampleError, ValueError)) as caught:
        step(make_batch()[0])
    assert isinstance(caught.value, PerSampleError) != (name == "an error")
    after = read_state(model, step.optimizer)
    if name == "an error":  # an error of the user's code: buffers are as the code left them
        after["model"]["calls"] = before["model"]["calls"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    refused = False
    step(make_batch()[0])


def test_a_step_above_the_budget_changes_nothing() -> None:
    model, engine = make_model(), PrivacyEngine()
    x, y = make_batch(48)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), max_grad_norm=C, steps=3, target_epsilon=2,
        target_delta=1e-5, data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
    )  # fmt: skip
    STARTED.append(optimizer)
    step, batches = Step(model, cross_entropy, optimizer), iter(loader)
    for _ in range(3):
        step(next(batches))
    before = read_state(model, optimizer)
    with pytest.raises(PerSampleError, match="target"):
        step(next(batches))
    after = read_state(model, optimizer)
    after["model"]["calls"] = before["model"]["calls"]  # the model has run
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_samples_that_are_not_finite_add_nothing() -> None:
    model, (x, _) = make_model(), make_batch()
    rows = compute_rows(model, squares, list(x[1:].split(1)))
    x[0] = float("inf")
    step = make_step(model, squares)
    step(x)
    torch.testing.assert_close(flatten(p.grad for p in model.parameters()), clip(rows))
    assert step.optimizer.nonfinite_count == 1


# ---- the step alone uses its optimizer, and a batch once ----


def test_a_backward_pass_outside_of_the_step_is_refused() -> None:
    model, (x, _) = make_model(), make_batch()
    step = make_step(model, squares)
    with pytest.raises(PerSampleError, match="outside of the private step"):
        squares(model, x).sum().backward()
    step(x)
    kept = squares(model, x)  # alive, and of the same size
    expected = clip(compute_rows(model, squares, list(x.split(1))))
    step(x)
    torch.testing.assert_close(flatten(p.grad for p in model.parameters()), expected)
    with torch.no_grad():
        model(x)
    step.optimizer.release()
    with pytest.raises(PerSampleError, match="released"):
        step(x)
    squares(model, x).sum().backward()
    del kept


def make_loader() -> tuple[Step, Any]:
    model, engine = make_model(), PrivacyEngine()
    loader = DataLoader(TensorDataset(*make_batch(48)), batch_size=12, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, noise_multiplier=0.0,
        max_grad_norm=C,
    )  # fmt: skip
    STARTED.append(optimizer)
    return Step(model, cross_entropy, optimizer), loader


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in another order by numpy": lambda x, y: (torch.from_numpy(x.numpy()[::-1].copy()), y),
    "in two orders": lambda x, y: (x.flip(0), y),
    "standardised": lambda x, y: (x - x.mean(0), y),
    "twice": lambda x, y: (torch.cat([x, x]), torch.cat([y, y])),
    "mixup": lambda x, y: (0.5 * x + 0.5 * x.roll(1, 0), y),
    "data from elsewhere": lambda x, y: make_batch(),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_must_be_one_of_the_loader(name: str) -> None:
    step, loader = make_loader()
    x, y = next(iter(loader))
    with pytest.raises(PerSampleError):
        step(BATCHES[name](x, y))
    step((x, y))


def test_functions_of_torch_may_prepare_a_batch() -> None:
    step, loader = make_loader()
    for x, y in loader:
        order = torch.randperm(len(x))
        step((x.float()[order].double() * 2, y[order]))


def test_a_batch_makes_one_step() -> None:
    step, loader = make_loader()
    batch = next(iter(loader))
    step(batch)
    with pytest.raises(PerSampleError, match="used for a step before"):
        step(batch)


@pytest.mark.parametrize("verify", [0, -1, True, "first", 2.0])
def test_wrong_numbers_of_passes(verify: Any) -> None:
    with pytest.raises(PerSampleError, match="verify must be a positive number"):
        make_step(make_model(), squares, verify=verify)


def test_the_model_and_the_optimizer_belong_together() -> None:
    step = make_step(make_model(), squares)
    with pytest.raises(PerSampleError, match="another model"):
        Step(make_model(), squares, step.optimizer)
    with pytest.raises(PerSampleError, match="not the private one"):
        Step(step.model, squares, step.optimizer.original_optimizer)  # type: ignore[arg-type]


# ---- losses of single samples ----


def test_a_loss_of_one_sample_gives_the_same_step() -> None:
    models = [make_model(), make_model()]
    steps = [
        Step(
            models[0],
            lambda model, sample: F.cross_entropy(model(sample[0]), sample[1]),
            start(models[0]),
            per_sample=True,
        ),
        make_step(models[1], cross_entropy),
    ]
    for count in (1, 6, 1, 6):
        losses = [step(make_batch(count, seed=count)) for step in steps]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*[list(model.parameters()) for model in models])
    with pytest.raises(PerSampleError, match="returns one number"):
        Step(models[0], lambda model, sample: model(sample[0]), start(models[0]), per_sample=True)(make_batch())


def start(model: nn.Module) -> PrivateOptimizer:
    for made in STARTED:
        if made.module is model:
            made.release()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    STARTED.append(
        PrivateOptimizer(
            inner, module=model, noise_multiplier=0.0, max_grad_norm=C, loss_reduction="sum", expected_batch_size=None
        )
    )
    return STARTED[-1]
