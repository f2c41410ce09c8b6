"""What was found for batches of two sizes, for those of all others: Poisson sampling gives each batch another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from persample.layout import Layout, Lost
from persample.motion.motion import Motion

_MOST_REMEMBERED = 20_000


@dataclass
class _Seen:
    """The motion that was found for batches of these sizes; None if they differ."""

    motion: Motion | None
    sizes: set[int] = field(default_factory=set)


_seen: dict[Any, _Seen] = {}


def of_any_batch(kind: tuple[Any, ...]) -> Motion | None:
    """How calls of this kind move the samples, if that was found for two other sizes of the batch, and alike."""
    key = _without_size(kind)
    seen = None if key is None else _seen.get(key)
    return seen.motion if seen is not None and len(seen.sizes) > 1 else None


def learn(kind: tuple[Any, ...], motion: Motion) -> Motion:
    """Takes note of what was found by looking; gives that of the other size if it is the same."""
    key = _without_size(kind)
    if key is None:
        return motion
    if len(_seen) >= _MOST_REMEMBERED:
        _seen.clear()
    seen = _seen.setdefault(key, _Seen(motion))
    if seen.motion is None or seen.motion != motion or not _says_nothing_of_size(motion):
        seen.motion = None
        return motion
    seen.sizes.add(kind[1])
    return seen.motion


def _says_nothing_of_size(motion: Motion) -> bool:
    lists = any(isinstance(w, Lost) or (isinstance(w, Layout) and w.ids is not None) for w in motion.results)
    return not (lists or motion.following or motion.by_values)


def _without_size(kind: tuple[Any, ...]) -> Any:
    """The kind of a call with the batch's size taken out; None if it may matter in other ways.

    So it may for functions that are not torch's own, which can do anything with it; where it, or a multiple, is among
    the arguments as a number; and where samples lie one by one. One sample alone says nothing of how several would go.
    """
    func, batch, *rest = kind
    if batch < 2 or not _is_torchs(func):
        return None
    key: list[Any] = [func]
    for i, item in enumerate(rest):
        if isinstance(item, torch.Size):  # of a tensor; where its samples lie comes at the end
            where = rest[i + 4]
            if isinstance(where, Layout):
                if where.ids is not None or not item or item[where.dim] % batch:
                    return None
                item = (*item[: where.dim], ("samples", item[where.dim] // batch), *item[where.dim + 1 :])
        elif type(item) is int and rest[i - 1] is int and item and item % batch == 0:
            return None
        key.append(item)
    try:
        hash(found := tuple(key))
    except TypeError:
        return None
    return found


@cache
def _is_torchs(func: Callable[..., Any]) -> bool:
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        return str(packet._qualified_op_name).startswith("aten::")
    owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
    module = getattr(func, "__module__", None) or ""
    return module.split(".")[0] == "torch" or (isinstance(owner, type) and issubclass(Tensor, owner))
