"""Keeps `torch.compile` away from recordings, which have to see the ops of a model one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo import compiled_autograd
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, whatever was compiled runs as it is written, and nothing is compiled; afterwards all is as it was.

    torch's compiler takes a second to import, and is not here if nobody has compiled anything.
    """
    with ExitStack() as afterwards:
        afterwards.callback(set_eval_frame, set_eval_frame(None))  # a compiled function may be what is running
        before = compiled_autograd.set_autograd_compiler(None, False)
        afterwards.callback(compiled_autograd.set_autograd_compiler, *before)
        if "torch._dynamo" in sys.modules:
            afterwards.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def in_compiled_autograd() -> bool:
    """Whether a backward pass runs as a graph that compiled autograd has made of it."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def not_traced(function: Function) -> Function:
    """A compiled function calls this one, and does not look into it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a recording of per-sample gradients is no part of a compiled function; persample.compile compiles whole steps"
    )
    return function


def skipped(inside: bool) -> Callable[[Function], Function]:
    """Calls of the function itself are not compiled, nor, `inside`, whatever it calls."""

    def skip(function: Function) -> Function:
        callees = _FrameAction.SKIP if inside else _FrameAction.DEFAULT
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
        return function

    return skip
