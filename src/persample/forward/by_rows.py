"""Uses of weights on a batch that was split into several dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from persample._internal.facts import find_functions
from persample.layouts import Call, Layout, Scattered, get_argument

# Functions of the last dimensions, and the number of these dimensions. The others are a batch.
_OF_ROWS: dict[Any, Callable[[Call], int]] = {
    F.linear: lambda call: 1,
    F.embedding: lambda call: 0,
    **dict.fromkeys(
        find_functions("layer_norm", "rms_norm"), lambda call: len(get_argument(call, 1, "normalized_shape"))
    ),
}


def use_by_rows(call: Call, find_layout: Callable[[Tensor], Any]) -> Any:
    """The result of a call on the rows of its first argument; NotImplemented if it has no such form.

    The rows lie along one dimension, and each belongs to one sample.
    """
    if call.func not in _OF_ROWS or not isinstance(call.where[0], Scattered) or any(call.where[1:]) or not call.args:
        return NotImplemented
    given = call.args[0]
    leading = given.dim() - _OF_ROWS[call.func](call)
    rows = given.flatten(0, leading - 1)
    if not isinstance(find_layout(rows), Layout):
        return NotImplemented
    return call.func(rows, *call.args[1:], **call.kwargs).unflatten(0, given.shape[:leading])
