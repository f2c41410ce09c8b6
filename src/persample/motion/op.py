"""A call of a torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from persample.errors import op_name
from persample.layout import Layout, Where
from persample.tree import map_tensors, tensors_in

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)}


@dataclass(frozen=True)
class Op:
    """A call of a torch function, its tensors apart: `where[i]` tells where the samples lie in `tensors[i]`."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    where: tuple[Where | None, ...]
    batch: int

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


@cache
def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = op_name(func)
    return name in _INPLACE or (name.endswith("_") and not name.endswith("__"))


def results_of(result: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors that a call gave: in its result, or its first argument where it returns nothing (`x[i] = y`)."""
    return tuple(tensors_in(args[0] if result is None and args else result))
