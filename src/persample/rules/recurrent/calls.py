"""Rewrite a call of `torch.lstm`, `torch.gru` or `torch.rnn_*` as one call of `recurrent_layer` per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.recurrent import State, declare_batch_second, name_arguments, recurrent_layer
from persample.rules.recurrent.cells import CELLS
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite


def _rewrite(func: Callable[..., Any]) -> Callable[..., Any]:
    def run_layers(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = name_arguments(args, kwargs)
        packed = "data" in call
        x, sizes = (call["data"], call["batch_sizes"]) if packed else (call["input"], None)
        state = declare_batch_second(tuple(call["hx"]) if isinstance(call["hx"], (tuple, list)) else (call["hx"],))
        batch_first = bool(call.get("batch_first"))
        if batch_first:
            x = x.transpose(0, 1)
        valid = torch.ones_like(x[:, :1], dtype=torch.bool) if packed else None
        count, directions = call["num_layers"], 2 if call["bidirectional"] else 1
        weights_per_layer = len(call["params"]) // count
        last_states: list[State] = []
        for k in range(count):
            if k and call["train"] and call["dropout"]:
                x = F.dropout(x, call["dropout"])
            first = state if count == 1 else tuple(s[k * directions : (k + 1) * directions] for s in state)
            weights = list(call["params"][k * weights_per_layer : (k + 1) * weights_per_layer])
            x, *last = recurrent_layer(func, x, first, weights, sizes, valid, call["has_biases"], directions == 2)
            last_states.append(tuple(last))
        states = last_states[0] if count == 1 else tuple(torch.cat(parts) for parts in zip(*last_states, strict=True))
        return (x.transpose(0, 1) if batch_first else x), *states

    return run_layers


HANDLED_FUNCTIONS.update({func: Rewrite(_rewrite(func)) for func in CELLS})
