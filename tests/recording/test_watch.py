"""watch(): steps without a block equal recordings, and restore the state."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from persample import PerSampleError, SamplesMixed, Watch, record
from persample import watch as watch_
from persample.testing.oracle import assert_rows_close, compute_test_loss, loop_gradients
from tests.support.case import Case
from tests.support.cases import CASES, B, Calls, D
from tests.support.modules import read_state

pytestmark = pytest.mark.quick

STARTED: list[Watch] = []


def watch(*args: Any) -> Watch:
    STARTED.append(watch_(*args))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def stop_watches() -> Iterator[None]:
    """Stop all watches, also after a test that failed."""
    yield
    while STARTED:
        STARTED.pop().stop()


SOME_CASES = [case for i, case in enumerate(CASES) if i % 4 == 0 or "checkpoint" in case.name]


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_steps_equal_a_recording(case: Case) -> None:
    module, args, kwargs = case.build()
    with record(module, **case.record_options) as grads:
        compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    expected, found = grads.dense(), []
    watched = watch(module, lambda grads: found.append(grads.dense()), case.record_options)
    for _ in range(2):
        compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    watched.stop()
    assert len(found) == 2
    for rows in found:
        for name, row in rows.items():
            assert torch.equal(row, expected[name]) or "dropout" in case.name
    assert not _get_current_function_mode_stack()


def make_small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(B, D)


def compute_norms(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    with record(model, loss_reduction="sum", **options) as grads:
        model(x).square().sum().backward()
    return grads.norms()


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_end_in_any_order() -> None:
    """A mode around the call of the model ends before the step does."""
    model, x = make_small()
    found: list[Tensor] = []
    watched = watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"})
    for mode in (Counting(), torch.device("cpu")):
        with mode:
            output = model(x)
        with Counting() as counting:
            loss = output.square().sum()
        assert counting.calls
        with torch.device("cpu"):
            loss.backward()
    watched.stop()
    assert not _get_current_function_mode_stack()
    expected = compute_norms(model, x)
    assert len(found) == 2
    for norms in found:
        torch.testing.assert_close(norms, expected)


def test_default_device() -> None:
    model, x = make_small()
    watched = watch(model, lambda grads: None, {})
    torch.set_default_device("cpu")
    try:
        loss = model(x).square().sum()
        torch.set_default_device("cpu")
        loss.backward()
    finally:
        torch.set_default_device(None)
    watched.stop()
    assert not _get_current_function_mode_stack()


def test_calls_in_one_loss_are_one_step() -> None:
    model, x = make_small()
    other = torch.randn(B, D)
    found: list[Tensor] = []
    watched = watch(model, lambda grads: found.append(grads.norms()), {"keep": "clip", "max_norm": 1.0})
    (model(x) - model(other)).square().sum(1).mean().backward()
    watched.stop()
    with record(model) as grads:
        (model(x) - model(other)).square().sum(1).mean().backward()
    torch.testing.assert_close(found, [grads.norms()])


def test_calls_without_a_backward_pass_are_dropped() -> None:
    model, x = make_small()
    found: list[Tensor] = []
    watched = watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"})
    model(x)
    model(x[:2])
    with torch.no_grad():
        model(x)
    model(x).square().sum().backward()
    watched.stop()
    torch.testing.assert_close(found, [compute_norms(model, x)])


@pytest.mark.parametrize("size", [2, 5])
def test_a_call_without_a_backward_pass_is_freed(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x, hidden, found = torch.randn(5, 3), list[ref[Tensor]](), list[Tensor]()
    model[3].register_forward_hook(lambda module, args, output: hidden.append(ref(output)))
    with watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"}):
        for _ in range(3):  # later calls repeat the effects of the first
            model(x).square().sum().backward()
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            hidden.clear()
            model(x)
            assert hidden[0]() is None
        finally:
            gc.enable() if is_enabled else None
        model(x[:size]).square().sum().backward()
    torch.testing.assert_close(found[-1], compute_norms(model, x[:size]))


@pytest.mark.parametrize("keeps_loss", [False, True])
def test_a_finished_step_keeps_no_activations(keeps_loss: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x, hidden = torch.randn(5, 3), list[ref[Tensor]]()
    model[3].register_forward_hook(lambda module, args, output: hidden.append(ref(output)))
    with watch(model, lambda grads: None, {"loss_reduction": "sum", "keep": "norms"}):
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            if not keeps_loss:
                del loss
        gc.collect()
        assert hidden[-1]() is None


def test_a_watch_that_is_alive_at_the_end_of_the_interpreter() -> None:
    program = """
        import sys, persample, torch
        model = torch.nn.Linear(3, 2)
        watched = persample.watch(model, lambda grads: None)
        model(torch.randn(5, 3)).square().mean().backward()
        module = sys.modules[type(watched).__module__]
        module.kept, module.sys = watched, None  # as the interpreter leaves modules when it ends
    """
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_a_second_call_with_some_samples_of_the_batch() -> None:
    model, x = make_small()
    found: list[Any] = []
    watched = watch(model, found.append)
    (model(x).sum() + model(x[:2]).square().sum()).backward()
    watched.stop()
    rows = []
    for n in range(len(x)):
        loss = model(x[n : n + 1]).sum() + (n < 2) * model(x[n : n + 1]).square().sum()
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    expected = {name: torch.stack([row[i] for row in rows]) for i, (name, _) in enumerate(model.named_parameters())}
    assert_rows_close(found[0].dense(), expected, 1e-5)


def test_one_loss_of_two_batches_is_refused() -> None:
    model, x = make_small()
    other = x[:2].clone()
    watched = watch(model, lambda grads: None, {"keep": "clip", "max_norm": 1.0})
    loss = model(x).sum() + model(other).sum()
    with pytest.raises(SamplesMixed, match="made a tensor of shape \\(\\) without a torch function"):
        loss.backward()
    late = model(x).sum()
    watched.rest()
    with pytest.raises(PerSampleError, match="Compute a loss from one batch only"):
        late.backward()
    watched.stop()


@pytest.mark.parametrize("passes", [1, 2])
def test_empty_batch(passes: int) -> None:
    model, x = make_small()
    found: list[dict[str, Tensor]] = []
    options = {"keep": "clip", "max_norm": 1.0, "passes": passes}
    watched = watch(model, lambda grads: found.append(grads.clip()), options)
    model(x[:0]).square().mean().backward()
    model(x).square().mean().backward()
    watched.stop()
    assert len(found) == 2
    assert not any(part.any() for part in found[0].values())
    assert all(part.any() for part in found[1].values())


def test_ordinary_gradients_are_refused() -> None:
    model, x = make_small()
    found: list[Any] = []
    watched = watch(model, found.append, {})
    with pytest.raises(PerSampleError, match="receives a gradient from a use that was not recorded"):
        model[2].forward(torch.randn(B, 6)).sum().backward()
    (model(x).sum() + model[0].weight.square().sum()).backward()
    torch.testing.assert_close(found[0].shared()["0.weight"], 2 * model[0].weight.detach())
    watched.stop()
    model[0].weight.square().sum().backward()


def test_errors_restore_the_state() -> None:
    model = Calls(lambda m, x, wrong: m.b(x @ x) if wrong else m.a(x), a=nn.Linear(D, D), b=nn.BatchNorm1d(D))
    x = torch.randn(B, D)
    before = read_state(model)
    found: list[Tensor] = []
    watched = watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"})
    with pytest.raises(RuntimeError):
        model(x, True)  # shapes that do not match
    mixed = Calls(lambda m, x: m.a(x - x.mean(0)), a=nn.Linear(D, D))
    other = watch(mixed, lambda grads: None, {})
    with pytest.raises(SamplesMixed):
        mixed(x)
    other.stop()
    output = model(x, False)
    with pytest.raises(SamplesMixed):
        (output @ output.T).softmax(0).sum().backward()
    model(x, False).square().sum().backward()
    watched.stop()
    assert len(found) == 1
    assert not _get_current_function_mode_stack()
    assert str(read_state(model)) == str(before)


def test_options_are_read_for_each_step() -> None:
    model, x = make_small()
    bounds, found = [1e-3, 1e-5], []
    watched = watch(
        model, lambda grads: found.append(grads.clip()), lambda: {"keep": "clip", "max_norm": bounds[len(found)]}
    )
    for _ in range(2):
        F.mse_loss(model(x), torch.zeros(B, 3)).backward()
        watched.rest()
    watched.stop()
    sizes = [torch.cat([part.flatten() for part in clipped.values()]).norm() for clipped in found]
    torch.testing.assert_close(sizes[0] / sizes[1], torch.tensor(100.0))


def test_refused_step_restores_buffers_and_rng() -> None:
    def forward(m: Any, x: Tensor, mixes: bool) -> Tensor:
        m.count.add_(1)
        h = F.dropout(x, 0.5)
        return m.a(h - h.mean(0) if mixes else h)

    model, x = Calls(forward, a=nn.Linear(D, D), count=torch.zeros(1)), torch.randn(B, D)
    watch(model, lambda grads: None, {})
    model(x, False).sum().backward()
    before, numbers = model.count.clone(), torch.get_rng_state()
    with pytest.raises(SamplesMixed):
        model(x, True)
    assert torch.equal(model.count, before) and torch.equal(torch.get_rng_state(), numbers)
    out = model(x, False)
    with pytest.raises(SamplesMixed):
        (out - out.mean(0)).square().sum().backward()
    assert torch.equal(model.count, before) and torch.equal(torch.get_rng_state(), numbers)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.layer, self.head = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).tanh())  # type: ignore[no-any-return]


OLD = torch.rand(5, 4).double()

EARLY_PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "L2": lambda m: m.layer.weight.square().sum() + m.items.weight.abs().sum(),
    "pretrained weights": lambda m: (OLD * (m.layer.weight - OLD) ** 2).sum() + (m.layer.weight - OLD).norm(),
    "orthogonal": lambda m: (m.layer.weight.T @ m.layer.weight - torch.eye(4).double()).square().sum(),
    "found in weights": lambda m: m.layer.weight.max(0)[0].sum() + m.layer.weight.topk(2, 0)[0].sum(),
    "masks of weights": lambda m: m.layer.weight.relu().sum() + m.layer.weight.where(m.layer.weight > 0, 0).sum(),
    "logsumexp": lambda m: m.layer.weight.exp().logsumexp(0).sum() + torch.linalg.matrix_norm(m.layer.weight, 2),
}
EARLY_LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.layer.weight).square().sum(),
    "transposed": lambda m, x: (m.layer.weight @ x.T).square().sum(),
    "embedding": lambda m, x: F.embedding((x[:, 0] > 0).long(), m.items.weight).sum(),
    "index": lambda m, x: m.items.weight[(x[:, 0] > 0).long()].square().mean(),
    "product": lambda m, x: (x[:, :1] * m.head.weight[0]).square().sum(),
}


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_what_uses_weights_before_the_first_call(batch: int) -> None:
    """A penalty on the weights belongs to no sample. What was computed from samples has rows that nobody saw."""
    model, x = Recommender().double(), torch.randn(batch, 4).double()
    found: list[Any] = []
    expected = loop_gradients(model, x, lambda model, x: model(x).square().sum())
    expected["items.weight"] = torch.zeros(batch, 7, 4).double()
    for compute in EARLY_PENALTIES.values():
        (shared,) = torch.autograd.grad(compute(model), model.layer.weight)
        with watch(model, found.append):
            early = compute(model)
            (model(x).square().sum() + early).backward()
        assert_rows_close({"items.weight": expected["items.weight"], **found[-1].dense()}, expected)
        torch.testing.assert_close(found[-1].shared()["layer.weight"], shared)
    for compute_loss in EARLY_LOSSES.values():
        with watch(model, found.append), pytest.raises(PerSampleError, match="has the size of the batch"):
            early = compute_loss(model, x)
            (model(x).square().sum() + early).backward()
    assert len(found) == len(EARLY_PENALTIES)
