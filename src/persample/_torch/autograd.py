"""The engine, the graph, versions, hooks on gradients, checkpoints, transforms of torch.func."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, wraps
from operator import methodcaller
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from persample._torch.lookup import find, read

# The number of the backward pass that runs in this thread, -1 if there is none.
get_backward_pass: Callable[[], int] = find("torch._C._current_graph_task_id", "Every recording")

# Whether the running backward pass will execute a node: not so if `autograd.grad` asks for other inputs.
will_run_node: Callable[[Any], bool] = find("torch._C._will_engine_execute_node", "Every recording")

# The number of a node of the graph among those that its thread has made. Nodes that accumulate gradients share one.
get_node_number: Callable[[Any], int] = methodcaller("_sequence_nr")


def find_node(tensor: Tensor) -> Any:
    """`tensor.grad_fn`; None where torch refuses to tell: for a view made without grad whose base has changed since."""
    with suppress(RuntimeError):
        return tensor.grad_fn
    return None


class NodeHooks(dict[int, Callable[[Any], None]]):
    """Functions of the gradient of a node's first result. Hooks of the result that are added later run after them."""

    __slots__ = ("__weakref__",)

    def add_to(self, node: Any, carrier: Any) -> None:
        """Have a node keep and call these functions, faster than by `register_prehook`; `carrier` is any tensor."""
        carrier._backward_hooks = self
        node._register_hook_dict(carrier)
        carrier._backward_hooks = None


_engine: Any = find("torch.autograd.Variable._execution_engine", "Every recording")


def pull_back(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    keep_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Any, ...]:
    """`torch.autograd.grad`, without the import of `sympy` that gradients of the outputs cause there (some 0.3 s)."""
    found: tuple[Any, ...] = _engine.run_backward(
        tuple(outputs), tuple(gradients), keep_graph, False, tuple(inputs), allow_unused, accumulate_grad=False
    )
    return found


def count_gradient_bytes(node: Any) -> int:
    """The size of the gradients that a node of the graph receives in a backward pass; 0 if torch does not tell."""
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in getattr(node, "_input_metadata", ()))


# The innermost pair of `saved_tensors_hooks`, None if there is none. It is called for every op.
get_saved_tensor_hooks: Callable[[], Any] = partial(
    find("torch._C._autograd._top_saved_tensors_default_hooks", "Recording a checkpointed model"), False
)

# Makes a tensor subclass that shares its data with a tensor.
make_subclass: Callable[..., Any] = find("torch.Tensor._make_subclass", "ExpandedWeight")


# Sets the number of in-place changes that autograd counts for each of some tensors.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = find(
    "torch._C._autograd._unsafe_set_version_counter", "Verifying a recording"
)


def clone_lazily(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU that takes memory when one of both is written to."""
    clone = getattr(tensor, "_lazy_clone", None)
    return tensor.clone() if clone is None or type(tensor) is not Tensor or tensor.device.type != "cpu" else clone()


def _hand_over_backward() -> None:
    """Have function modes see calls of `torch.autograd.backward`, which torch 2.10 hides from them."""
    original = torch.autograd.backward
    if "handle_torch_function" in original.__code__.co_names:
        return

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if has_torch_function(roots):
            return handle_torch_function(backward, roots, tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


_hand_over_backward()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended."""
    _engine.queue_callback(callback)


def read_saved(node: Any, name: str) -> Any:
    """An argument of an op that its autograd node keeps, such as `dim`."""
    return read(node, f"_saved_{name}", "A weight that is used through a view or a transpose")


def list_saved(node: Any) -> list[Any]:
    """The arguments and results of an op that its autograd node keeps; none if they were freed."""
    with suppress(RuntimeError):
        names = [name for name in dir(node) if name.startswith("_saved_")]
        return [getattr(node, name) for name in names] + [*getattr(node, "saved_tensors", ())]
    return []


def count_results(node: Any) -> int:
    """The number of results of the op behind an autograd node."""
    return len(read(node, "_input_metadata", "A weight that is used through unbind()"))


_get_transforms: Callable[[], Any] = find("torch._C._functorch.peek_interpreter_stack", "Every recording")


def is_inside_transform() -> bool:
    """Whether a transform of torch.func is running."""
    return _get_transforms() is not None


def is_inside_forward_ad() -> bool:
    """Whether a level of forward-mode AD is active."""
    return read(forward_ad, "_current_level", "Every recording") >= 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode AD runs through a tensor."""
    return is_inside_forward_ad() and forward_ad.unpack_dual(tensor).tangent is not None


# The functions by which forward-mode AD joins a tensor and its tangent.
DUAL_FUNCTIONS: set[Any] = {find(f"torch.{name}", "Forward-mode AD") for name in ("_make_dual", "_unpack_dual")}


def get_gradient_hooks(parameter: Tensor) -> tuple[dict[int, Any] | None, ...]:
    """The hooks on the gradient of a leaf: those of `register_hook`, and those that run when it was accumulated."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def forget_gradient_hooks(result: Tensor) -> None:
    """Remove the hooks on the gradient of a tensor that is no leaf."""
    if hooks := result._backward_hooks:
        hooks.clear()


def has_gradient_hooks(parameters: Iterable[Any]) -> bool:
    """Whether any of some leaves has a hook on its gradient."""
    return any([p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters])


def get_checkpoint_frame(pack: Any) -> Any:
    """What a non-reentrant checkpoint keeps for its recomputation, given its hook for saved tensors, else None."""
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if pack is None or "frame" not in names:
        return None
    frame = pack.__closure__[names.index("frame")].cell_contents
    return frame if hasattr(frame, "recompute_fn") else None


_reentrant_forward: Any = find("torch.utils.checkpoint.CheckpointFunction.forward", "Recording a checkpointed model")


def is_in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint is running its function for the first time, without gradients."""
    code = _reentrant_forward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
