"""The arguments of torch's recurrent functions, and one recurrent layer as a torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

State = tuple[Tensor, ...]

_COMMON = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", *_COMMON, "batch_first")
_PACKED = ("data", "batch_sizes", *_COMMON)


def name_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recurrent function by name; its forms for padded and for packed sequences differ."""
    second = kwargs.get("batch_sizes", args[1] if len(args) > 1 else None)
    packed = isinstance(second, Tensor) and not second.is_floating_point()
    return {**dict(zip(_PACKED if packed else _PADDED, args, strict=False)), **kwargs}


def declare_batch_second(state: State) -> State:
    """Return the state unchanged. The call tells a tracker that each part is a `(layers, B, width)`.

    The shape alone is ambiguous if another dimension has the size of the batch.
    """
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
    """Run one layer of `func` (`torch.lstm`, `torch.gru`, ...) in one or both directions.

    `input` is `(T, B, in)`, or the rows of a packed sequence with `sizes[t]` rows in step t. Returns the output, shaped
    like the input, and the parts of the last state. `valid` is True for each packed row and does not change the result:
    grouped by sample, it tells the rule the length of each sequence.
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
