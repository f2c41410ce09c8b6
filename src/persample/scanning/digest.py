"""Short names for contents, by which a scan that goes on sees that it is still the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_FIXED = (*_PLAIN, tuple, Tensor, FunctionType, partial, nn.Module)  # what does not change as a program runs
_DEEP = 8  # objects in objects that are looked at


def digest_of(*values: Any) -> str:
    """Differs where the contents do: of tensors, numbers, texts and what is made of them, functions, and modules.

    >>> digest_of([1, torch.ones(2)]) == digest_of([1, torch.ones(2)]), digest_of([1]) == digest_of([2])
    (True, False)
    >>> digest_of(lambda x: x + 1) == digest_of(lambda x: x + 2)
    False
    """
    digest = hashlib.sha256()
    _add(digest, values, depth=0)
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any, depth: int) -> None:
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, _PLAIN):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _add(digest, [str(key), part], depth)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _add(digest, part, depth)
    elif hasattr(value, "tobytes"):  # of numpy, or a picture
        digest.update(value.tobytes())
    elif depth < _DEEP:
        _add(digest, _inside(value), depth + 1)


def _inside(value: Any) -> Any:
    """What an object is made of, as far as it can be seen."""
    if isinstance(value, nn.Module):
        return [structure_of(value), dict(value.named_parameters()), dict(value.named_buffers()), _settings(value)]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_consts, value.co_names]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, [*_fixed_cells(value)]]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    parts = getattr(value, "__dict__", {})
    if callable(value):  # such as a collator: its tokenizer, or what it counts, may change as it is called
        return {key: part for key, part in parts.items() if isinstance(part, _FIXED)}
    return parts


def _fixed_cells(function: FunctionType) -> Iterator[Any]:
    """What a function has from around it, but for what it may change as it runs, such as a list or a counter."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            if isinstance(cell.cell_contents, _FIXED):
                yield cell.cell_contents


def structure_of(model: nn.Module) -> str:
    """The modules of a model as it prints itself, without what differs in each process."""
    return re.sub(r"0x[0-9a-f]+", "", repr(model))


def _settings(module: nn.Module) -> dict[str, Any]:
    """What modules have beside parameters and buffers, such as the smoothing of a loss."""
    return {
        f"{name}.{key}": value
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if not key.startswith("_") and key != "training" and isinstance(value, _PLAIN)
    }
