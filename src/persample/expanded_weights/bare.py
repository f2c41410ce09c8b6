"""A call of one function on ExpandedWeights, without call_for_per_sample_grads: one tracked op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.recurrent import name_arguments
from persample._internal.tree import find_tensors, map_tensors
from persample.backward import Collector
from persample.expanded_weights.helpers import (
    LAYOUT_OPTIONS,
    check_call,
    expanded_weights_in,
    is_batch_first,
    original,
    to_grad_sample,
    unpack_expanded_weight_or_tensor,
)
from persample.expanded_weights.tensor import ExpandedWeight
from persample.forward import Tracker, make_advice
from persample.layouts import Layout, make_packed_layout
from persample.rules import HANDLED_FUNCTIONS, Rewrite, Rule


def call_with_rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that has a rule, so that backward leaves `grad_sample` in the original weights."""
    handler = HANDLED_FUNCTIONS[func]
    if isinstance(handler, type):
        return handler.apply(tuple(kwargs), func, *args, *kwargs.values())  # type: ignore[attr-defined]
    expanded = expanded_weights_in((args, kwargs))
    if isinstance(handler, Rewrite):
        batch, layouts = _recurrent_layouts(func, name_arguments(args, kwargs), expanded[0])
    else:
        batch, layouts = _input_layout(func, handler, handler.bind(args, kwargs))
    first = expanded[0]
    collector = Collector([w.orig_weight for w in expanded], to_grad_sample(first.batch_size, first.loss_reduction))
    tracker = Tracker(collector, batch=batch, loss_reduction=first.loss_reduction, advice=make_advice(LAYOUT_OPTIONS))
    for tensor, layout in layouts:
        tracker.add_input(tensor, layout)
    args, kwargs = map_tensors(original, (args, kwargs))
    with tracker.mode:
        return func(*args, **kwargs)


Layouts = list[tuple[Tensor, Layout]]


def _input_layout(func: Callable[..., Any], rule: Rule, call: dict[str, Any]) -> tuple[int, Layouts]:
    """Check a call; return the number of samples in the function's input, and its layout."""
    input = next(call[name] for name in rule.batched if name in call)
    if isinstance(input, Tensor) and not isinstance(input, ExpandedWeight):
        _check_shape(func, call, input)
    check_call(func, [input], call)
    for name in call.keys() - rule.batched:
        unpack_expanded_weight_or_tensor(call[name])
    dim = 0 if is_batch_first(list(call.values())) else 1
    return input.shape[dim], [(input, Layout(dim))]


def _check_shape(func: Callable[..., Any], call: dict[str, Any], input: Tensor) -> None:
    """Refuse inputs without a batch dimension, and layer norms over the batch dimension."""
    if func is F.linear and input.dim() < 2:
        raise RuntimeError(
            "Input does not have a batch dimension. Expanded Weights expected input of at least rank 2, "
            f"got of rank {input.dim()}"
        )
    if func in (torch.conv1d, torch.conv2d, torch.conv3d):
        if input.dim() != call["weight"].dim():
            raise RuntimeError(
                "Expanded Weights only support convolution with batched input, got "
                f"input with {input.dim()} dims for a weight with {call['weight'].dim()}"
            )
        padding = call.get("padding", 0)
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise RuntimeError(f"got padding type of {padding}, only accept 'same' or 'valid'")
    if func in (F.embedding, torch.embedding) and input.dim() < 2:
        raise RuntimeError(f"Expanded Weights needs an input with a batch size, got a 1D tensor, {tuple(input.shape)}")
    if func in (F.layer_norm, torch.layer_norm):
        shape = tuple(call["normalized_shape"])
        batch_dim = 0 if is_batch_first(list(call.values())) else 1
        if batch_dim >= input.dim() - len(shape):
            raise RuntimeError(
                "Expanded Weights: Layer norm should not normalize over batch dimension for per sample gradient "
                f"computations but got that normalized shape, {shape}, covers dim {batch_dim} of an input of shape "
                f"{tuple(input.shape)}"
            )


def _recurrent_layouts(func: Callable[..., Any], call: dict[str, Any], weight: ExpandedWeight) -> tuple[int, Layouts]:
    """Check a recurrent call; return the number of samples, and the layouts of its input and states."""
    packed = "data" in call
    input = call["data"] if packed else call["input"]
    is_batch_first(call["params"])
    for parameter in call["params"]:
        unpack_expanded_weight_or_tensor(parameter)
    # The call decides where the batch lies, so the checks of the weights get an input with the batch in front.
    plain = isinstance(input, Tensor) and not isinstance(input, ExpandedWeight) and input.dim() > 0
    if plain and packed:
        batch, layout = (
            int(call["batch_sizes"][0]),
            make_packed_layout(call["batch_sizes"], None, int(call["batch_sizes"][0])),
        )
    elif plain:
        layout = Layout(0 if call["batch_first"] else 1)
        batch = input.shape[layout.dim] if input.dim() > layout.dim else 0
    check_call(func, [input.new_empty(batch, batch) if plain else input], call)
    return batch, [(input, layout), *((state, Layout(1)) for state in find_tensors(call["hx"]))]
