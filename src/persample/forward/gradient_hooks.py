"""Code of the user in a backward pass, which must keep samples apart: hooks, and the backward of custom functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.rng import preserve_rng
from persample._internal.tree import find_tensors
from persample.errors import SamplesMixed, raise_or_complain
from persample.forward.detectors import Context
from persample.layouts import Layout, Lost, Reduced, Where
from persample.rules import is_handler

# ---- hooks ----


def follow_tensor_hook(hook: Callable[[Tensor], Tensor | None], layout: Layout, place: str, context: Context) -> Any:
    """A hook on the gradient of a tensor that does the same and refuses to mix samples.

    `layout` is where the samples lie in the gradient.
    """
    return _follow(hook, lambda _, args: [(args[0], layout)], place, context)


def _follow_module_hook(hook: Callable[..., Any], place: str, context: Context) -> Any:
    """The same for a backward hook of a module. Gradients with as many rows as samples have one for each sample."""

    def list_gradients(follower: Context, args: tuple[Any, ...]) -> list[tuple[Tensor, Layout]] | None:
        found = [(g, Layout(0)) for g in find_tensors(args[1:]) if g.dim() and len(g) == follower.batch]
        return found if follower.batch > 1 else None

    return _follow(hook, list_gradients, place, context)


def _follow(hook: Callable[..., Any], list_gradients: Callable[..., Any], place: str, context: Context) -> Any:
    weak_context = ref(context)  # the graph must not keep it

    def follow(*args: Any) -> Any:
        follower = weak_context()
        # Torch's multi-gradient hooks, which FSDP uses, may be called without a gradient.
        if follower is None or follower.has_ended or args[0] is None:
            return hook(*args)
        if (gradients := list_gradients(follower, args)) is None:
            return hook(*args)
        with follower.mode:
            return _run_hook(hook, args, gradients, place, follower)

    return follow


def _run_hook(
    hook: Callable[..., Any], args: tuple[Any, ...], layouts: list[tuple[Tensor, Layout]], place: str, context: Context
) -> Any:
    reads = context.path.reads.count
    for gradient, layout in layouts:
        context.set_layout(gradient, layout)
    result = hook(*args)
    for each in [*find_tensors(result), *(gradient for gradient, _ in layouts)]:
        with _torch.DisableTorchFunction():  # the code of the loss does not read what is read here
            where = context.find_layout(each)
        if where is not None and where not in [layout for _, layout in layouts]:
            _refuse_hook(hook, place, _describe(where), context)
    if result is not None and context.path.reads.count > reads:
        cause = "it reads numbers of several samples (item, tolist, numpy), and returns a gradient"
        _refuse_hook(hook, place, cause, context)
    for gradient, _ in layouts:
        context.known.discard(gradient)
    return result


def _refuse_hook(hook: Callable[..., Any], place: str, cause: str, context: Context) -> None:
    error = SamplesMixed(
        f"The hook {getattr(hook, '__qualname__', hook)!r} on a gradient, of {place}, mixes the samples of the batch: "
        f"{cause}. Change the gradient of each sample by itself, or remove the hook while you record."
    )
    raise_or_complain(error, context.complain)


def _describe(where: Where) -> str:
    return where.cause if isinstance(where, (Lost, Reduced)) else "it changes their order"


@contextmanager
def follow_module_hooks(modules: Iterable[nn.Module], context: Context) -> Iterator[None]:
    """Inside the block, calls of these modules register hooks on gradients that refuse to mix samples."""
    changed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in _torch.get_backward_hooks(module):
            if hooks:
                changed.append((hooks, dict(hooks)))
                place = f"a module {type(module).__name__}"
                hooks.update({key: _follow_module_hook(hook, place, context) for key, hook in hooks.items()})
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.update({key: hook for key, hook in before.items() if key in hooks})


# ---- the backward of an autograd.Function ----


class _RefuseBackward(TorchFunctionMode):
    """Raises where a backward pass starts, which a second run of a custom function must not repeat."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.backward, torch.autograd.backward):
            raise RuntimeError("a backward pass")
        return func(*args, **(kwargs or {}))


def is_own_function(node: Any) -> bool:
    """Whether a node belongs to torch or persample, or to a rule in torch's convention, which fills `grad_sample`."""
    function = _torch.get_custom_function(node)
    return function.__module__.partition(".")[0] in ("torch", "persample") or is_handler(function)


def check_custom_backward(output: Tensor, layout: Layout, context: Context) -> None:
    """Have the backward of a user's `autograd.Function` that made `output` checked when it runs.

    It runs twice more, once without the gradients of half of the samples: those of the other half must stay the same.
    Only gradients with as many rows as the output, in the same dimension, are compared.
    """
    node: Any = output.grad_fn
    if is_own_function(node):
        return
    function = _torch.get_custom_function(node)
    # The graph must keep neither the tracker nor itself.
    weak_context, weak_node, batch, place = ref(context), ref(node), context.batch, context.place()
    complain, dim, size = context.complain, layout.dim, output.shape[layout.dim]
    is_first = torch.tensor(layout.get_ids(size, batch), device=output.device) < (batch + 1) // 2
    first, others = is_first.nonzero().flatten(), (~is_first).nonzero().flatten()

    def has_rows(tensor: Tensor) -> bool:
        return tensor.dim() > dim and tensor.shape[dim] == size

    def run(gradients: list[Tensor | None]) -> list[Tensor]:
        """The rows of the first samples in the gradients of the inputs."""
        node: Any = weak_node()
        found = node.apply(*gradients)
        tensors = [tensor for tensor in find_tensors(found) if has_rows(tensor)]
        return [tensor.index_select(dim, first) for tensor in tensors]

    def check(gradients: Any, given: tuple[Tensor | None, ...]) -> None:
        copies = [None if g is None else g.clone() for g in given]
        halves = [None if g is None else g.index_fill(dim, others, 0) if has_rows(g) else g for g in given]
        try:
            with preserve_rng(), torch.no_grad(), _RefuseBackward():
                whole, half = run(copies), run(halves)
        except Exception:  # it needs what the first run has freed
            return
        if any(a.shape == b.shape and _differ(a, b) for a, b in zip(whole, half, strict=False)):
            if (checked := weak_context()) is not None:
                checked.path.program.note_finding()  # else a later pass would not be checked
            error = SamplesMixed(
                f"The backward of {function.__name__}, an autograd.Function called in {place}, mixes the samples of "
                "the batch: gradients of the first samples change with those of the last ones. Compute the gradient "
                "of each sample by itself."
            )
            raise_or_complain(error, complain)

    node.register_hook(check)


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether two gradients differ by more than rounding."""
    if not a.numel() or not bool(a.isfinite().all()):
        return False
    return bool((a - b).abs().max() > torch.finfo(a.dtype).eps ** 0.5 * a.abs().max())
