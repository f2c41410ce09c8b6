"""Recomputation under `torch.utils.checkpoint`: what ran under the tracker must run under it again.

A checkpoint runs the user's function a second time during backward, when no mode is active, and offers no way to change
that. So the function that the checkpoint keeps is replaced by one that enters the tracker first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from persample import _torch
from persample._internal.graph import is_reentrant
from persample.forward.detectors import Context

_MARK = "_persample_enters_tracker"


def prepare_recomputation(context: Context) -> bool:
    """If a non-reentrant checkpoint is saving tensors now, have it recompute under the tracker.

    Returns whether hooks see the tensors that autograd saves, of a checkpoint or of anything else.
    """
    hooks = _torch.get_saved_tensor_hooks()
    if hooks is None:
        return False
    frame = _torch.get_checkpoint_frame(hooks[0])
    if frame is not None and not hasattr(frame.recompute_fn, _MARK):
        frame.recompute_fn = _wrap(context, frame.recompute_fn)
    return True


def prepare_reentrant(context: Context, node: Any) -> bool:
    """Whether `node` is the backward of a reentrant checkpoint; if so, have it recompute under the tracker."""
    if not is_reentrant(node):
        return False
    if not hasattr(node.run_function, _MARK):
        known: dict[int, Any] = {}
        for i, tensor in zip(node.tensor_indices, node.saved_tensors, strict=True):
            layout = context.find_layout(tensor)
            known[i] = tensor if layout is None and context.is_weight(tensor) else layout
        node.run_function = _wrap(context, node.run_function, known)
    return True


def _wrap(context: Context, function: Callable[..., Any], known: Mapping[int, Any] | None = None) -> Callable[..., Any]:
    """`function`, run under the tracker.

    A reentrant checkpoint calls it with detached arguments. `known` maps the position of an argument to its layout, or
    to the weight that it is a copy of.
    """

    def run_tracked(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                found = (known or {}).get(i)
                if isinstance(found, Tensor):
                    given[i] = found
                elif (layout := found or context.known.get_saved_layout(arg)) is not None:
                    context.set_layout(arg, layout)
        with context.mode, nullcontext() if context.complain is None else context.progress.resume():
            return function(*given, **kwargs)

    setattr(run_tracked, _MARK, True)
    return run_tracked
