"""Facts about a call of a torch function that follow from its name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from persample._internal.tree import find_tensors
from persample.errors import get_op_name

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)}

# Functions that return the memory of a tensor to code outside torch.
EXPOSING: set[Any] = {
    Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage,
    Tensor.share_memory_,
}  # fmt: skip


@cache
def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument.

    >>> is_inplace(Tensor.add_), is_inplace(Tensor.__add__)
    (True, False)
    """
    name = get_op_name(func)
    return name in _INPLACE or (name.endswith("_") and not name.endswith("__"))


def find_results(result: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors in the result of a call, or in its first argument if the call returns None (`x[i] = y`)."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(find_tensors(args[0] if result is None and args else result))


def find_bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[Tensor, int]:
    """The bag of each index in `input`, and the number of bags; the arguments are as in `F.embedding_bag`."""
    if input.dim() == 2:
        return torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1]), len(input)
    assert offsets is not None  # torch raises otherwise
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(len(input), device=input.device)
    return torch.searchsorted(starts.contiguous(), positions.to(starts.dtype), right=True) - 1, len(starts)
