"""One call of a torch function, and the key under which its motion is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from persample._internal.facts import Facts, facts
from persample._internal.functions import find_results, is_inplace
from persample._internal.tree import map_tensors
from persample.layouts.counts import CountedSizes
from persample.layouts.layout import Layout, Where

# Everything that the motion of a call can depend on, except the values of its tensors. Calls with equal keys move the
# samples in the same way. A key is built and hashed for every op of a forward pass, so it is one flat tuple:
#
#     function, batch size, number of positional arguments, then each argument, with its name before it if it has one:
#         tensor:       shape, dtype, torch.layout, requires_grad, where the samples lie
#         list, tuple:  type, length, then each part
#         dict:         dict, length, then the name and value of each item
#         slice:        slice, then the tuple (start, stop, step)
#         other value:  type, value
#
# `make_call` writes keys. A key can be unhashable, if an argument is.
CallKey = tuple[Any, ...]

_HEADER = 2  # function and batch size
_WHERE = 4  # in the fields of a tensor, the position of its layout relative to its shape


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
    _key: CallKey | None = field(default=None, init=False, repr=False)  # not copied: a copy may have other arguments

    @property
    def key(self) -> CallKey:
        """The key under which the motion of this call is cached."""
        if self._key is None:
            where = iter(self.where)
            self._key = make_call(self.func, self.args, self.kwargs, self.batch, lambda _: next(where))._key
            assert self._key is not None
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
        """The same call, with the same key, for tensors that differ only in their values."""
        args, kwargs = self.fill(tensors)
        other = replace(self, args=args, kwargs=kwargs, tensors=tuple(tensors))
        other._key = self.key
        return other


def make_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    find_layout: Callable[[Tensor], Where | None],
    counted: CountedSizes | None = None,
) -> Call:
    """Find the tensors of a call, their layouts and the key of the call, in one walk over the arguments."""
    tensors: list[Tensor] = []
    where: list[Where | None] = []
    key: list[Any] = [func, batch, len(args)]
    for arg in args:
        if isinstance(arg, Tensor):  # as in `_encode`, without the call of a function
            layout = find_layout(arg)
            tensors.append(arg)
            where.append(layout)
            key += (arg.shape, arg.dtype, arg.layout, arg.requires_grad, layout)
        else:
            _encode(arg, find_layout, tensors, where, key)
    for name, arg in kwargs.items():
        key.append(name)
        _encode(arg, find_layout, tensors, where, key)
    call = Call(func, args, kwargs, tuple(tensors), tuple(where), batch, counted or CountedSizes())
    call._key = tuple(key)
    return call


def _encode(
    value: Any,
    find_layout: Callable[[Tensor], Where | None],
    tensors: list[Tensor],
    where: list[Where | None],
    key: list[Any],
) -> None:
    """Append the fields of one value to `key`, and its tensors to `tensors` and `where`."""
    if isinstance(value, Tensor):
        layout = find_layout(value)
        tensors.append(value)
        where.append(layout)
        key += (value.shape, value.dtype, value.layout, value.requires_grad, layout)
    elif isinstance(value, (tuple, list)):
        key += (type(value), len(value))
        for part in value:
            _encode(part, find_layout, tensors, where, key)
    elif isinstance(value, dict):
        key += (dict, len(value))
        for name, part in value.items():
            key.append(name)
            _encode(part, find_layout, tensors, where, key)
    elif isinstance(value, slice):
        key.append(slice)
        _encode((value.start, value.stop, value.step), find_layout, tensors, where, key)
    else:
        key += (type(value), value)


def without_function(key: CallKey) -> CallKey:
    """The key without the function, for a cache of one function."""
    return key[1:]
