"""Turn off dropout in all of its spellings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from persample._internal.facts import facts
from persample._internal.functions import find_dropped
from persample._internal.recurrent import name_arguments

# Functions with an argument `dropout_p`, and its position.
_ATTENTION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class NoDropoutMode(TorchFunctionMode):
    """Calls the dropout functions of torch, and functions with dropout inside, as in evaluation.

    >>> import persample.layouts  # has the facts about dropout
    >>> with NoDropoutMode():
    ...     F.dropout(torch.ones(3), 0.9)
    tensor([1., 1., 1.])
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), **find_dropped(func)}
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if position := facts(func).training_at:
            args, kwargs = _replace(args, kwargs, position, "train" if "train" in kwargs else "training", False)
        elif func in _ATTENTION:
            args, kwargs = _replace(args, kwargs, _ATTENTION[func], "dropout_p", 0.0)
        elif func in _RECURRENT:
            position = list(name_arguments(tuple(args), kwargs)).index("dropout")
            args, kwargs = _replace(args, kwargs, position, "dropout", 0.0)
        return func(*args, **kwargs)


def _replace(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, value: Any) -> tuple[Any, Any]:
    """The arguments of a call with another value for one of them."""
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}
