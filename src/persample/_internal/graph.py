"""The autograd graph of a tensor: its nodes and leaves, and hooks on leaves."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from persample import _torch
from persample.errors import PerSampleError


def find_nodes(tensor: Tensor) -> Iterator[Any]:
    """Every node that a backward pass from `tensor` would reach."""
    return walk([_torch.find_node(tensor)])


def walk(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes, and every node behind them."""
    seen = {*nodes} - {None}
    todo = [*seen]
    while todo:
        node = todo.pop()
        yield node
        fresh = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= fresh
        todo.extend(fresh)


def find_leaves(tensor: Tensor) -> list[Tensor]:
    """The leaves that a backward pass from `tensor` would give a gradient to.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> find_leaves(w * 2 + 1)[0] is w
    True
    """
    return [node.variable for node in find_nodes(tensor) if hasattr(node, "variable")]


def is_reentrant(node: Any) -> bool:
    """Whether a node is the backward of a reentrant checkpoint. It adds to `.grad` in a pass of its own."""
    return hasattr(node, "run_function")


def preserve_grads(loss: Tensor, but: Container[int] = ()) -> AbstractContextManager[None]:
    """Put aside `.grad` of every leaf of `loss`, except for leaves with an `id()` in `but`."""
    with _torch.DisableTorchFunction():
        return put_grads_aside([leaf for leaf in find_leaves(loss) if id(leaf) not in but])


@contextmanager
def put_grads_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block, these tensors have no `.grad` from before; it is restored afterwards."""
    with _torch.DisableTorchFunction():
        preserved = [(leaf, leaf.grad) for leaf in leaves]
        for leaf, _ in preserved:
            leaf.grad = None
    try:
        yield
    finally:
        with _torch.DisableTorchFunction():
            for leaf, grad in preserved:
                leaf.grad = grad


# ---- hooks on leaves ----


# Packages whose own hooks on parameters are known: our refusals, and the wrappers that recordings support.
_KNOWN = ("persample.", "torch.distributed.", "torch.nn.parallel.")


def refuse_parameter_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Raise if a parameter has a hook of the user's on its gradient."""
    if not _torch.has_gradient_hooks(parameters.values()):
        return
    for name, parameter in parameters.items():
        for hooks in _torch.get_gradient_hooks(parameter):
            if hooks:
                _refuse(name, hooks)


def _refuse(name: str, hooks: Mapping[int, Any]) -> None:
    for hook in hooks.values():
        if not str(getattr(hook, "__module__", None)).startswith(_KNOWN):
            raise PerSampleError(
                f"'{name}' has a hook on its gradient: {getattr(hook, '__qualname__', hook)!r}. The gradients are kept "
                "per sample, and the hook would not run. Remove it with the remove() of its handle, and apply it to "
                "the recorded gradients. Or leave the parameter out: `parameters` selects what is recorded."
            )
