"""Recomputation under `torch.utils.checkpoint`: what ran under the tracker must run under it again.

Checkpointing runs the user's function a second time during backward, when no mode is active. Neither kind of it
offers a way to say otherwise, so the function that it keeps is replaced by one that first enters the tracker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ENTERED = "_persample_enters"


def prepare_recomputation(tracker: Any) -> None:
    """If a non-reentrant checkpoint is saving tensors now: its recomputation will run under the tracker."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = hooks[0] if hooks else None
    if pack is None or "frame" not in getattr(getattr(pack, "__code__", None), "co_freevars", ()):
        return
    frame = pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents
    if hasattr(frame, "recompute_fn"):
        frame.recompute_fn = _under(tracker, frame.recompute_fn)


def prepare_reentrant(tracker: Any, node: Any) -> bool:
    """Whether `node` is the backward of a reentrant checkpoint; if so, its recomputation will run under the tracker."""
    if not hasattr(node, "run_function"):
        return False
    node.run_function = _under(tracker, node.run_function)
    return True


def _under(tracker: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, _ENTERED):
        return function

    def entered(*args: Any, **kwargs: Any) -> Any:
        with tracker:
            return function(*args, **kwargs)

    setattr(entered, _ENTERED, True)
    return entered
