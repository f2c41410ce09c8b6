"""One call of a torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from persample._internal.facts import Facts, facts
from persample._internal.functions import find_results, is_inplace
from persample._internal.tree import map_tensors
from persample.layouts.counts import CountedSizes
from persample.layouts.keys import Arguments, Key, describe_arguments, make_key
from persample.layouts.layout import Layout, Where


@dataclass(slots=True)
class Call:
    """One call of a torch function: `where[i]` says where the samples lie in `tensors[i]`.

    `tensors` are the tensors in the arguments, in the order of `find_tensors`.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    where: tuple[Where | None, ...]
    batch: int
    counted: CountedSizes = field(default_factory=CountedSizes)
    # Not copied: a copy may have other arguments.
    _arguments: Arguments | None = field(default=None, init=False, repr=False)
    _key: Key | None = field(default=None, init=False, repr=False)

    @property
    def arguments(self) -> Arguments:
        """What the arguments are, besides their tensors."""
        if self._arguments is None:
            self._arguments = describe_arguments(self.args, self.kwargs, [])
        return self._arguments

    @property
    def key(self) -> Key:
        """The key of the call with sizes."""
        if self._key is None:
            self._key = make_key(self)
        return self._key

    @property
    def facts(self) -> Facts:
        """What is known about the function."""
        return facts(self.func)

    @property
    def is_inplace(self) -> bool:
        """Whether the call changes its first argument."""
        return is_inplace(self.func)

    def find_samples(self) -> set[int]:
        """The samples that the arguments hold."""
        found: set[int] = set()
        for tensor, where in zip(self.tensors, self.where, strict=True):
            if isinstance(where, Layout):
                is_whole_batch = where.ids is None and tensor.shape[where.dim] > 0
                found |= set(range(self.batch) if is_whole_batch else where.ids or ())
        return found - {-1}

    def has_loose_rows(self) -> bool:
        """Whether an argument has rows whose order depends on all samples."""
        return any(isinstance(where, Layout) and where.loose for where in self.where)

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors in the result of the same call with other tensors."""
        args, kwargs = self.fill(tensors)
        return find_results(self.func(*args, **kwargs), args)

    def fill(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The positional and keyword arguments with other values in the places of the tensors."""
        supply = iter(tensors)
        return map_tensors(lambda _: next(supply), (self.args, self.kwargs))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call with other tensors in the places of its tensors."""
        args, kwargs = self.fill(tensors)
        return replace(self, args=args, kwargs=kwargs, tensors=tuple(tensors))


def make_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    find_layout: Callable[[Tensor], Where | None],
    counted: CountedSizes | None = None,
) -> Call:
    """Find the tensors of a call and their layouts, and what its keys are made of, in one walk over the arguments."""
    tensors: list[Tensor] = []
    arguments = describe_arguments(args, kwargs, tensors)
    where = tuple([find_layout(tensor) for tensor in tensors])
    call = Call(func, args, kwargs, tuple(tensors), where, batch, counted or CountedSizes())
    call._arguments = arguments
    return call
