"""Tensors inside nested lists, tuples and dicts, which is how torch functions nest their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import CellType
from typing import Any

from torch import Tensor, nn

from persample import _torch


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order.

    >>> import torch
    >>> [t.numel() for t in find_tensors((torch.ones(2), [1, torch.ones(3)], {"bias": torch.ones(4)}))]
    [2, 3, 4]
    """
    found: list[Tensor] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _collect(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found)


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """A copy of `value` with `fn(t)` for each tensor t. `fn` is called in the order of `find_tensors`.

    >>> import torch
    >>> map_tensors(torch.numel, (torch.ones(2), [1, torch.ones(3)]))
    (2, [1, 3])
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple):
        parts = [map_tensors(fn, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [map_tensors(fn, part) for part in value]
    if isinstance(value, dict):
        return {key: map_tensors(fn, part) for key, part in value.items()}
    return value


@dataclass(frozen=True)
class Slot:
    """Placeholder for the tensor at this position in the order of `find_tensors`."""

    position: int


def take_out_tensors(value: Any) -> Any:
    """A copy of `value` with a `Slot` for each tensor, so that the copy keeps no tensor alive."""
    positions = count()
    return map_tensors(lambda _: Slot(next(positions)), value)


def find_slots(value: Any) -> Iterator[int]:
    """The positions of the slots in `value`.

    >>> list(find_slots((Slot(0), [1, Slot(1)])))
    [0, 1]
    """
    if isinstance(value, Slot):
        yield value.position
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from find_slots(part)


def put_in_tensors(value: Any, tensors: Sequence[Any] | Mapping[int, Any]) -> Any:
    """A copy of `value` with `tensors[slot.position]` for each slot; the inverse of `take_out_tensors`.

    >>> put_in_tensors(take_out_tensors((1, [None])), [])
    (1, [None])
    """
    if isinstance(value, Slot):
        return tensors[value.position]
    if isinstance(value, (tuple, list)):
        return type(value)([tensors[p.position] if type(p) is Slot else put_in_tensors(p, tensors) for p in value])
    if isinstance(value, dict):
        return {key: put_in_tensors(part, tensors) for key, part in value.items()}
    return value


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a pytree, and in the attributes of objects that it holds."""
    for leaf in [value] if isinstance(value, Tensor) else _torch.pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif has_attributes(leaf):
            yield from iterate_tensors(list(vars(leaf).values()))


def has_attributes(value: Any) -> bool:
    """Whether a value is an object that may hold tensors in its attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value)


def is_filled(cell: CellType) -> bool:
    """Whether the variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def list_slots(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class and its bases, other than those of Python's own classes."""
    given = [vars(base).get("__slots__", ()) for base in kind.__mro__ if base.__module__ != "builtins"]
    names = [name for slots in given for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))
