"""A call of a torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from persample.errors import op_name
from persample.layout import Layout, Where
from persample.tree import map_tensors, tensors_in

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)}


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
        args, kwargs = self.filled(tensors)
        return results_of(self.func(*args, **kwargs), args)

    def filled(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with other values in the place of the tensors."""
        supply = iter(tensors)
        return map_tensors(lambda _: next(supply), (self.args, self.kwargs))


def op_of(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    where_of: Callable[[Tensor], Where | None],
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
    op = Op(func, args, kwargs, tuple(tensors), tuple(where), batch)
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


@cache
def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = op_name(func)
    return name in _INPLACE or (name.endswith("_") and not name.endswith("__"))


def results_of(result: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors that a call gave: in its result, or its first argument where it returns nothing (`x[i] = y`)."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(tensors_in(args[0] if result is None and args else result))
