"""Results of trials are cached for functions of torch with plain arguments, under the flags of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from persample.layouts import MEMO, Call, Layout, find
from persample.layouts.call import make_trial_key

X = torch.randn(3, 4)


def make_call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    tensors = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    return Call(func, args, kwargs, tensors, (Layout(0), *[None] * (len(tensors) - 1)), 3)


def double(x: Tensor) -> Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(double, (x,), x)  # type: ignore[no-any-return]
    return x * 2


CACHED: dict[str, Call] = {
    "function": make_call(torch.block_diag, X),
    "method": make_call(Tensor.softmax, X, 1, dtype=torch.float64),
    "plain arguments": make_call(torch.sum, X, dim=(1,), keepdim=True),
    "operator": make_call(Tensor.__getitem__, X, (slice(None), None, ...)),
}
NOT_CACHED: dict[str, Call] = {
    "function of the user": make_call(double, X),
    "lambda": make_call(lambda x: x, X),
    "operator of a library": make_call(torch.ops.aten.relu, X),
    "generator": make_call(torch.bernoulli, X, generator=torch.Generator()),
    "object": make_call(torch.sum, X, object()),
    "function as an argument": make_call(torch.sum, X, distance_function=double),
    "integers of samples": make_call(torch.sum, X.long()),
    "constant integers": make_call(torch.take, X, torch.tensor([0])),
    "mask": make_call(torch.masked_select, X, X > 0),
}


@pytest.mark.parametrize("name", CACHED)
def test_trials_of_torch_functions_have_a_key(name: str) -> None:
    assert make_trial_key(CACHED[name]) == make_trial_key(CACHED[name]) is not None


@pytest.mark.parametrize("name", NOT_CACHED)
def test_trials_that_something_else_could_decide_have_none(name: str) -> None:
    assert make_trial_key(NOT_CACHED[name]) is None


def test_strides_and_flags_are_part_of_the_key() -> None:
    call = CACHED["function"]
    key = make_trial_key(call)
    assert key != make_trial_key(make_call(torch.block_diag, torch.randn(4, 3).t()))
    with torch.no_grad():
        assert key != make_trial_key(call)
    with torch.autocast("cpu", torch.bfloat16):
        assert key != make_trial_key(call)
    with torch.backends.mkldnn.flags(enabled=False):
        assert key != make_trial_key(call)
    assert key == make_trial_key(call)


def test_a_trial_runs_once_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    MEMO.clear()
    tried: list[str] = []
    real = find.find_motion_by_trial
    monkeypatch.setattr(find, "find_motion_by_trial", lambda call, r: tried.append(call.func.__name__) or real(call, r))
    for func in (torch.block_diag, torch.block_diag, double, double):
        motion = find.find_motion(make_call(func, X), [func(X)])
        assert motion.is_tried and motion.results == (Layout(0),)
    assert tried == ["block_diag", "double", "double"]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_running_out_of_memory_in_a_trial_is_raised(error: Exception) -> None:
    """It shows nothing about the function, so it is not an answer, and it is not remembered."""
    failing = [True]

    def fail(x: Tensor) -> Tensor:
        if failing[0] and x.device.type != "meta":
            raise error
        return x * 2

    with pytest.raises(type(error)):
        find.find_motion(make_call(fail, X), [X * 2])
    failing[0] = False
    assert find.find_motion(make_call(fail, X), [X * 2]).results == (Layout(0),)
