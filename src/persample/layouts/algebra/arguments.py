"""The arguments of a call in the order of the function's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from persample import _torch
from persample._internal.tree import find_tensors
from persample.errors import get_op_name
from persample.layouts.call import Call

# Parameter names with their defaults, in the order of the signature.
Signature = Mapping[str, Any]

# The first parameter of a method is called "self", that of a function "input" in most cases.
_FIRST = {"self", "input"}


def has_tensors_by_keyword(call: Call) -> bool:
    """Whether keyword arguments hold tensors, which may be in any order."""
    return bool(call.kwargs) and any(True for _ in find_tensors(call.kwargs))


def put_tensors_in_order(call: Call) -> tuple[Call, list[int]] | None:
    """The same call with all tensors by position, and the position that each tensor had in the original call.

    Returns None if the signature of the function is not known.
    """
    for signature in find_signatures(call.func):
        arguments = _bind(call, signature)
        if arguments is not None:
            break
    else:
        return None
    args, kwargs = arguments
    tensors = tuple(find_tensors((args, kwargs)))
    positions: list[int] = []
    for tensor in tensors:  # one tensor may be two arguments
        own = (i for i, t in enumerate(call.tensors) if t is tensor and i not in positions)
        positions.append(next(own))
    where = tuple(call.where[i] for i in positions)
    return replace(call, args=args, kwargs=kwargs, tensors=tensors, where=where), positions


def _bind(call: Call, signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional arguments up to the last tensor, and the remaining keyword arguments; None if they do not fit."""
    rest = {("self" if name in _FIRST else name): value for name, value in call.kwargs.items()}
    names = ["self" if name in _FIRST else name for name in signature]
    if not rest.keys() <= set(names) or len(call.args) > len(names):
        return None
    args = list(call.args)
    for name, default in list(zip(names, signature.values(), strict=True))[len(args) :]:
        if not any(True for _ in find_tensors(rest)):
            break
        args.append(rest.pop(name, default))
    return tuple(args), rest


def name_arguments(call: Call) -> dict[str, Any]:
    """All arguments of a call of a Python function by name, with their defaults."""
    (signature,) = find_signatures(call.func)
    return {**signature, **dict(zip(signature, call.args, strict=False)), **call.kwargs}


@cache
def find_signatures(func: Callable[..., Any]) -> tuple[Signature, ...]:
    """The signatures of a torch function: one of a Python function, one for each overload of others.

    >>> import torch
    >>> [*find_signatures(torch.nn.functional.linear)[0]]
    ['input', 'weight', 'bias']
    """
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return tuple(_torch.find_signatures(get_op_name(func).strip("_")))
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return ()
    return ({p.name: None if p.default is p.empty else p.default for p in parameters},)
