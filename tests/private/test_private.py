"""Private training: the bound of a sample, equality with Opacus, and the documented behaviour around them."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus import schedulers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from persample import PerSampleError, SamplesMixed, record
from persample.private import BatchMemoryManager, PrivacyEngine, PrivateOptimizer
from persample.testing.oracle import compute_test_loss
from tests.support.case import Case
from tests.support.cases import STREAMED_CASES, B
from tests.support.modules import flatten_rows

pytestmark = pytest.mark.filterwarnings("ignore")
STARTED: list[PrivateOptimizer] = []

# What samples write into the model is refused: tests/private/test_isolation.py.
PRIVATE_CASES = [
    case for case in STREAMED_CASES if case.name not in ("embedding, max_norm", "instance norm, running statistics")
]


@pytest.fixture(autouse=True)
def release_optimizers() -> Iterator[None]:
    """Stop watching models at the end of each test, also after a failure."""
    yield
    while STARTED:
        STARTED.pop().release()


def make_optimizer(module: nn.Module, lr: float = 0.0, **options: Any) -> PrivateOptimizer:
    """Private optimizer without noise, which leaves the clipped sum in `grad`."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    settings: dict[str, Any] = {
        "noise_multiplier": 0.0, "max_grad_norm": 1.0, "loss_reduction": "sum", "poisson_sampling": False,
        "expected_batch_size": None, **options,
    }  # fmt: skip
    STARTED.append(PrivateOptimizer(torch.optim.SGD(trainable, lr=lr), module=module, **settings))
    return STARTED[-1]


def compute_private_sum(case: Case, module: nn.Module, args: Any, kwargs: Any, **options: Any) -> Tensor:
    recording = case.record_options
    recording.pop("loss_reduction")
    optimizer = make_optimizer(module, recording={**recording, **options.pop("recording", {})}, **options)
    optimizer.zero_grad()
    compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    optimizer.step()
    optimizer.release()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])  # type: ignore[union-attr]


# ---- the bound ----


@pytest.mark.parametrize("case", PRIVATE_CASES, ids=str)
def test_clipped_sums_equal_the_loop(case: Case) -> None:
    module, args, kwargs = case.build()
    batch = case.find_batch_size(args)
    rows = case.loop_gradients(copy.deepcopy(module), args, kwargs, batch)
    for name, p in module.named_parameters():
        if p.requires_grad and name not in rows:
            rows[name] = torch.zeros(batch, *p.shape).double()
    rows = {name: rows[name] for name, p in module.named_parameters() if p.requires_grad}
    norms = flatten_rows(rows).norm(dim=1)
    bound = float(norms.median()) / 2
    expected = (bound / norms.clamp(min=1e-300)).clamp(max=1) @ flatten_rows(rows)
    torch.testing.assert_close(
        compute_private_sum(case, module, args, kwargs, max_grad_norm=bound), expected, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("case", PRIVATE_CASES, ids=str)
def test_no_sample_contributes_more_than_the_bound(case: Case) -> None:
    """Single samples in float32, with a bound far below the norm of the gradient and one near it."""
    module, args, kwargs = case.build()
    if not is_dataclass(args[0]):
        module, (args, kwargs) = module.float(), pytree.tree_map(_to_float, (args, kwargs))
    own_batch = {"batch_size": 1} if "batch_size" in case.options else {}
    for n in range(case.find_batch_size(args)):
        own_args, own_kwargs = case.sample(n, args, kwargs)
        for bound in (1e-4, 1.0):
            total = compute_private_sum(case, module, own_args, own_kwargs, max_grad_norm=bound, recording=own_batch)
            assert total.double().norm() <= bound * (1 + 1e-5)


def _to_float(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.dtype == torch.float64
    return value.detach().float().requires_grad_(value.requires_grad) if floats else value


# ---- against Opacus ----


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 3),
    )  # fmt: skip


def make_words() -> nn.Module:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(9, 5), nn.LayerNorm(5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.table(x.abs().long() % 9)).mean(1))

    return Words()


def make_data(samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def make_private(engine: Any, module: nn.Module, **options: Any) -> tuple[Any, Any, Any]:
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.1, "poisson_sampling": False, **options}
    found = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(make_data(), batch_size=8),
        **settings,
    )
    if isinstance(found[1], PrivateOptimizer):
        STARTED.append(found[1])
    return found


def count_steps(engine: Any) -> int:
    """Number of steps that the accountant has counted."""
    return sum(steps for _, _, steps in engine.accountant.history)


def train(engine: Any, module: nn.Module, epochs: int = 1, **options: Any) -> nn.Module:
    model, optimizer, loader = make_private(engine, module, **options)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return module


@pytest.mark.parametrize("make", [make_mlp, make_cnn, make_words])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_gradients_equal_those_of_opacus(make: Any, clipping: str) -> None:
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    bound: Any = 0.1 if clipping == "flat" else [0.1 / (1 + i) for i, _ in enumerate(ours.parameters())]
    options = {"noise_multiplier": 0.0, "max_grad_norm": bound, "clipping": clipping}
    train(PrivacyEngine(), ours, **options)
    # Opacus sets flags of cudnn. torch's test utilities forbid that if another test has imported them.
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        train(opacus.PrivacyEngine(), theirs, **options)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_equals_that_of_opacus(accountant: str) -> None:
    epsilons = []
    for engine in (PrivacyEngine(accountant=accountant), opacus.PrivacyEngine(accountant=accountant)):
        torch.manual_seed(0)
        train(engine, make_mlp(), epochs=2, poisson_sampling=True)
        epsilons.append(engine.get_epsilon(1e-3))
        assert count_steps(engine) == 12
    assert epsilons[0] == epsilons[1] > 0


def test_noise_equals_that_of_opacus() -> None:
    """With the same generator, both engines draw the same noise: runs agree up to the rounding of the sums."""
    results = []
    for engine in (PrivacyEngine(), opacus.PrivacyEngine()):
        torch.manual_seed(0)
        results.append(train(engine, make_mlp(), noise_generator=torch.Generator().manual_seed(7)))
    for a, b in zip(*(result.parameters() for result in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_noise_in_blocks_equals_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is drawn in blocks equals the noise of one call."""
    monkeypatch.setattr("persample.private.noise._CHUNK", 64)
    monkeypatch.setattr("persample.private.noise._MIN_THREADED", 0)
    module = nn.Linear(37, 5)
    optimizer = make_optimizer(module, noise_multiplier=1.5, generator=torch.Generator().manual_seed(7))
    optimizer.step()
    generator = torch.Generator().manual_seed(7)
    for p in module.parameters():
        assert torch.equal(p.grad, torch.normal(0, 1.5, p.shape, generator=generator))  # type: ignore[arg-type]


def test_noise_for_a_target_epsilon() -> None:
    multipliers = []
    for engine in (PrivacyEngine(), opacus.PrivacyEngine()):
        module = make_mlp()
        _, optimizer, _ = engine.make_private_with_epsilon(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(make_data(), batch_size=8), target_epsilon=3.0, target_delta=1e-3, epochs=4,
            max_grad_norm=1.0,
        )  # fmt: skip
        multipliers.append(optimizer.noise_multiplier)
        if isinstance(optimizer, PrivateOptimizer):
            STARTED.append(optimizer)
    assert multipliers[0] == multipliers[1] > 0


def test_variance_of_the_private_gradient() -> None:
    """Around the clipped sum, coordinates are independent with variance (noise_multiplier * max_grad_norm)²."""
    torch.manual_seed(0)
    module = nn.Linear(40, 25)
    x = torch.randn(4, 40)
    sigma, bound, draws = 1.3, 0.7, []
    clipped = make_optimizer(module, max_grad_norm=bound)
    module(x).square().sum().backward()
    clipped.step()
    mean = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    clipped.release()
    optimizer = make_optimizer(module, max_grad_norm=bound, noise_multiplier=sigma)
    for _ in range(400):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        draws.append(torch.cat([p.grad.flatten() for p in module.parameters()]))  # type: ignore[union-attr]
    noise = torch.stack(draws) - mean
    deviation = sigma * bound
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(noise.numel())
    assert noise.var() == pytest.approx(deviation**2, rel=0.02)
    assert noise.var(0).min() > 0.6 * deviation**2 and noise.var(0).max() < 1.6 * deviation**2
    correlation = torch.corrcoef(noise[:, :50].T) - torch.eye(50)
    assert correlation.abs().max() < 6 / math.sqrt(len(noise))


# ---- clipping ----


def compute_rows(module: nn.Module, x: Tensor) -> Tensor:
    with record(module, loss_reduction="sum") as grads:
        module(x).square().sum().backward()
    return flatten_rows(grads.dense())


def test_automatic_clipping() -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(B, 6)
    rows = compute_rows(module, x)
    optimizer = make_optimizer(module, clipping="automatic", max_grad_norm=0.3)
    module(x).square().sum().backward()
    optimizer.step()
    expected = (0.3 / (rows.norm(dim=1) + 0.01)) @ rows
    found = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("passes", [1, 2])
def test_two_passes(passes: int) -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(B, 6)
    rows = compute_rows(module, x)
    optimizer = make_optimizer(module, max_grad_norm=0.3, recording={"passes": passes})
    module(x).square().sum().backward()
    optimizer.step()
    found = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, (0.3 / rows.norm(dim=1)).clamp(max=1) @ rows)


@pytest.mark.parametrize("clipping, bound, message", [
    ("per_layer", 0.1, "one bound for each of the 4"),
    ("per_layer", [0.1, 0.2], "one bound for each of the 4"),
    ("flat", [0.1] * 4, "clipping='flat' requires one number as max_grad_norm"),
    ("flat", -1.0, "must be positive"),
])  # fmt: skip
def test_wrong_bounds(clipping: str, bound: Any, message: str) -> None:
    with pytest.raises(PerSampleError, match=message):
        make_optimizer(make_mlp(), clipping=clipping, max_grad_norm=bound)


# ---- the model is not changed ----


def test_model_is_not_wrapped() -> None:
    module = make_mlp()
    keys, hooks = list(module.state_dict()), len(module._forward_hooks)
    model, optimizer, loader = make_private(PrivacyEngine(), module)
    assert model is module and type(model) is nn.Sequential
    trained_on = 0
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        trained_on += len(x)
    assert trained_on == 48
    assert list(model.state_dict()) == keys
    copy.deepcopy(model.state_dict())
    optimizer.release()
    assert len(module._forward_hooks) == hooks and not module._forward_pre_hooks
    model(torch.randn(2, 6)).sum().backward()


def test_ghost_mode_returns_a_criterion() -> None:
    module = make_words()
    model, optimizer, criterion, _ = make_private(
        PrivacyEngine(), module, grad_sample_mode="ghost", noise_multiplier=0.0, criterion=nn.CrossEntropyLoss()
    )
    x, y = make_data()[:5]
    criterion(model(x), y).backward()
    optimizer.step()
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, -100])
    each = [F.cross_entropy(logits[:3], labels[:3]), F.cross_entropy(logits[3:4], labels[3:4])]
    torch.testing.assert_close(criterion(logits, labels, shape=(2, 3, 4)), torch.stack(each).mean())
    assert criterion.criterion.reduction == "mean"


# ---- batches ----


@pytest.mark.parametrize("poisson", [False, True])
def test_split_batches_make_the_same_steps(poisson: bool) -> None:
    """BatchMemoryManager: steps of split batches equal steps of whole batches."""
    results = []
    for most in (100, 3):
        torch.manual_seed(0)
        module = make_mlp()
        model, optimizer, loader = make_private(
            PrivacyEngine(), module, poisson_sampling=poisson, noise_generator=torch.Generator().manual_seed(7)
        )
        torch.manual_seed(1)
        steps = 0
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer) as parts:
            for x, y in parts:
                assert len(x) <= most
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
        results.append((module, steps))
    assert results[1][1] > results[0][1]
    for a, b in zip(*(module.parameters() for module, _ in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_empty_batches_add_noise() -> None:
    torch.manual_seed(0)
    module, engine = make_mlp(), PrivacyEngine(accountant="rdp")
    found = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(make_data(12), batch_size=1),
    )  # fmt: skip
    model, optimizer, loader = found
    STARTED.append(optimizer)
    sizes = []
    for x, y in loader:
        before = module[0].weight.detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
        assert bool((module[0].weight != before).all())  # an empty batch adds noise as well
    assert 0 in sizes and count_steps(engine) == len(sizes) == 12


def test_batches_are_added_up_without_poisson_sampling() -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(4, 6)
    rows = compute_rows(module, x)
    optimizer = make_optimizer(module, max_grad_norm=0.3, loss_reduction="mean", expected_batch_size=2)
    for part in x.split(2):
        (module(part).square().sum() / 2).backward()
    assert optimizer.accumulated_iterations == 2
    optimizer.step()
    found = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, (0.3 / rows.norm(dim=1)).clamp(max=1) @ rows / 4)
    optimizer.release()
    optimizer = make_optimizer(module, poisson_sampling=True)
    module(x).sum().backward()
    with pytest.raises(PerSampleError, match="A second backward pass before step"):
        module(x).sum().backward()


# ---- refusals ----


def test_batch_norm_is_refused_by_name_and_can_be_replaced() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8), nn.LSTM(8, 3)))
    with pytest.raises(SamplesMixed, match=re.escape("'1.0' (BatchNorm1d)")):
        make_private(PrivacyEngine(), module)
    assert not PrivacyEngine().is_compatible(module=module)
    fixed = PrivacyEngine.get_compatible_module(module)
    assert isinstance(fixed[1][0], nn.GroupNorm) and type(fixed[1][1]) is nn.LSTM
    assert isinstance(module[1][0], nn.BatchNorm1d)
    assert PrivacyEngine().is_compatible(module=fixed)
    PrivacyEngine().validate(module=module.eval())
    assert isinstance(PrivacyEngine.get_compatible_module(nn.BatchNorm2d(8)), nn.GroupNorm)
    with pytest.raises(SamplesMixed, match="InstanceNorm1d"):
        PrivacyEngine().validate(module=nn.InstanceNorm1d(3, track_running_stats=True))


def test_mixed_samples_are_refused_at_the_first_step() -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(B, 6)
    before = copy.deepcopy(module.state_dict())
    optimizer = make_optimizer(module, lr=0.1, noise_multiplier=1.0)
    out = module(x)
    with pytest.raises(SamplesMixed, match="samples of the batch are mixed"):
        F.cross_entropy(out @ out.T, torch.arange(B)).backward()
    with pytest.raises(SamplesMixed, match="penalty on the weights"):
        (module(x).square().sum() + module[0].weight.square().sum()).backward()
    with pytest.raises(PerSampleError, match="not recorded"):
        module[2](torch.randn(B, 16)).sum().backward()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], module[0].weight)


class Centred(nn.Linear):
    """Mixes samples through numbers that leave torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean().item())


def test_samples_that_mix_out_of_sight_are_refused_at_the_first_step() -> None:
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=16)
    for verify, refused in ((None, True), ("first", True), (False, False)):
        model = nn.Sequential(nn.Linear(4, 4), Centred(4, 2))
        model.register_forward_hook(lambda *args: None)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            **({} if verify is None else {"verify": verify}),
        )
        STARTED.append(optimizer)
        x, y = next(iter(loader))
        try:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert not refused
        except SamplesMixed as error:
            assert refused and "'1' (Centred)" in str(error)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="different than optimizer Parameters"):
        PrivacyEngine().make_private(
            module=make_mlp(), optimizer=torch.optim.SGD(make_mlp().parameters(), lr=0.1), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(make_data(), batch_size=8),
        )  # fmt: skip
    with pytest.raises(PerSampleError, match="grad_sample_mode"):
        make_private(PrivacyEngine(), make_mlp(), grad_sample_mode="ghost_tp")
    with pytest.raises(PerSampleError, match="clipping must be"):
        make_private(PrivacyEngine(), make_mlp(), clipping="ghost")
    with pytest.raises(PerSampleError, match="do not belong to the module"):
        PrivateOptimizer(
            torch.optim.SGD(make_mlp().parameters(), lr=0.1), module=make_mlp(), noise_multiplier=1.0,
            max_grad_norm=1.0, expected_batch_size=8,
        )  # fmt: skip


# ---- further ways of training ----


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers_with_schedulers(make: Any) -> None:
    torch.manual_seed(0)
    module = make_mlp()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=module, optimizer=make(module.parameters(), lr=0.01), data_loader=DataLoader(make_data(), batch_size=8),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    STARTED.append(optimizer)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    noise = schedulers.ExponentialNoise(optimizer, gamma=0.5)
    clip = schedulers.ExponentialGradClip(optimizer, gamma=0.5)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for scheduler in (rate, noise, clip):
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0025
    assert optimizer.noise_multiplier == 0.25 and optimizer.max_grad_norm == 0.25
    assert optimizer.arrivals._make_options()["max_norm"] == 0.25
    assert len(engine.accountant.history) > 1  # the accountant has noticed that the noise changed


def test_scheduled_bounds_per_layer() -> None:
    optimizer = make_optimizer(make_mlp(), clipping="per_layer", max_grad_norm=[3.0, 4.0, 12.0, 84.0])
    assert optimizer.max_grad_norm == 85
    optimizer.max_grad_norm = 42.5
    assert list(optimizer.arrivals._make_options()["max_norm"].values()) == [1.5, 2, 6, 42]


class Adapted(nn.Module):
    """Frozen layer with a low-rank update, as in LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def test_frozen_layers_and_adapters() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Adapted(nn.Linear(6, 8)), nn.Tanh(), Adapted(nn.Linear(8, 3)))
    frozen = module[0].layer.weight.clone()
    x = torch.randn(B, 6)
    rows = compute_rows(module, x)
    optimizer = make_optimizer(module, lr=0.1, max_grad_norm=0.2)
    module(x).square().sum().backward()
    optimizer.step()
    found = torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])  # type: ignore[union-attr]
    torch.testing.assert_close(found, (0.2 / rows.norm(dim=1)).clamp(max=1) @ rows)
    assert torch.equal(frozen, module[0].layer.weight)


def test_autocast() -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(B, 6)
    sums = []
    for enabled in (False, True):
        optimizer = make_optimizer(module, max_grad_norm=0.2)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = module(x).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.release()
        sums.append(torch.cat([p.grad.flatten() for p in module.parameters()]))  # type: ignore[union-attr]
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) < 0.05


def test_zero_grad_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(B, 6)
    rows = compute_rows(module, x)
    optimizer = make_optimizer(module, max_grad_norm=0.3)
    for _ in range(2):
        loss = module(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, (0.3 / rows.norm(dim=1)).clamp(max=1) @ rows)


def test_backward_without_zero_grad_is_refused() -> None:
    module, x = make_mlp(), torch.randn(B, 6)
    optimizer = make_optimizer(module)
    module(x).square().sum().backward()
    optimizer.step()
    with pytest.raises(PerSampleError, match="zero_grad"):
        module(x).square().sum().backward()
    module.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


def test_closure() -> None:
    torch.manual_seed(0)
    module, x = make_mlp(), torch.randn(B, 6)
    optimizer = make_optimizer(module, lr=0.1)
    before = module[0].weight.clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not torch.equal(before, module[0].weight)


def test_engine_of_opacus_with_recorded_rows() -> None:
    """Engine of Opacus with grad_sample from persample, as in docs/private.md."""
    torch.manual_seed(0)
    ours, theirs = make_mlp(), make_mlp()
    theirs.load_state_dict(ours.state_dict())
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.1}
    train(PrivacyEngine(), ours, **settings)
    model, optimizer, loader = make_private(opacus.PrivacyEngine(), theirs, grad_sample_mode="no_op", **settings)
    for x, y in loader:
        optimizer.zero_grad()
        with record(model) as grads:
            F.cross_entropy(model(x), y).backward()
        rows = grads.dense()
        for name, p in model.named_parameters():
            p.grad_sample = rows[name]
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# ---- checkpoints ----


@pytest.mark.parametrize("own_generator", [False, True])
def test_resumed_run_continues_with_new_noise(own_generator: bool, tmp_path: Path) -> None:
    """A resumed run has the weights, optimizer state and budget of the run before, but never its noise."""
    path = tmp_path / "checkpoint.pt"
    x, y = make_data()[:8]

    def begin() -> tuple[Any, ...]:
        torch.manual_seed(0)
        module, engine = make_mlp(), PrivacyEngine(accountant="rdp")
        generator = torch.Generator().manual_seed(5) if own_generator else None
        found = engine.make_private(
            module=module, optimizer=torch.optim.Adam(module.parameters(), lr=0.01), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(make_data(), batch_size=8), noise_generator=generator,
        )  # fmt: skip
        STARTED.append(found[1])
        return module, engine, found[1]

    def steps(module: nn.Module, optimizer: Any, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()

    module, engine, optimizer = begin()
    steps(module, optimizer, 3)
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()["state"]))
    steps(module, optimizer, 4)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint.pt"}

    again, new_engine, new_optimizer = begin()
    new_engine.load_checkpoint(path=path, module=again, optimizer=new_optimizer)
    assert count_steps(new_engine) == 3
    torch.testing.assert_close((again.state_dict(), new_optimizer.state_dict()["state"]), saved, rtol=0, atol=0)
    steps(again, new_optimizer, 4)
    assert count_steps(new_engine) == 7
    assert new_engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3)
    assert not any(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    assert list(torch.load(path, weights_only=False)["module_state_dict"]) == list(make_mlp().state_dict())


def test_failed_checkpoint_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    module = make_mlp()
    _, optimizer, _ = make_private(engine := PrivacyEngine(), module)
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
    whole = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        engine.save_checkpoint(path=path, module=module, checkpoint_dict={"what": lambda: None})
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


# ---- copies of the model ----


def load_saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": load_saved,
    "AveragedModel": lambda module: AveragedModel(module).module,
}


@pytest.mark.parametrize("stage", ["start", "forward", "backward", "step"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_model_in_private_training_is_an_ordinary_model(name: str, stage: str) -> None:
    module, x = make_mlp(), torch.randn(4, 6)
    optimizer = make_optimizer(module, lr=0.1)
    if stage != "start":
        loss = module(x).square().sum()
        if stage != "forward":
            loss.backward()
        if stage == "step":
            optimizer.step()
    made = COPIES[name](module)
    plain = make_mlp()
    plain.load_state_dict(module.state_dict())
    for model in (made, plain):
        model.zero_grad()
        model(x).square().sum().backward()
    for p, q in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    if stage == "forward":
        loss.backward()  # of the private model, which goes on
    if stage in ("forward", "backward"):
        optimizer.step()
    assert not torch.equal(next(module.parameters()), next(made.parameters())) or stage in ("start", "step")


def test_averaged_weights_follow_private_training() -> None:
    module, x = make_mlp(), torch.randn(4, 6)
    optimizer, averaged = make_optimizer(module, lr=0.1), AveragedModel(module)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(module)
        seen.append([p.detach().clone() for p in module.parameters()])
        averaged(x)
    for i, p in enumerate(averaged.module.parameters()):
        torch.testing.assert_close(p, torch.stack([parameters[i] for parameters in seen]).mean(0))


# ---- loaders and bounds ----


@pytest.mark.parametrize("make, message", [
    (lambda data: DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(10))), "SubsetRandomSampler"),
    (lambda data: DataLoader(data, batch_size=8, sampler=WeightedRandomSampler([1.0] * 48, 48)), "WeightedRandom"),
    (lambda data: DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), "The list of the loader selects"),
    (lambda data: DataLoader(data, batch_size=None), "batch_size=None"),
    (lambda data: [data.tensors], "must be a DataLoader"),
])  # fmt: skip
def test_loaders_that_poisson_sampling_would_ignore(make: Any, message: str) -> None:
    module = make_mlp()
    with pytest.raises(PerSampleError, match=message):
        PrivacyEngine().make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), data_loader=make(make_data()),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


@pytest.mark.parametrize("bound", [0.0, 1e-20, 1e-30, float("nan"), float("inf"), [1.0, 1.0, 1.0, 1e-25]])
def test_bounds_whose_squares_vanish_are_refused(bound: Any) -> None:
    clipping = "per_layer" if isinstance(bound, list) else "flat"
    with pytest.raises(PerSampleError, match="at least 1e-15"):
        make_private(PrivacyEngine(), make_mlp(), max_grad_norm=bound, clipping=clipping)
