"""Keep `torch.compile` out of recordings, which must see the ops of a model one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from persample import _torch

Function = TypeVar("Function", bound=Callable[..., Any])


class _Eager:
    """The settings of torch.compile while blocks of `disable_compilation` are open.

    The step of a watched model ends when the next one begins, or when the model is freed: inside any other block, and
    in any thread. So blocks are counted. The first one changes a setting and the last one restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a block at any time
        self._threads: dict[int, tuple[int, Any]] = {}  # by thread: its open blocks, and its frame callback before
        self._stance: Any = None
        self._autograd_compiler: Any = None

    def begin(self) -> None:
        # The caller may be a compiled function that is running now. torch keeps this setting by thread.
        callback = _torch.set_eval_frame(None)
        thread = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._autograd_compiler = _torch.set_autograd_compiler(None, False)
            # Importing the compiler takes a second. If it is not loaded, nothing has been compiled.
            if self._stance is None and _torch.is_dynamo_loaded():
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            count, before = self._threads.get(thread, (0, callback))
            self._threads[thread] = (count + 1, before)

    def end(self, thread: int) -> None:
        """End a block that began in `thread`."""
        with self._lock:
            count, before = self._threads.pop(thread)
            if count > 1:
                self._threads[thread] = (count - 1, before)
            if not self._threads:
                stance, self._stance = self._stance, None
                if stance is not None:
                    stance.__exit__(None, None, None)
                _torch.set_autograd_compiler(*self._autograd_compiler)
        if (
            count == 1 and thread == threading.get_ident()
        ):  # last: torch refuses another stance while it compiles frames
            _torch.set_eval_frame(before)


_eager = _Eager()


class disable_compilation:
    """Context manager: run compiled functions eagerly and compile nothing. The previous settings are restored."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        _eager.begin()

    def __exit__(self, *error: Any) -> None:
        _eager.end(self._thread)


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
