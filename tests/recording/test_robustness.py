"""Recordings leave nothing behind: after errors and interrupts, with dropped models, in copies of models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)
from torch.utils._python_dispatch import TorchDispatchMode

import persample
from persample import PerSampleError, SamplesMixed, _torch, record, watch
from persample.forward import FollowMode, Tracker
from persample.layouts import find as layouts_find
from tests.support.cases import B, Calls, D, param
from tests.support.modules import make_mlp


@pytest.fixture(autouse=True)
def no_modes_remain() -> Iterator[None]:
    """Fail a test that leaves a function mode behind, and leave the mode."""
    yield
    modes = _get_current_function_mode_stack()
    for mode in modes:
        _torch.remove_mode(mode)
    assert not modes


def make_model() -> tuple[nn.Module, Tensor]:
    return make_mlp(D, 6, 3, seed=None, dtype=torch.float32), torch.randn(B, D)


def ignore(grads: Any) -> None:
    pass


def compute_norms(model: nn.Module, x: Tensor) -> Tensor:
    with record(model, loss_reduction="sum") as grads:
        model(x).square().sum().backward()
    return grads.norms()


def test_a_model_that_is_its_own_child() -> None:
    model, x = nn.Linear(D, 3), torch.randn(B, D)
    expected = compute_norms(model, x)
    model.itself = model
    assert torch.equal(compute_norms(model, x), expected)


# ---- dropped models ----


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: make_model()[0],
        lambda: nn.Linear(D, D),
        lambda: nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True)),
        lambda: Calls(lambda m, x: (x @ m.w.t()).sin(), w=param(2, D)),
        lambda: Calls(lambda m, x: (m.a(x).softmax(0), m.a(x))[1], a=nn.Linear(D, D)),
    ],
    ids=["mlp", "linear", "transformer", "transformer inside", "derived weight", "lost tensor"],
)
def test_a_dropped_model_takes_its_mode_with_it(make: Callable[[], nn.Module], backward: bool) -> None:
    """At once, without the garbage collector."""
    x = torch.randn(B, 4, D)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model = make()
            freed = ref(model)
            watch(model, ignore, {"loss_reduction": "sum"})
            loss = model(x).square().sum()
            if backward:
                loss.backward()
            assert _get_current_function_mode_stack()
            del model
            assert freed() is None
            del loss
            assert not _get_current_function_mode_stack()
    finally:
        gc.enable()
    model, x = make_model()
    assert compute_norms(model, x).all()


def test_thirty_dropped_models_leave_nothing() -> None:
    def live() -> int:
        gc.collect()
        return sum(type(o) in (persample.Watch, Tracker, FollowMode) for o in gc.get_objects())

    before = live()
    for _ in range(30):
        model, x = make_model()
        watch(model, ignore, {})
        model(x)
        watch(nn.Linear(2, 2), ignore, {})  # never called
    del model
    assert live() == before
    assert not _get_current_function_mode_stack()


def test_a_held_watch_does_not_hold_the_model() -> None:
    model, x = make_model()
    watched, freed = watch(model, ignore, {}), ref(model)
    model(x)
    del model
    assert freed() is None
    watched.stop()
    assert not _get_current_function_mode_stack()


def test_the_step_of_a_dropped_model_is_refused() -> None:
    model, x = make_model()
    watch(model, ignore, {"loss_reduction": "sum"})
    out = model(x)
    del model
    with pytest.raises(PerSampleError, match="does not belong to the current step"):
        out.square().sum().backward()
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("verify", ["always", False])
def test_a_model_that_is_freed_does_not_end_another_recording(verify: Any) -> None:
    """The garbage collector runs at any time, also while a verification has paused the tracker."""
    watched = [make_model() for _ in range(20)]
    for model, x in watched:
        model.itself = [model]  # a cycle: the collector frees it, not the last reference
        watch(model, ignore, {})
        model(x).square().sum().backward()
    del model

    def free_one(m: nn.Module, x: Tensor) -> Tensor:
        watched.pop()
        gc.collect()
        return m.a(x)

    with record(recorded := Calls(free_one, a=nn.Linear(D, 3)), loss_reduction="mean", verify=verify):
        loss = recorded(x).square().sum()
        with pytest.raises(PerSampleError, match="is a sum over the samples"):
            loss.backward()


STACKS = {
    "functions": (
        TorchFunctionMode,
        _torch.insert_outermost_mode,
        _torch.remove_mode,
        _torch.get_function_modes,
    ),
    "operators": (
        TorchDispatchMode,
        _torch.insert_outermost_dispatch_mode,
        _torch.remove_dispatch_mode,
        _torch.get_dispatch_modes,
    ),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("allocations", range(1, 9))
def test_a_mode_that_the_collector_frees_leaves_at_any_time(name: str, allocations: int) -> None:
    """Also when it is freed while another mode enters or leaves."""
    make_mode, insert, remove, get_modes = STACKS[name]

    class Owner:
        def __init__(self) -> None:
            self.mode = make_mode()
            self.itself = self
            insert(self.mode)

        def __del__(self) -> None:
            remove(self.mode)

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # so that collections are quick
    try:
        for change in (insert, remove, lambda mode: get_modes()):
            other = make_mode()
            gc.collect()
            gc.disable()
            if change is remove:
                insert(other)
            Owner()
            gc.set_threshold(gc.get_count()[0] + allocations, 1, 1)
            gc.enable()
            change(other)
            gc.set_threshold(*thresholds)
            gc.collect()
            assert get_modes() == ([other] if change is insert else [])
            remove(other)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()
        for mode in get_modes():
            remove(mode)


def test_dropped_private_training_leaves_nothing() -> None:
    from persample.private import PrivateOptimizer

    for _ in range(3):
        model, x = make_model()
        optimizer = PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            module=model,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=B,
        )
        model(x).mean().backward()
        del model, optimizer
        gc.collect()
        assert not _get_current_function_mode_stack()
    model, x = make_model()
    assert compute_norms(model, x).all()


# ---- other threads ----


def run_in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Worker:
    """A thread that lives on between calls."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            try:
                self._calls[-1] = self._calls[-1]()
            except BaseException as error:
                self._calls[-1] = error
            self._done.release()

    def run(self, function: Callable[[], Any]) -> Any:
        self._calls.append(function)
        self._wake.release()
        self._done.acquire()
        return self._calls[-1]


def test_a_watched_model_in_another_thread() -> None:
    model, x = make_model()
    expected, found, worker = compute_norms(model, x), [], Worker()
    watched = watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"})
    for run in (run_in_thread, worker.run, lambda function: function()):
        assert run(lambda: model(x).square().sum().backward()) is None
    assert not isinstance(worker.run(lambda: model(x).sum()), BaseException)  # a step that stays open
    watched.stop()
    torch.testing.assert_close(found, [expected] * 3)
    torch.testing.assert_close(worker.run(lambda: compute_norms(model, x)), expected)
    assert worker.run(_get_current_function_mode_stack) == []


def test_a_model_that_is_dropped_in_another_thread() -> None:
    (model, x), worker = make_model(), Worker()
    models = [model]
    watch(model, ignore, {})
    model(x)
    del model
    worker.run(lambda: models.clear())
    other, x = make_model()
    assert compute_norms(other, x).all()  # the mode rested, and has been left


def test_a_call_in_another_thread_ends_the_step() -> None:
    model, x = make_model()
    found: list[Any] = []
    with watch(model, found.append, {"loss_reduction": "sum"}):
        loss = model(x).square().sum()
        assert run_in_thread(lambda: model(x).square().sum().backward()) is None
        with pytest.raises(PerSampleError, match="does not belong to the current step"):
            loss.backward()
        model(x).square().sum().backward()
    assert len(found) == 2


# ---- interrupts ----


class Interrupted(nn.Module):
    """Raises an error in its forward if it is told to, and can call itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.error, self.depth = nn.Linear(D, D), None, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.error is not None:
            raise self.error
        if self.depth:
            self.depth -= 1
            return self(h)
        return h


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ValueError(), GeneratorExit()])
def test_an_interrupted_call_of_a_watched_model(error: BaseException) -> None:
    model, x = Interrupted(), torch.randn(B, D)
    expected, found = compute_norms(model, x), []
    with watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"}):
        for n in (B, B - 1):
            model.error = error
            with pytest.raises(type(error)):
                model(x)
            model.error = None
            model(x[:n]).square().sum().backward()
    assert [len(norms) for norms in found] == [B, B - 1]
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], expected[: B - 1])


def test_a_watched_model_may_call_itself() -> None:
    model, x = Interrupted(), torch.randn(B, D)
    model.depth = 2
    expected, found = compute_norms(model, x), []
    with watch(model, lambda grads: found.append(grads.norms()), {"loss_reduction": "sum"}):
        model.depth = 2
        model(x).square().sum().backward()
    torch.testing.assert_close(found, [expected])


def test_an_interrupt_in_a_block() -> None:
    model, x = Interrupted(), torch.randn(B, D)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), record(model):
        model(x)
    model.error = None
    assert compute_norms(model, x).all()


def test_wrong_options_leave_no_hooks() -> None:
    model, _ = make_model()
    for options in ({"keep": "nothing"}, {"parameters": ["no such"]}, {"unknown": 1}):
        with pytest.raises((PerSampleError, TypeError)):
            watch(model, ignore, options)
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())


# ---- copies ----


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": save_and_load,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "copy of a copy": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


def make_transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True), nn.Linear(D, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": lambda: make_model()[0], "transformer": make_transformer}


@pytest.mark.parametrize("stage", ["before a step", "in a step", "after a step"])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_of_a_watched_model_is_an_ordinary_model(kind: str, name: str, stage: str) -> None:
    model, x = MODELS[kind](), torch.randn(B, 4, D)
    plain = copy.deepcopy(model)
    received: list[Any] = []
    with warnings.catch_warnings(), watch(model, received.append, {"loss_reduction": "sum"}):
        warnings.simplefilter("error")
        if stage != "before a step":
            loss = model(x).square().sum()
            if stage == "after a step":
                loss.backward()
        received.clear()
        found = COPIES[name](model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy that refers to the original is noticed
    for _ in range(2):
        out = found(x)
        torch.testing.assert_close(out, plain(x))
        out.square().sum().backward()
        assert all(p.grad is not None for p in found.parameters())
    assert not received
    with torch.no_grad():
        found.eval()
        torch.testing.assert_close(found(x), plain.eval()(x))
    torch.testing.assert_close(compute_norms(found.train(), x), compute_norms(plain.train(), x))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_is_made_in_a_block(name: str) -> None:
    model, x = MODELS["transformer"](), torch.randn(B, 4, D)
    expected = compute_norms(model, x)
    with record(model, loss_reduction="sum") as grads:
        found = COPIES[name](model)
        model(x).square().sum().backward()
        later = COPIES[name](model)
    for made in (found, later):
        with torch.no_grad():
            made(x[:1])
        torch.testing.assert_close(compute_norms(made, x), expected)
    torch.testing.assert_close(grads.norms(), expected)


def test_a_watched_copy_has_its_own_steps() -> None:
    model, x = make_model()
    first: list[Any] = []
    second: list[Any] = []
    with watch(model, first.append, {"keep": "norms"}) as watched:
        model(x).sum().backward()
        watched.rest()
        other = copy.deepcopy(model)
        with watch(other, second.append, {"keep": "norms"}):
            other(x).sum().backward()
        model(x).sum().backward()
    assert (len(first), len(second)) == (2, 1)


def test_a_saved_model_is_loaded_without_persample(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(D, 2))
    with watch(model, ignore, {}):
        torch.save(model, tmp_path / "model.pt")
    code = """
import sys, torch
sys.modules["persample"] = None
model = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(1, int(sys.argv[2]))).sum().backward()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt"), str(D)], check=True)


# ---- errors of the machinery ----


class Fragile:
    """A function without a declaration that raises an error in some of its calls: the first is the model's own."""

    def __init__(self, error: Exception, first: int, last: int) -> None:
        self.error, self.failing, self.calls = error, range(first, last), 0

    def __call__(self, x: Tensor) -> Tensor:
        if has_torch_function_unary(x):
            return handle_torch_function(self, (x,), x)
        self.calls += 1
        if self.calls in self.failing:
            raise self.error
        return x.sin()


@pytest.mark.parametrize("first", [2, 3, 5])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 80000 bytes"),
    ],
    ids=["torch", "Python", "allocator"],
)
def test_running_out_of_memory_in_a_trial_is_raised_and_not_remembered(error: Exception, first: int) -> None:
    fragile = Fragile(error, first, first + 1)
    model, x = Calls(lambda m, x: m.a(fragile(x)), a=nn.Linear(D, D)), torch.rand(B, D)
    with pytest.raises(type(error)), record(model):
        model(x)
    assert compute_norms(model, x).all()


def test_running_out_of_memory_in_the_rule_of_any_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Calls(lambda m, x: torch.hypot(x, m.w), w=param(D)), torch.rand(B, D)

    def run_out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("persample.rules.generic._loop_over_samples", run_out_of_memory)
        patch.setattr("torch.func.vmap", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError), record(model):
            model(x).sum().backward()
    assert compute_norms(model, x).all()


@pytest.mark.parametrize(
    ("error", "width"),
    [(RuntimeError("broken"), 50), (AssertionError(), 51), (KeyError("broken"), 52), (ZeroDivisionError(), 53)],
)
@pytest.mark.parametrize("place", ["find_declared_motion", "find_motion_by_trial"])
def test_an_error_of_the_machinery_is_not_remembered(
    place: str, error: Exception, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case has a shape of its own, because what other cases have found is remembered."""
    function = torch.sin if place == "find_declared_motion" else Fragile(error, 0, 0)
    model, x = Calls(lambda m, x: m.a(function(x.flip(1))), a=nn.Linear(width, D)), torch.rand(B, width)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(layouts_find, place, fail)
        with pytest.raises(SamplesMixed, match="could not be followed"), record(model):
            model(x).sum().backward()
    assert compute_norms(model, x).all()


# ---- scripted models ----


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.rand(B, D))])
def test_scripted_models_are_refused(make: Callable[..., nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = make(nn.Linear(D, D))
    with pytest.raises(PerSampleError, match=r"before torch\.jit"), record(scripted):
        pass
    with pytest.raises(PerSampleError, match=r"before torch\.jit"):
        watch(scripted, lambda grads: None)
    model = nn.Sequential(nn.Linear(D, D), scripted)
    with pytest.raises(PerSampleError), record(model):
        model(torch.rand(B, D)).sum().backward()
    with pytest.raises(PerSampleError), watch(model, lambda grads: None):
        model(torch.rand(B, D)).sum().backward()


def test_scripted_parts_without_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(D, D), torch.jit.script(nn.Tanh()), nn.Linear(D, D))
    x = torch.rand(B, D)
    expected = compute_norms(nn.Sequential(model[0], nn.Tanh(), model[2]), x)
    torch.testing.assert_close(compute_norms(model, x), expected)


@pytest.mark.parametrize("keep", ["everything", "norms"])
@pytest.mark.parametrize("function", [Tensor.backward, torch.autograd.backward])
def test_a_backward_pass_for_some_parameters_is_refused(function: Any, keep: Any) -> None:
    """They are not in the graph of the loss: nothing would arrive, without a word."""
    model = nn.Linear(3, 2)
    with record(model, keep=keep) as grads:
        loss = model(torch.randn(4, 3)).square().mean()
        with pytest.raises(PerSampleError, match=r"backward\(inputs=...\) asks for gradients of parameters"):
            function(loss, inputs=[model.weight])
        loss.backward()
    assert grads.norms().shape == (4,)
