"""Tensors that no function mode sees being made: results of an `autograd.Function`, and of code that is not Python."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from persample import _torch
from persample._internal.graph import find_leaves, find_nodes
from persample._internal.tree import find_tensors
from persample.backward import is_tap
from persample.errors import ROWS_ADVICE, PerSampleError
from persample.forward.checkpointing import prepare_reentrant
from persample.forward.detectors import Context
from persample.forward.gradient_hooks import check_custom_backward
from persample.layouts import Layout, Lost, Where

# Nodes of functions that combine a weight entry by entry with another tensor, such as pretrained weights or a mask.
_BY_ENTRY = {"MulBackward0", "DivBackward0", "WhereBackward0", "MaskedFillBackward0", "NativeDropoutBackward0"}

# The beginnings of the names of nodes that keep indices which the function has found in its argument.
_FINDS_INDICES = ("Sort", "Topk", "MaxB", "MinB", "Median", "Nanmedian", "Kthvalue", "Mode", "Cummax", "Cummin")


def find_unseen_layout(tensor: Tensor, context: Context) -> Where | None:
    """The layout of a tensor with a `grad_fn` that the tracker did not see being made."""
    if any(map(is_tap, find_nodes(tensor))):
        _refuse_hidden_weight(tensor, context)
        name = type(tensor.grad_fn).__name__
        lost = Lost(f"{name} made a tensor of shape {tuple(tensor.shape)} without a torch function")
        context.set_layout(tensor, lost)
        return lost
    if has_parameters_behind(tensor, context):
        if cause := _find_samples_behind(tensor, context):
            if context.complain is not None:  # of a monitor, which gives up before the backward pass
                raise PerSampleError(f"In a part of the loss, {cause}.")
            context.set_layout(tensor, lost := Lost(cause))
            return lost
        context.processes.check_saved(tensor)
        context.set_layout(tensor, None)
    else:
        context.collector.retained.forbid()
    return None


def check_custom_function(tensor: Tensor, layout: Where, context: Context) -> None:
    """Refuse an `autograd.Function` that uses weights.

    Its result was computed without grad, as far as the mode can see, and has a `grad_fn` now.
    """
    if not prepare_reentrant(context, tensor.grad_fn):
        _refuse_hidden_weight(tensor, context)
        for ask in context.detectors.check_function:
            ask(tensor, layout, context)
        if tensor in context.known.of_hidden_weights:
            raise PerSampleError(
                f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {context.place()}, uses weights that "
                "the recording cannot see (a reversible layer, or its own kind of checkpoint): their gradients would "
                f"arrive as a sum over the batch. Use torch.utils.checkpoint, or turn it off. {ROWS_ADVICE}"
            )
    elif context.collector.uses.early:
        raise PerSampleError(
            "A reentrant checkpoint runs a backward pass of its own, in which not all uses of a weight are known. "
            "Checkpoint with use_reentrant=False, or record with keep='everything'."
        )
    context.set_layout(tensor, layout)


def check_backward(tensor: Tensor, layout: Where | None, context: Context) -> None:
    """Have the backward of an `autograd.Function` checked, which may mix samples.

    In passes that are not audited, this is done if no audited pass had a call of the function with the same settings.
    """
    node: Any = tensor.grad_fn
    if not isinstance(node, BackwardCFunction) or not isinstance(layout, Layout) or is_tap(node):
        return
    if context.batch < 2 or context.is_coupled or node in context.path.checked_nodes:
        return
    context.path.checked_nodes.add(node)
    settings = frozenset((name, type(v), v) for name, v in vars(node).items() if type(v) in (bool, int, str))
    if context.path.is_new_setting((type(node), settings)):
        check_custom_backward(tensor, layout, context)


def refuse_nested(place: str) -> NoReturn:
    """Raise: a nested tensor was met."""
    raise PerSampleError(
        f"A nested tensor is used in {place}. Samples in nested tensors are not followed. Use padded tensors with a "
        f"mask, or packed sequences. {ROWS_ADVICE}"
    )


def _find_samples_behind(tensor: Tensor, context: Context) -> str | None:
    """Say why a tensor looks as if weights were combined with samples before the step began; None if it does not."""
    if context.is_inside or context.outside is None or not context.batch:
        return None
    shapes = {parameter.shape for parameter in context.collector.parameters.values()}
    for node in find_nodes(tensor):
        kind = type(node).__name__
        for saved in () if kind.startswith(_FINDS_INDICES) else find_tensors(_torch.list_saved(node)):
            is_of_weights = saved.requires_grad or (kind in _BY_ENTRY and saved.shape in shapes)
            if is_of_weights or context.batch not in saved.shape or context.outside.is_constant(saved):
                continue
            return (
                f"a tensor of shape {tuple(saved.shape)}, which has the size of the batch, has met weights before the "
                "block or the first call in a step of a watched model, where samples are not followed (compute this "
                "inside, or name the tensor in constants= if it is the same for all samples)"
            )
    return None


def has_parameters_behind(tensor: Tensor, context: Context) -> bool:
    """Whether a backward pass from a tensor would reach parameters other than through a tap."""
    return bool(_find_parameters_behind(tensor, context))


def _find_parameters_behind(tensor: Tensor, context: Context) -> list[Tensor]:
    return [leaf for leaf in find_leaves(tensor) if id(leaf) in context.collector.parameters]


def name_parameters(value: Any, context: Context) -> list[str]:
    """The names of the parameters among some tensors."""
    names = {} if context.model is None else {id(p): name for name, p in context.model.named_parameters()}
    return [names.get(id(t), "?") for t in find_tensors(value) if id(t) in context.collector.parameters]


def _refuse_hidden_weight(tensor: Tensor, context: Context) -> None:
    hidden = _find_parameters_behind(tensor, context)
    if hidden:
        raise PerSampleError(
            f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {context.place()}, uses the parameter "
            f"'{name_parameters(hidden, context)[0]}' together with samples: its gradient arrives as a sum over the "
            "batch. Write the function with torch functions, or make it a torch function (torch.overrides) and "
            f"register a rule for it with persample.register_rule. {ROWS_ADVICE}"
        )
