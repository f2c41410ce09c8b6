"""The recurrent functions of torch: their arguments, and one layer of them as a torch function of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

State = tuple[Tensor, ...]

_COMMON = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_OF_A_TENSOR = ("input", *_COMMON, "batch_first")
_OF_PACKED_ROWS = ("data", "batch_sizes", *_COMMON)


def name_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recurrent function by their names, which differ between its two forms."""
    second = kwargs.get("batch_sizes", args[1] if len(args) > 1 else None)
    packed = isinstance(second, Tensor) and not second.is_floating_point()
    return {**dict(zip(_OF_PACKED_ROWS if packed else _OF_A_TENSOR, args, strict=False)), **kwargs}


def declare_batch_second(state: State) -> State:
    """The state itself: each a `(layers, B, width)`, also where its shape alone would allow another reading."""
    if has_torch_function(state):
        return handle_torch_function(declare_batch_second, state, state)
    return state


def recurrent_layer(
    func: Callable[..., Any],
    input: Tensor,
    state: State,
    weights: Sequence[Tensor],
    sizes: Tensor | None,
    valid: Tensor | None,
    has_biases: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """One layer, both its directions: `(T, B, in)` to `(T, B, out)`, or packed rows with `sizes` of them a step.

    `valid` is a one for each packed row: told apart by sample, it says how long each sample is.
    """
    tensors = (input, *state, *weights)
    if has_torch_function(tensors):
        return handle_torch_function(
            recurrent_layer, tensors, func, input, state, weights, sizes, valid, has_biases, bidirectional
        )
    state = tuple(s.contiguous() for s in state)
    hx = state if func is torch.lstm else state[0]
    if sizes is None:
        return func(input, hx, weights, has_biases, 1, 0.0, False, bidirectional, False)
    return func(input, sizes, hx, weights, has_biases, 1, 0.0, False, bidirectional)
