"""Keeps `torch.compile` away from recordings, which have to see the ops of a model one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from persample import _torch

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def disable_compilation() -> Iterator[None]:
    """Inside, whatever was compiled runs as it is written, and nothing is compiled; afterwards all is as it was.

    torch's compiler takes a second to import, and is not here if nobody has compiled anything.
    """
    with ExitStack() as afterwards:
        # A compiled function may be what is running.
        afterwards.callback(_torch.set_eval_frame, _torch.set_eval_frame(None))
        before = _torch.set_autograd_compiler(None, False)
        afterwards.callback(_torch.set_autograd_compiler, *before)
        if _torch.is_dynamo_loaded():
            afterwards.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def exclude_from_graph(function: Function) -> Function:
    """A compiled function calls this one, and does not look into it."""
    _torch.do_not_trace(
        function,
        "a recording of per-sample gradients is no part of a compiled function; persample.compile compiles whole steps",
    )
    return function


def skip_compilation(with_callees: bool) -> Callable[[Function], Function]:
    """Calls of the function itself are not compiled, nor, `inside`, whatever it calls."""

    def skip(function: Function) -> Function:
        _torch.do_not_compile(function, with_callees=with_callees)
        return function

    return skip
