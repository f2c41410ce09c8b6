"""Calls that run as an equivalent call that can be followed, or op by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample._internal.facts import all_with, find_functions
from persample.forward.detectors import Context
from persample.layouts import DECLARATIONS, Call, Layout, Lost, Reduced, Scattered, Where, get_argument, make_call

# ---- Rows that are the same for all samples and are selected as one for each sample ----


def select_own_rows(call: Call) -> Call:
    """Replace `frames[:batch_size, ...]` by each sample's first row, if the values are equal.

    In a tensor `(B * T, ...)` of T rows for each sample, the first B rows belong to the first samples. A model that
    selects them as one row for each sample relies on rows that are the same for all samples, such as a class token
    that was expanded to them. The row of each sample itself has the same value, and the right gradient.
    """
    where = call.where[0]
    if (
        len(call.tensors) > 1
        or tracing.get_trace() is not None
        or not selects_first_rows(where, call.args[1], call.batch)
    ):
        return call
    assert isinstance(where, Layout)
    rows, item = call.args
    if len(rows) != where.inner * call.batch:
        return call
    parts = item if isinstance(item, tuple) else (item,)
    own = (slice(None, None, where.inner), *parts[1:])
    with torch.no_grad():
        is_same = torch.equal(Tensor.__getitem__(rows, item), Tensor.__getitem__(rows, own))
    return replace(call, args=(rows, own)) if is_same else call


def selects_first_rows(where: Where | None, item: Any, batch: int) -> bool:
    """Whether an item selects as many first rows as there are samples, although each sample has several rows."""
    if not isinstance(where, Layout) or where.dim or where.inner == 1 or where.ids is not None:
        return False
    first = item[0] if isinstance(item, tuple) and item else item
    return isinstance(first, slice) and first in (slice(batch), slice(0, batch))


# ---- Sizes that a model passes as tensors ----


def read_sizes(call: Call) -> Call:
    """The same call with numbers in place of sizes that all samples share, such as the largest count of any sample.

    A size decides how much padding there is, as `int(size)` would. It does not become part of a value. In an index, the
    bounds of slices are sizes: `ids[:, :lengths.max()]`. A part in the middle is a choice of entries, and not replaced.
    """
    shared = _find_shared(call) if len(call.tensors) > 1 and not call.kwargs else []
    if not shared:
        return call
    is_index = call.func is Tensor.__getitem__

    def is_size(value: Any) -> bool:
        return any(value is size for size in shared)

    def read(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(read, value))
        if is_index and isinstance(value, slice) and value.step is None:
            bounds = value.start, value.stop
            is_end = None in bounds and any(map(is_size, bounds))
            return slice(*[int(bound) if is_size(bound) else bound for bound in bounds]) if is_end else value
        return int(value) if is_size(value) and not is_index else value

    args = (call.args[0], *map(read, call.args[1:]))
    where = dict(zip(map(id, call.tensors), call.where, strict=True))
    made = make_call(call.func, args, {}, call.batch, lambda t: where[id(t)], call.counted)
    is_open = not is_index and len(made.tensors) > 1
    return call if is_open or (call.facts.operator == "narrow" and _is_in_the_middle(*args)) else made


def _is_in_the_middle(tensor: Tensor, dim: int, start: int, length: int) -> bool:
    return bool(start) and start + length != tensor.shape[dim]


def _find_shared(call: Call) -> list[Tensor]:
    """The sizes that all samples share among the tensors of a call."""
    return [
        t
        for t, where in zip(call.tensors, call.where, strict=True)
        if isinstance(where, (Lost, Reduced)) and t.dim() == 0 and t.dtype == torch.int64
    ]


# ---- `torch.where` with a branch that is not used ----


def drop_unused_branch(call: Call) -> Call:
    """The same call with a constant in place of a branch in which samples are mixed, if no entry of it is used.

    Time series are scaled by a statistic of the batch where nothing was observed, for example. Where everything was
    observed, the batch does not matter. The values of the condition decide, so each call is looked at.
    """
    if len(call.args) != 3 or len(call.tensors) != 3 or call.kwargs or tracing.get_trace() is not None:
        return call
    at = 0 if call.func is torch.where else 1  # x.where(condition, y)
    if isinstance(call.where[at], (Lost, Reduced)):
        return call
    branches = [i for i in range(3) if i != at]
    for branch, is_unused in zip(branches, (~call.tensors[at].bool(), call.tensors[at].bool()), strict=True):
        where, other = call.where[branch], call.where[sum(branches) - branch]
        if not isinstance(where, (Lost, Reduced)) or isinstance(other, (Lost, Reduced)):
            continue
        if bool(is_unused.all()):
            tensors = [t.detach() if i == branch else t for i, t in enumerate(call.tensors)]
            args, kwargs = call.fill(tensors)
            layouts = tuple(None if i == branch else w for i, w in enumerate(call.where))
            return replace(call, args=args, kwargs=kwargs, tensors=tuple(tensors), where=layouts)
        if isinstance(call.where[at], Layout) or isinstance(other, Layout):
            used = int((~is_unused).sum())
            cause = (
                f"where takes entries from a tensor in which the samples are mixed, in {used} of "
                f"{is_unused.numel()} places ({where.cause}; choose a value there that does not depend on the batch)"
            )
            layouts = tuple(Lost(cause) if i == branch else w for i, w in enumerate(call.where))
            return replace(call, where=layouts)
    return call


# ---- Calls that are replaced, before they run, by an equivalent call that can be followed ----


# Function -> the call to run in place of a call of it.
PREPARATIONS: dict[Any, Callable[[Call], Call]] = {
    Tensor.__getitem__: lambda call: select_own_rows(read_sizes(call)),
    **dict.fromkeys(all_with("takes_sizes"), read_sizes),
    **dict.fromkeys(find_functions("where"), drop_unused_branch),
}


# ---- Tensors of which no values are read ----


# Functions that read only the dtype and device of their second tensor, or only its shape.
_TYPED = {Tensor.type_as, Tensor.to}
_SHAPED: dict[Any, Any] = {
    Tensor.expand_as: Tensor.expand, Tensor.view_as: Tensor.view, Tensor.reshape_as: Tensor.reshape,
}  # fmt: skip


def without_unread_tensor(call: Call, find_layout: Callable[[Tensor], Where | None], context: Context) -> Call:
    """The same call without a second tensor of which only the dtype and device, or the shape, is read.

    Tensors that are constants by what a function does with them are constants in it.
    """
    args: tuple[Any, ...]
    if call.func in _TYPED and len(call.tensors) > 1:
        func, args, kwargs = Tensor.to, (call.args[0], call.tensors[1].device, call.tensors[1].dtype), call.kwargs
    elif call.func in _SHAPED and not (call.func is Tensor.expand_as and context.is_weight(call.tensors[0])):
        func, args, kwargs = _SHAPED[call.func], (call.tensors[0], call.tensors[1].shape), {}
    elif context.outside is not None and call.facts.class_weights:
        return context.outside.read_class_weights(call)
    elif context.outside is not None and context.outside.has_reads and not context.is_isolated:
        return context.outside.read_indices(call)
    else:
        return call
    return make_call(func, args, kwargs, context.batch, find_layout, context.counted)


# ---- Uses of weights on a batch that was split into several dimensions ----


# Functions of the last dimensions, and the number of these dimensions. The others are a batch.
_OF_ROWS: dict[Any, Callable[[Call], int]] = {
    F.linear: lambda call: 1,
    F.embedding: lambda call: 0,
    **dict.fromkeys(
        find_functions("layer_norm", "rms_norm"), lambda call: len(get_argument(call, 1, "normalized_shape"))
    ),
}


def use_by_rows(call: Call, find_layout: Callable[[Tensor], Any]) -> Any:
    """The result of a call on the rows of its first argument; NotImplemented if it has no such form.

    The rows lie along one dimension, and each belongs to one sample.
    """
    if call.func not in _OF_ROWS or not isinstance(call.where[0], Scattered) or any(call.where[1:]) or not call.args:
        return NotImplemented
    given = call.args[0]
    leading = given.dim() - _OF_ROWS[call.func](call)
    rows = given.flatten(0, leading - 1)
    if not isinstance(find_layout(rows), Layout):
        return NotImplemented
    return call.func(rows, *call.args[1:], **call.kwargs).unflatten(0, given.shape[:leading])


# ---- Run the Python functions of torch op by op ----


@cache
def is_composite(func: Callable[..., Any]) -> bool:
    """Whether a function is written in Python in `torch.nn.functional`, and has no declared motion.

    Its ops are followed one by one, so that it need not be tried.
    """
    return isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional" and func not in DECLARATIONS


@cache
def make_inline(func: FunctionType) -> Callable[..., Any]:
    """A copy of `func` whose body runs op by op under a function mode.

    A Python function of torch first asks `has_torch_function` whether a mode wants to handle the whole call. Under a
    mode the answer is always yes. In the copy the answer is no.
    """

    def answer_no(*_: Any) -> bool:
        return False

    questions = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    scope = {**func.__globals__, **dict.fromkeys(questions, answer_no)}
    inlined = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    inlined.__kwdefaults__ = func.__kwdefaults__
    return inlined
