"""Digests of models, functions and data, to detect changes before a scan is continued."""

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
_CONSTANT = (*_PLAIN, tuple, Tensor, FunctionType, partial, nn.Module)  # types of values that calls do not change
_MAX_DEPTH = 8  # of objects inside objects


def compute_digest(*parts: Any) -> str:
    """Digest of the contents of tensors, numbers, texts, containers, functions and modules.

    >>> compute_digest([1, torch.ones(2)]) == compute_digest([1, torch.ones(2)])
    True
    >>> compute_digest([1]) == compute_digest([2]), compute_digest(lambda x: x + 1) == compute_digest(lambda x: x + 2)
    (False, False)
    """
    digest = hashlib.sha256()
    _update(digest, parts, depth=0)
    return digest.hexdigest()[:16]


def _update(digest: Any, value: Any, depth: int) -> None:
    if (gather := getattr(value, "full_tensor", None)) is not None:  # sharded over processes, all of which are here
        value = nn.Parameter(gather()) if isinstance(value, nn.Parameter) else gather()
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, _PLAIN):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _update(digest, [str(key), part], depth)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _update(digest, part, depth)
    elif hasattr(value, "tobytes"):  # a numpy array or a PIL image
        digest.update(value.tobytes())
    elif depth < _MAX_DEPTH:
        _update(digest, _get_contents(value), depth + 1)


def _get_contents(value: Any) -> Any:
    """The values inside an object that determine what it does."""
    if isinstance(value, nn.Module):
        tensors = [dict(value.named_parameters()), dict(value.named_buffers())]
        return [describe_structure(value), *tensors, _get_module_settings(value)]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_consts, value.co_names]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, [*_iterate_constant_cells(value)]]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    attributes = getattr(value, "__dict__", {})
    if callable(value):  # such as a collator: calls may change its other attributes, for example a cache
        return {key: part for key, part in attributes.items() if isinstance(part, _CONSTANT)}
    return attributes


def _iterate_constant_cells(function: FunctionType) -> Iterator[Any]:
    """Values from the enclosing scope of a function, without those that it may change, such as lists."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, _CONSTANT):
                yield cell.cell_contents


def describe_structure(model: nn.Module) -> str:
    """The `repr` of a model without memory addresses, which differ in each process, and as it is without FSDP."""
    return re.sub(r"0x[0-9a-f]+|\bFSDP(?=[A-Z])", "", repr(model))


def _get_module_settings(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of all submodules, such as the label smoothing of a loss."""
    return {
        f"{name}.{key}": value
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if not key.startswith("_") and key != "training" and isinstance(value, _PLAIN)
    }
