"""Recomputation under `torch.utils.checkpoint`: what ran under the tracker must run under it again.

Checkpointing runs the user's function a second time during backward, when no mode is active. Neither kind of it
offers a way to say otherwise, so the function that it keeps is replaced by one that first enters the tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from persample import _torch

# By where a tensor lies in memory: what a checkpoint inside a checkpoint has saved comes back as another object.
Memory = dict[tuple[Any, ...], Any]

_ENTERS = "_persample_enters_tracker"


def remember(memory: Memory, tensor: Tensor, where: Any) -> None:
    """Keeps where the samples lie in a tensor, if a checkpoint may be saving it."""
    if _torch.get_saved_tensor_hooks() is not None:
        memory[_address(tensor)] = where


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()


def prepare_recomputation(tracker: Any) -> None:
    """If a non-reentrant checkpoint is saving tensors now: its recomputation will run under the tracker."""
    hooks = _torch.get_saved_tensor_hooks()
    frame = _torch.get_checkpoint_frame(hooks[0]) if hooks else None
    if frame is not None and not hasattr(frame.recompute_fn, _ENTERS):
        frame.recompute_fn = _entering(tracker, frame.recompute_fn)


def prepare_reentrant(tracker: Any, node: Any) -> bool:
    """Whether `node` is the backward of a reentrant checkpoint; if so, its recomputation will run under the tracker."""
    if not hasattr(node, "run_function"):
        return False
    if not hasattr(node.run_function, _ENTERS):
        known: dict[int, Any] = {}
        for i, tensor in zip(node.tensor_indices, node.saved_tensors, strict=True):
            known[i] = tensor if tracker.where(tensor) is None and tracker.is_weight(tensor) else tracker.where(tensor)
        node.run_function = _entering(tracker, node.run_function, known)
    return True


def _entering(tracker: Any, function: Callable[..., Any], known: Mapping[int, Any] | None = None) -> Callable[..., Any]:
    """`function` under the tracker.

    A reentrant checkpoint calls it with detached arguments. `known` has, by position, where the samples lie in them, or
    the weight that stands for one.
    """

    def entering(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                found = (known or {}).get(i)
                if isinstance(found, Tensor):
                    given[i] = found
                elif (where := found or tracker.memory.get(_address(arg))) is not None:
                    tracker.tell(arg, where)
        with tracker:
            return function(*given, **kwargs)

    setattr(entering, _ENTERS, True)
    return entering
