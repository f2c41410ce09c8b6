"""Steps that cannot be compiled are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError, SamplesMixed
from persample.compiled.forms import Arguments
from persample.testing.oracle import assert_rows_close
from tests.support.cases import Calls
from tests.support.compiled import (
    build,
    check_step,
    compute_loss,
    compute_rows,
    make_batch,
    make_mlp,
)


def catch_error_of_reading(m: Any, x: Tensor) -> Tensor:
    try:
        scale = float(x.abs().max())
    except Exception:
        scale = 1.0
    return m.a(x) * scale


def count_calls(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.a(x) / m.calls


def keep_output(m: Any, x: Tensor) -> Tensor:
    m.last = m.a(x)
    return m.last.tanh()


def assign_buffer(m: Any, x: Tensor) -> Tensor:
    m.scale = m.scale * 0.9
    return m.a(x) * m.scale


def change_argument(m: Any, x: Tensor) -> Tensor:
    x += 1
    return m.a(x)


def set_seed(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(m.a(x))


OUTSIDE = torch.tensor([1.0, 2.0, 3.0]).double()

REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "item": (lambda m, x: m.a(x) * x.max().item(), "reads the values"),
    "if": (lambda m, x: m.a(x) if x.sum() > 0 else -m.a(x), "reads the values"),
    "a value, and the error is caught": (catch_error_of_reading, "reads the values"),
    "tolist": (lambda m, x: m.a(x) * x.tolist()[0][0], "cannot be compiled"),
    "numpy": (lambda m, x: m.a(x) * float(x.detach().numpy().max()), "cannot be compiled"),
    "a mask": (lambda m, x: m.a(x[x[:, 0] > 0]), "reads the values"),
    "a permutation": (lambda m, x: m.a(x[torch.randperm(len(x))]), "whose values are not known"),
    "a sort of the samples": (lambda m, x: m.a(x[x[:, 0].argsort()]), "samples of the batch are mixed"),
    "random numbers of Python": (lambda m, x: m.a(x) * random.random(), "random numbers with Python"),
    "a seed": (set_seed, "sets a seed"),
    "a global tensor": (lambda m, x: m.a(x) * OUTSIDE, "neither an argument of the step"),
    "a counter in an attribute": (count_calls, "changes 'calls' of Calls"),
    "an activation in an attribute": (keep_output, "changes 'last' of Calls"),
    "an assigned buffer": (assign_buffer, "changes '_buffers' of Calls"),
    "an argument changed in place": (change_argument, "changes one of its arguments"),
    "a checkpoint with dropout": (
        lambda m, x: checkpoint(lambda h: F.dropout(m.a(h)).tanh(), x, use_reentrant=False),
        "checkpoint that recomputes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_a_graph_cannot_repeat_are_refused(name: str) -> None:
    forward, message = REFUSED[name]
    model = Calls(forward, a=nn.Linear(5, 3).double())
    model.register_buffer("scale", torch.ones(()).double())
    x, y = make_batch()
    before = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    step = persample.compile(model, compute_loss, lambda grads: grads.clip(1.0), backend="eager")
    with pytest.raises(PerSampleError, match=message):
        step(x, y)
    # The attempt has changed nothing.
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == before
    assert all(type(p) is nn.Parameter for p in model.parameters()) and float(model.scale) == 1
    with persample.record(make_mlp()) as grads:
        pass
    assert grads.names


def test_motions_that_need_values_are_not_cached_by_a_trace() -> None:
    """A step that cannot be compiled can still be recorded."""
    model = Calls(lambda m, x: m.a(x[x[:, 0].argsort()][x[:, 0].argsort().argsort()]), a=nn.Linear(5, 3).double())
    x, y = make_batch()
    with pytest.raises(PerSampleError):
        persample.compile(model, compute_loss, lambda grads: grads.norms(), backend="eager")(x, y)
    with persample.record(model) as grads:
        compute_loss(model, x, y).backward()
    plain = Calls(lambda m, x: m.a(x), a=model.a)
    assert_rows_close(grads.dense(), compute_rows(plain, compute_loss, x, y))


def test_errors_about_mixed_samples_name_the_module() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    step = persample.compile(model, compute_loss, lambda grads: grads.clip(1.0), backend="eager")
    with pytest.raises(SamplesMixed, match=r"module '1' \(BatchNorm1d\)"):
        step(*make_batch())
    assert float(model[1].num_batches_tracked) == 0
    model.eval()
    check_step(model, compute_loss, *make_batch())


def test_errors_about_values_name_the_module_and_line() -> None:
    model = nn.Sequential(Calls(lambda m, x: m.a(x) * x.max().item(), a=nn.Linear(5, 3))).double()
    with pytest.raises(PerSampleError, match=r"module '0' \(Calls\), at test_refusals.py:\d+, reads the values"):
        persample.compile(model, compute_loss, lambda grads: grads.norms(), backend="eager")(*make_batch())


def test_errors_about_wrong_arguments() -> None:
    model, (x, y), loss_fn = build("MLP")
    with pytest.raises(PerSampleError, match=r"takes an nn\.Module"):
        persample.compile(compute_loss, loss_fn, lambda grads: 0)  # type: ignore[arg-type]
    with pytest.raises(PerSampleError, match="got an object"):
        persample.compile(model, compute_loss, lambda g: g.norms(), backend="eager")(x, object())
    with pytest.raises(PerSampleError, match="must return a tensor with one element, or a tuple"):
        persample.compile(model, lambda m, x: m(x), lambda g: g.norms(), backend="eager")(x)
    with pytest.raises(PerSampleError, match="returned a PerSampleGradients"):
        persample.compile(model, compute_loss, lambda grads: grads, backend="eager")(x, y)
    step = persample.compile(model, compute_loss, lambda g: g.norms(), backend="eager")
    with persample.record(model), pytest.raises(PerSampleError, match="outside of a recording"):
        step(x, y)


def test_a_tensor_and_none_are_different_arguments() -> None:
    x = torch.randn(2)
    assert Arguments((x, None), {}).key != Arguments((None, x), {}).key
    assert Arguments((x, None), {}).key == Arguments((x + 1, None), {}).key
