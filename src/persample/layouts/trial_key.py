"""Which trials can be cached, and under which key.

A trial observes a call. Its result holds for another call only if nothing that could decide differs: the function is
one of torch, its arguments are plain values and tensors of numbers with the same shapes, strides and layouts, and the
flags of torch are the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from persample._internal.tree import map_tensors
from persample.layouts.call import Call, CallKey

_PLAIN = (
    int, float, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def make_trial_key(call: Call) -> CallKey | None:
    """The key under which the result of a trial is cached; None if it must not be cached."""
    is_decided_by_numbers = all(t.is_floating_point() or t.is_complex() for t in call.tensors)
    arguments = map_tensors(lambda _: None, (call.args, call.kwargs))
    if not is_decided_by_numbers or call.func not in _find_torch_functions() or not _is_plain(arguments):
        return None
    return ("trial", call.key, tuple(t.stride() for t in call.tensors), _read_flags(call.tensors[0].device.type))


@cache
def _find_torch_functions() -> frozenset[Any]:
    return frozenset(function for functions in get_overridable_functions().values() for function in functions)


def _is_plain(value: Any) -> bool:
    """Whether a value is fully described by its key: not an object that can change."""
    if type(value) in (tuple, list, torch.Size):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) is slice:
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    return isinstance(value, _PLAIN)


def _read_flags(device: str) -> tuple[Any, ...]:
    """The flags of torch that a function may read."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        torch.backends.mkldnn.enabled,
    )
