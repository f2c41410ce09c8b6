"""A call of `torch.lstm` and its like, rewritten as one call of `layer` for each of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from persample.rules.recurrent.cells import CELLS
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite

State = tuple[Tensor, ...]

_COMMON = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_OF_A_TENSOR = ("input", *_COMMON, "batch_first")
_OF_PACKED_ROWS = ("data", "batch_sizes", *_COMMON)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recurrent function by their names, which differ between its two forms."""
    second = kwargs.get("batch_sizes", args[1] if len(args) > 1 else None)
    packed = isinstance(second, Tensor) and not second.is_floating_point()
    return {**dict(zip(_OF_PACKED_ROWS if packed else _OF_A_TENSOR, args, strict=False)), **kwargs}


def _rewritten(func: Callable[..., Any]) -> Callable[..., Any]:
    def layers(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = arguments(args, kwargs)
        packed = "data" in call
        x, sizes = (call["data"], call["batch_sizes"]) if packed else (call["input"], None)
        state = batch_second(tuple(call["hx"]) if isinstance(call["hx"], (tuple, list)) else (call["hx"],))
        swapped = bool(call.get("batch_first"))
        if swapped:
            x = x.transpose(0, 1)
        valid = torch.ones_like(x[:, :1], dtype=torch.bool) if packed else None
        count, directions = call["num_layers"], 2 if call["bidirectional"] else 1
        per_layer = len(call["params"]) // count
        last: list[State] = []
        for k in range(count):
            if k and call["train"] and call["dropout"]:
                x = F.dropout(x, call["dropout"])
            own = state if count == 1 else tuple(s[k * directions : (k + 1) * directions] for s in state)
            weights = list(call["params"][k * per_layer : (k + 1) * per_layer])
            x, *after = layer(func, x, own, weights, sizes, valid, call["has_biases"], directions == 2)
            last.append(tuple(after))
        states = last[0] if count == 1 else tuple(torch.cat(parts) for parts in zip(*last, strict=True))
        return (x.transpose(0, 1) if swapped else x), *states

    return layers


HANDLED_FUNCTIONS.update({func: Rewrite(_rewritten(func)) for func in CELLS})


def batch_second(state: State) -> State:
    """The state itself: each a `(layers, B, width)`, also where its shape alone would allow another reading."""
    if has_torch_function(state):
        return handle_torch_function(batch_second, state, state)
    return state


def layer(
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
            layer, tensors, func, input, state, weights, sizes, valid, has_biases, bidirectional
        )
    state = tuple(s.contiguous() for s in state)
    hx = state if func is torch.lstm else state[0]
    if sizes is None:
        return func(input, hx, weights, has_biases, 1, 0.0, False, bidirectional, False)
    return func(input, sizes, hx, weights, has_biases, 1, 0.0, False, bidirectional)
