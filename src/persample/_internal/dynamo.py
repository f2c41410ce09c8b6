"""Keep `torch.compile` out of recordings, which must see the ops of a model one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from persample import _torch

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def disable_compilation() -> Iterator[None]:
    """Run compiled functions eagerly and compile nothing inside the block. The previous settings are restored."""
    with ExitStack() as afterwards:
        # The caller may be a compiled function that is running now.
        afterwards.callback(_torch.set_eval_frame, _torch.set_eval_frame(None))
        before = _torch.set_autograd_compiler(None, False)
        afterwards.callback(_torch.set_autograd_compiler, *before)
        # Importing the compiler takes a second. If it is not loaded, nothing has been compiled.
        if _torch.is_dynamo_loaded():
            afterwards.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def exclude_from_graph(function: Function) -> Function:
    """Decorator: a compiled caller calls this function without tracing into it."""
    _torch.do_not_trace(
        function,
        "a recording of per-sample gradients cannot be part of a compiled function; persample.compile compiles whole "
        "steps",
    )
    return function


def skip_compilation(with_callees: bool) -> Callable[[Function], Function]:
    """Decorator: calls of this function are not compiled; `with_callees` includes the functions that it calls."""

    def skip(function: Function) -> Function:
        _torch.do_not_compile(function, with_callees=with_callees)
        return function

    return skip
