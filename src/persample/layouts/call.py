"""A call of a torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.functions import find_results, is_inplace
from persample._internal.tree import map_tensors
from persample.layouts.counts import CountedSizes
from persample.layouts.layout import Layout, Where


@dataclass(slots=True)
class Op:
    """A call of a torch function, its tensors apart: `where[i]` tells where the samples lie in `tensors[i]`.

    `kind` is all that matters of the call but the values of its tensors: calls of one kind move the samples alike.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    where: tuple[Where | None, ...]
    batch: int
    counted: CountedSizes = field(default_factory=CountedSizes)
    kind: tuple[Any, ...] = field(default=(), init=False)  # so that a copy with other arguments has none

    @property
    def inplace(self) -> bool:
        """Whether the op changes its first argument."""
        return is_inplace(self.func)

    def samples(self) -> set[int]:
        """The samples that take part in the op."""
        found: set[int] = set()
        for tensor, where in zip(self.tensors, self.where, strict=True):
            if isinstance(where, Layout):
                whole_batch = where.ids is None and tensor.shape[where.dim] > 0
                found |= set(range(self.batch) if whole_batch else where.ids or ())
        return found - {-1}

    def has_nobodys_rows(self) -> bool:
        """Whether rows that belong to no sample lie among those of samples."""
        return any(isinstance(where, Layout) and where.ids is not None and -1 in where.ids for where in self.where)

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of the result, computed with other tensors in the place of the op's own."""
        args, kwargs = self.fill(tensors)
        return find_results(self.func(*args, **kwargs), args)

    def fill(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with other values in the place of the tensors."""
        supply = iter(tensors)
        return map_tensors(lambda _: next(supply), (self.args, self.kwargs))


def op_of(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    where_of: Callable[[Tensor], Where | None],
    counted: CountedSizes | None = None,
) -> Op:
    """A call as an op: its tensors, where the samples lie in them, and its kind, all in one walk."""
    tensors: list[Tensor] = []
    where: list[Where | None] = []
    kind: list[Any] = [func, batch, len(args)]
    for arg in args:
        if isinstance(arg, Tensor):  # as below, without a call
            place = where_of(arg)
            tensors.append(arg)
            where.append(place)
            kind += (arg.shape, arg.dtype, arg.layout, arg.requires_grad, place)
        else:
            _look_at(arg, where_of, tensors, where, kind)
    for name, arg in kwargs.items():
        kind.append(name)
        _look_at(arg, where_of, tensors, where, kind)
    op = Op(func, args, kwargs, tuple(tensors), tuple(where), batch, counted or CountedSizes())
    op.kind = tuple(kind)
    return op


def _look_at(
    value: Any,
    where_of: Callable[[Tensor], Where | None],
    tensors: list[Tensor],
    where: list[Where | None],
    kind: list[Any],
) -> None:
    if isinstance(value, Tensor):
        place = where_of(value)
        tensors.append(value)
        where.append(place)
        kind += (value.shape, value.dtype, value.layout, value.requires_grad, place)
    elif isinstance(value, (tuple, list)):
        kind += (type(value), len(value))
        for part in value:
            _look_at(part, where_of, tensors, where, kind)
    elif isinstance(value, dict):
        kind += (dict, len(value))
        for name, part in value.items():
            kind.append(name)
            _look_at(part, where_of, tensors, where, kind)
    elif isinstance(value, slice):
        kind.append(slice)
        _look_at((value.start, value.stop, value.step), where_of, tensors, where, kind)
    else:
        kind += (type(value), value)


def without_batch_size(kind: tuple[Any, ...]) -> Any:
    """The kind of a call with the batch's size taken out; None if it may matter in other ways.

    So it may for functions that are not torch's own, which can do anything with it; where it, or a multiple, is among
    the arguments as a number; and where samples lie one by one. One sample alone says nothing of how several would go.
    """
    func, batch, *rest = kind
    if batch < 2 or not _is_function_of_torch(func):
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
def _is_function_of_torch(func: Callable[..., Any]) -> bool:
    if (name := _torch.get_operator_name(func)) is not None:
        return name.startswith("aten::")
    owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
    module = getattr(func, "__module__", None) or ""
    return module.split(".")[0] == "torch" or (isinstance(owner, type) and issubclass(Tensor, owner))
