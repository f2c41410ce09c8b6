"""Nested containers, dispatch modes of our own, fake tensors and torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from persample._torch.lookup import Missing, find

# A pytree library: tree_flatten, tree_leaves, tree_map and so on.
pytree: Any = find("torch.utils._pytree", "Models with nested arguments or outputs")


TorchDispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode", "persample.compile")


def make_dispatch_mode(run: Callable[[Any, Any, Any], Any]) -> Any:
    """A dispatch mode that calls `run(operator, args, kwargs)` for each op.

    torch would import its compiler at the first op, which takes seconds: code under this mode is not compiled.
    """

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, kwargs or {})

    return Mode()


# Context manager in which no dispatch mode is active.
disable_dispatch_modes: Callable[[], Any] = find(
    "torch.utils._python_dispatch._disable_current_modes", "persample.compile"
)


def draws_random_numbers(function: Callable[[], Any]) -> bool:
    """Whether a function draws from torch's generators, in this thread. The function is called."""
    is_random = False

    class RandomOps(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal is_random
            is_random |= torch.Tag.nondeterministic_seeded in func.tags
            return func(*args, **(kwargs or {}))

    with RandomOps():
        function()
    return is_random


FakeTensor: Any = find("torch._subclasses.fake_tensor.FakeTensor", "persample.compile")
FakeTensorMode: Any = find("torch._subclasses.fake_tensor.FakeTensorMode", "persample.compile")

# What a fake tensor raises if its values, or a shape that depends on values, are read.
VALUE_READ_ERRORS: Any = (
    find("torch._subclasses.fake_tensor.DataDependentOutputException", "persample.compile"),
    find("torch._subclasses.fake_tensor.DynamicOutputShapeException", "persample.compile"),
)
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

# Sets what torch.compile does with Python frames, and returns what it was.
set_eval_frame: Callable[[Any], Any] = find("torch._C._dynamo.eval_frame.set_eval_frame", "Every recording")

# Sets what compiles backward passes, and returns what it was.
set_autograd_compiler: Callable[..., Any] = find(
    "torch._C._dynamo.compiled_autograd.set_autograd_compiler", "Every recording"
)

_set_code_exec_strategy: Any = find("torch._C._dynamo.eval_frame.set_code_exec_strategy", "Every recording")
_FrameAction: Any = find("torch._C._dynamo.eval_frame._FrameAction", "Every recording")
_FrameExecStrategy: Any = find("torch._C._dynamo.eval_frame._FrameExecStrategy", "Every recording")


def is_dynamo_loaded() -> bool:
    """Whether torch.compile has been used: its import takes a second, and is left to the user."""
    return "torch._dynamo" in sys.modules


def is_compiled_autograd_running() -> bool:
    """Whether the running backward pass is a graph of compiled autograd."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def allow_nested_trace() -> Any:
    """Context manager in which a trace may look into compiled functions; torch.compile must be loaded."""
    return find("torch._dynamo.config", "persample.compile").patch(error_on_nested_fx_trace=False)


def do_not_trace(function: Any, reason: str) -> None:
    """Have compiled functions call a function without tracing into it."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def do_not_compile(function: Any, with_callees: bool) -> None:
    """Have torch.compile skip the frames of a function and, `with_callees`, of all that it calls.

    Without the private names for it torch.compile looks at these frames, and leaves them by itself.
    """
    if isinstance(_set_code_exec_strategy, Missing) or isinstance(_FrameExecStrategy, Missing):
        return
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    _set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))


def get_uncompiled(function: Any) -> Any:
    """The function behind a compiled one, None for any other."""
    return getattr(function, "_torchdynamo_orig_callable", None)
