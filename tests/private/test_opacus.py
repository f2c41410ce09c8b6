"""Scripts for Opacus: each public argument and method works as there, or is refused in words."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError, record
from persample.private import BatchMemoryManager, PrivacyEngine, PrivateOptimizer
from persample.private.adaptive import AdaptiveOptimizer
from tests.support.modules import make_mlp

pytestmark = pytest.mark.filterwarnings("ignore")
STARTED: list[PrivateOptimizer] = []
ADAPTIVE = {
    "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0,
    "min_clipbound": 0.01, "unclipped_num_std": 2.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def release_optimizers() -> Iterator[None]:
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():  # Opacus sets flags of cudnn
        yield
    while STARTED:
        STARTED.pop().release()


def make_model(seed: int = 0) -> nn.Module:
    return make_mlp(6, 8, 3, seed=seed, dtype=torch.float32)


def make_loader(batch_size: int = 8) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=batch_size)


def start(engine: Any, module: nn.Module | None = None, **options: Any) -> tuple[Any, ...]:
    module = make_model() if module is None else module
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 0.3, "poisson_sampling": False, "data_loader": make_loader(),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1), **options,
    }  # fmt: skip
    found = engine.make_private(module=module, **settings)
    STARTED.extend(part for part in found if isinstance(part, PrivateOptimizer))
    return found


def train(model: Callable[[Tensor], Tensor], optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def flatten(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# ---- signatures ----


@pytest.mark.parametrize("name", [
    "make_private", "make_private_with_epsilon", "get_epsilon", "save_checkpoint", "load_checkpoint", "is_compatible",
    "validate", "get_compatible_module",
])  # fmt: skip
def test_arguments_of_the_engine(name: str) -> None:
    theirs = inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters
    ours = inspect.signature(getattr(PrivacyEngine, name)).parameters
    assert set(theirs) - {"kwargs"} <= set(ours)
    assert not any(p.kind is p.VAR_KEYWORD for p in ours.values())


def test_public_names_of_the_optimizer() -> None:
    _, optimizer, _ = start(PrivacyEngine())
    public = [name for name in dir(DPOptimizer) if not name.startswith("_")]
    refused = []
    for name in public:
        try:
            getattr(optimizer, name)
        except PerSampleError:
            refused.append(name)
    assert refused == ["grad_samples"]  # they were not asked for
    assert isinstance(optimizer, DPOptimizer)
    with pytest.raises(ValueError, match="step"):
        optimizer.add_noise()
    with pytest.raises(ValueError, match="step"):
        optimizer.scale_grad()


# ---- equal weights ----


def test_adapted_bounds_equal_those_of_opacus() -> None:
    weights, epsilons, bounds = [], [], []
    for kind in (PrivacyEngine, opacus.PrivacyEngine):
        engine = kind(accountant="rdp")
        model, optimizer, loader = start(engine, noise_generator=torch.Generator().manual_seed(3), **ADAPTIVE)
        for _ in range(2):
            train(model, optimizer, loader)
        weights.append(flatten(model))
        epsilons.append(engine.get_epsilon(1e-3))
        bounds.append(float(optimizer.max_grad_norm))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
    assert epsilons[0] == epsilons[1]
    assert bounds[0] == pytest.approx(bounds[1], abs=1e-5)
    assert bounds[0] != pytest.approx(0.3, abs=1e-3)


def test_no_op_mode_is_that_of_opacus() -> None:
    weights = []
    for kind in (PrivacyEngine, opacus.PrivacyEngine):
        module = make_model()
        generator = torch.Generator().manual_seed(3)
        _, optimizer, loader = start(kind(), module, grad_sample_mode="no_op", noise_generator=generator)
        for x, y in loader:
            optimizer.zero_grad()
            with record(module) as grads:
                F.cross_entropy(module(x), y).backward()
            for name, p in module.named_parameters():
                p.grad_sample = grads.dense(name)[name]
            optimizer.step()
        weights.append(flatten(module))
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match="normalize_clipping"):
        start(PrivacyEngine(), grad_sample_mode="no_op", normalize_clipping=True)


def test_normalized_gradients_are_divided_by_the_bound() -> None:
    grads = []
    for normalize in (False, True):
        model, optimizer, loader = start(PrivacyEngine(), noise_multiplier=0.0, normalize_clipping=normalize)
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(grads[0], grads[1] * 0.3)


# ---- adaptive clipping ----


@pytest.mark.parametrize("scale", [1e-3, 1e3, float("nan")], ids=["not clipped", "clipped", "not finite"])
def test_a_sample_changes_the_count_of_unclipped_samples_by_one_half(scale: float) -> None:
    """The noise of the gradients is chosen for this: see `AdaptiveOptimizer`."""
    torch.manual_seed(0)
    first = nn.Linear(4, 2)
    x = torch.randn(6, 4) * torch.tensor([1.0, 100.0, 1.0, 100.0, 1.0, scale])[:, None]
    counts = []
    for number in (5, 6):
        model = copy.deepcopy(first)
        optimizer = AdaptiveOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=0.0, max_grad_norm=1.0,
            expected_batch_size=8, loss_reduction="sum", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
            max_clipbound=10.0, min_clipbound=0.1, unclipped_num_std=1e-6,
        )  # fmt: skip
        STARTED.append(optimizer)
        model(x[:number]).square().sum().backward()
        optimizer.step()
        counts.append(optimizer.unclipped_num)
    assert abs(counts[1] - counts[0]) == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("last", [2.0, 2.5])
def test_a_sum_that_is_zero_counts_its_samples(last: float) -> None:
    """The values of `p.grad` depend on the samples, so that they must not decide whether a batch counts."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = AdaptiveOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), module=model, noise_multiplier=0.0, max_grad_norm=1.0,
        expected_batch_size=8, loss_reduction="sum", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
        max_clipbound=10.0, min_clipbound=0.1, unclipped_num_std=1e-6,
    )  # fmt: skip
    x = torch.tensor([0.25, -0.25, 0.5, -0.5, 0.125, -0.125, 2.0, -last])[:, None]
    model(x).sum().backward()
    assert model.weight.grad is not None and not model.weight.grad.any()
    optimizer.step()
    optimizer.release()
    assert abs(optimizer.unclipped_num - (4 + (6 - 2) / 2)) < 0.1


def test_adaptive_clipping_with_a_budget_and_split_batches() -> None:
    module, loader = make_model(), make_loader(16)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=loader, epochs=2,
        target_epsilon=8.0, target_delta=1e-3, max_grad_norm=0.3, **ADAPTIVE,
    )  # fmt: skip
    STARTED.append(optimizer)
    assert isinstance(optimizer, AdaClipDPOptimizer)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        for _ in range(2):
            train(model, optimizer, parts)
    assert 0 < engine.get_epsilon(1e-3) <= 8.0
    assert optimizer.max_grad_norm != 0.3


def test_split_batches_adapt_the_bound_as_whole_ones() -> None:
    bounds = []
    for size in (16, 3):
        model, optimizer, loader = start(
            PrivacyEngine(), data_loader=make_loader(16), noise_generator=torch.Generator().manual_seed(3), **ADAPTIVE
        )
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
            train(model, optimizer, parts)
        bounds.append(optimizer.max_grad_norm)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-4) != 0.3


@pytest.mark.parametrize("options, message", [
    ({"clipping": "adaptive"}, "requires target_unclipped_quantile"),
    ({"unclipped_num_std": 1.0}, "requires clipping='adaptive'"),
    ({**ADAPTIVE, "max_clipbound": 0.001}, "larger than min_clipbound"),
    ({**ADAPTIVE, "min_clipbound": 1e-30}, "squares of norms do not vanish"),
    ({**ADAPTIVE, "max_clipbound": float("inf")}, "max_clipbound finite"),
    ({**ADAPTIVE, "noise_multiplier": 4.0}, "smaller than 2"),
])  # fmt: skip
def test_wrong_arguments_of_adaptive_clipping(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(PrivacyEngine(), **options)


# ---- gradients of samples ----


@pytest.mark.parametrize(
    "options", [{"grad_samples": True}, {"grad_sample_mode": "hooks"}, {"grad_samples": True, "passes": 2}]
)
def test_gradients_of_samples_on_request(options: dict[str, Any]) -> None:
    rows = []
    for kind in (PrivacyEngine, opacus.PrivacyEngine):
        given = options if kind is PrivacyEngine else {}
        model, optimizer, loader = start(kind(), noise_multiplier=0.0, **given)
        for x, y in list(loader)[:2]:
            F.cross_entropy(model(x), y).backward()
        assert optimizer.accumulated_iterations == 2
        assert [len(p.grad_sample) for p in model.parameters()] == [2] * 4
        rows.append(torch.cat([rows.flatten(1) for rows in optimizer.grad_samples], 1))
        optimizer.step()
        rows.append(torch.cat([p.summed_grad.flatten() for p in model.parameters()]))
        optimizer.zero_grad()
        assert all(p.grad_sample is None for p in model.parameters())
    torch.testing.assert_close(rows[0], rows[2])
    torch.testing.assert_close(rows[1], rows[3])


def test_gradients_of_samples_without_request() -> None:
    model, optimizer, loader = start(PrivacyEngine())
    train(model, optimizer, loader)
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
    with pytest.raises(ValueError, match="grad_samples=True"):
        _ = optimizer.grad_samples
    _, optimizer, _ = start(PrivacyEngine(), grad_samples=True)
    with pytest.raises(ValueError, match="after backward"):
        _ = optimizer.grad_samples


# ---- the model ----


def test_the_model_inside_the_wrapper_is_the_model() -> None:
    model, optimizer, loader = start(PrivacyEngine())
    names = list(model.state_dict())
    assert model._module is model
    copied = copy.deepcopy(model)
    assert copied._module is copied
    train(model._module, optimizer, loader)
    assert list(model._module.state_dict()) == names


def test_a_submodule_of_that_name_stays() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._module = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self._module(x)

    model, *_ = start(PrivacyEngine(), Outer())
    assert isinstance(model._module, nn.Linear)


def test_without_a_wrapper_a_handle_ends_private_training() -> None:
    module = make_model()
    hooks, optimizer, loader = start(PrivacyEngine(), module, wrap_model=False, noise_multiplier=1e6)
    train(module, optimizer, loader)
    assert hooks._module is module
    assert flatten(module).abs().max() > 100
    hooks.cleanup()
    before = flatten(module)
    optimizer.zero_grad()
    module(torch.randn(5, 6)).mean().backward()
    optimizer.step()
    assert (flatten(module) - before).abs().max() < 1e6
    assert not module._forward_hooks


def test_unsupported_modules_raise_the_error_of_opacus() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d"):
        start(PrivacyEngine(), module)
    assert not PrivacyEngine().is_compatible(module=module, optimizer=None, data_loader=None)
    fixed = ModuleValidator.fix(module)
    assert PrivacyEngine().is_compatible(module=fixed, optimizer=None, data_loader=None)


class Sequences(nn.Module):
    """A recurrent layer and attention, which `ModuleValidator.fix` replaces by layers of Opacus."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.recurrent = kind(6, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(x)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_of_opacus(kind: Any) -> None:
    torch.manual_seed(0)
    module = ModuleValidator.fix(Sequences(kind))
    assert type(module.recurrent).__name__.startswith("DP")
    weights = []
    for engine in (PrivacyEngine(), opacus.PrivacyEngine()):
        torch.manual_seed(2)
        loader = DataLoader(TensorDataset(torch.randn(12, 5, 6), torch.randint(3, (12,))), batch_size=4)
        model, optimizer, loader = start(
            engine, copy.deepcopy(module), data_loader=loader, noise_generator=torch.Generator().manual_seed(3)
        )
        train(model, optimizer, loader)
        weights.append(flatten(model))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [DPRNN, DPLSTM, DPGRU])
def test_packed_sequences_in_layers_of_opacus(kind: Any, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = kind(4, 3, num_layers=2, batch_first=batch_first, bidirectional=True).double()
    samples = [torch.randn(length, 4, dtype=torch.float64) for length in (5, 3, 2, 4, 1)]

    def compute_loss(packed: Any) -> Tensor:
        padded, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
        return (padded.square() + padded).sum((1, 2)).sum()

    expected = []
    for sample in samples:
        grads = torch.autograd.grad(compute_loss(pack_sequence([sample])), list(model.parameters()))
        expected.append(torch.cat([grad.flatten() for grad in grads]))
    packed = pack_sequence(samples, enforce_sorted=False)
    with record(model, batch_dim=0 if batch_first else 1) as rows:
        compute_loss(packed).backward()
    found = torch.cat([part.flatten(1) for part in rows.dense().values()], 1)
    torch.testing.assert_close(found, torch.stack(expected))


# ---- data ----


def test_a_poisson_loader_of_opacus() -> None:
    loader = DPDataLoader.from_data_loader(make_loader(), generator=torch.Generator().manual_seed(5))
    for poisson_sampling in (True, False):
        model, optimizer, private = start(PrivacyEngine(), data_loader=loader, poisson_sampling=poisson_sampling)
        assert isinstance(private, DPDataLoader)
        assert private.sample_rate == loader.sample_rate
        train(model, optimizer, private)


def test_loading_data_between_forward_and_backward() -> None:
    """Samples of the size of the batch are stacked while a step runs: this is no part of the step."""
    data = [(torch.randn(8, 6), torch.randint(3, ())) for _ in range(32)]
    model, optimizer, loader = start(PrivacyEngine(), data_loader=DataLoader(data, batch_size=8))
    batches = iter(loader)
    x, y = next(batches)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).mean(1), y)
        x, y = next(batches)
        loss.backward()
        optimizer.step()


def test_models_that_were_dropped_in_the_middle_of_a_step() -> None:
    for _ in range(3):
        model, _, loader = start(PrivacyEngine())
        model(next(iter(loader))[0])  # without backward
        STARTED.clear()
        del model, loader


# ---- errors ----


def test_wrong_orders_of_calls_are_value_errors() -> None:
    model, _, loader = start(PrivacyEngine(), poisson_sampling=True)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="second backward"):
        F.cross_entropy(model(x), y).backward()
    model, optimizer, loader = start(PrivacyEngine())
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("options", [
    {"clipping": "none"}, {"grad_sample_mode": "none"}, {"loss_reduction": "none"}, {"max_grad_norm": [1.0]},
    {"clipping": "per_layer"},
])  # fmt: skip
def test_wrong_arguments_are_value_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        start(PrivacyEngine(), **options)


# ---- checkpoints ----


@pytest.mark.parametrize(
    "writer, reader", [(opacus.PrivacyEngine, PrivacyEngine), (PrivacyEngine, opacus.PrivacyEngine)]
)
def test_checkpoints_of_each_other(writer: Any, reader: Any, tmp_path: Path) -> None:
    engine = writer(accountant="rdp")
    model, optimizer, loader = start(engine)
    train(model, optimizer, loader)
    theirs = {"for_opacus": True} if writer is PrivacyEngine else {}
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer, **theirs)
    again = reader(accountant="rdp")
    loaded, optimizer, _ = start(again, make_model(seed=9))
    again.load_checkpoint(path=tmp_path / "file", module=loaded, optimizer=optimizer)
    assert torch.equal(flatten(loaded), flatten(model))
    assert again.get_epsilon(1e-3) == engine.get_epsilon(1e-3) > 0
    assert isinstance(loaded, GradSampleModule) == (reader is opacus.PrivacyEngine)


def test_checkpoints_keep_the_adapted_bound(tmp_path: Path) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = start(engine, **ADAPTIVE)
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    _, again, _ = start(engine, **ADAPTIVE)
    engine.load_checkpoint(path=tmp_path / "file", module=model, optimizer=again)
    assert again.max_grad_norm == optimizer.max_grad_norm != 0.3


def test_secure_mode_needs_its_package() -> None:
    with warnings.catch_warnings(), pytest.raises(ImportError, match="torchcsprng"):
        PrivacyEngine(secure_mode=True)


# What the optimizer of Opacus keeps and hands on, and nothing else: it knows no gradients.
HELD_BY_OPACUS = {
    "__init__", "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__repr__", "__firstlineno__",
    "__static_attributes__", "attach_step_hook", "signal_skip_step", "_check_skip_next_step", "params", "param_groups",
    "state", "defaults", "state_dict", "load_state_dict",
}  # fmt: skip


@pytest.mark.parametrize("kind", [PrivateOptimizer, AdaptiveOptimizer])
def test_no_gradient_passes_through_the_optimizer_of_opacus(kind: type) -> None:
    """Each method of Opacus that reads or changes gradients is replaced."""
    for base in kind.__mro__:
        if base.__module__.startswith("opacus."):
            for name in vars(base).keys() - HELD_BY_OPACUS:
                owner = next(owner for owner in kind.__mro__ if name in vars(owner))
                assert owner.__module__.startswith("persample."), name


def test_each_constructor_of_opacus_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[type] = []
    for base in (DPOptimizer, AdaClipDPOptimizer):
        original = base.__init__

        def count(self: Any, *args: Any, base: type = base, original: Any = original, **options: Any) -> None:
            calls.append(base)
            original(self, *args, **options)

        monkeypatch.setattr(base, "__init__", count)
    options = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0}
    options |= {"min_clipbound": 0.1, "unclipped_num_std": 2.0}
    _, optimizer, _ = start(PrivacyEngine(), clipping="adaptive", **options)
    assert calls == [AdaClipDPOptimizer, DPOptimizer]
    assert {name: getattr(optimizer, name) for name in options} == options
    start(PrivacyEngine())
    assert calls == [AdaClipDPOptimizer, DPOptimizer, DPOptimizer]
