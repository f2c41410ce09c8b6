"""What calls and aten ops write into, and the calls of torch functions that aten ops stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.facts import facts
from persample._internal.functions import is_inplace
from persample._internal.tree import find_tensors
from persample.layouts import Call

# ---- calls that write ----


def is_writing(call: Call) -> bool:
    """Whether a call writes into its first argument or into `out`, or replaces the memory of its first argument."""
    return call.is_inplace or call.facts.replaces_memory or call.kwargs.get("out") is not None


def writes_own_memory(call: Call, known: Iterable[tuple[Tensor, Any]]) -> bool:
    """Whether no tensor but those that the tracker follows share the memory that a call writes into.

    `known` are the tensors that the tracker knows. It follows these, the base of a view, and the views of that.
    """
    if call.facts.replaces_memory:
        return False
    first = (*call.args, *call.kwargs.values())[:1] if call.is_inplace else ()
    return all(_has_own_memory(tensor, known) for tensor in find_tensors((first, call.kwargs.get("out"))))


def _has_own_memory(tensor: Tensor, known: Iterable[tuple[Tensor, Any]]) -> bool:
    storage = _torch.find_storage(tensor)
    if storage is None:
        return True
    base = tensor._base
    count = _torch.count_owners(storage)
    followed = 1 if base is None else 2
    if count > followed and base is not None:
        followed += sum(other is not tensor and other._base is base for other, _ in known)
    return count <= followed and storage.resizable()


class Written:
    """What a function writes into, as it is before: a call that is refused may have run, or not.

    Attributes:
        tensor: the tensor that the function writes into and returns, None if there is none.
    """

    __slots__ = ("_statistics", "_version", "tensor")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensor = args[0] if args and is_inplace(func) else kwargs.get("out")
        self._version = self.tensor._version if isinstance(self.tensor, Tensor) else 0
        self._statistics: Sequence[tuple[Tensor, Tensor]] = ()
        if facts(func).statistics_at:
            vectors = [t for t in find_tensors((args, kwargs)) if t.dim() == 1 and not t.requires_grad]
            self._statistics = [(vector, vector.clone()) for vector in vectors]

    def has_changed(self) -> bool:
        """Whether the function has written into the tensor."""
        return isinstance(self.tensor, Tensor) and self.tensor._version != self._version

    def restore_statistics(self) -> None:
        """Give running statistics of a norm layer the values that they had before."""
        with torch.no_grad():
            for statistic, before in self._statistics:
                statistic.copy_(before)


# ---- buffers ----


class Buffers:
    """The buffers of a model, with copies of those that calls have changed.

    Args:
        model: the model; None: there are no buffers.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else ref(model)  # a recording must not keep its model
        self._before: dict[int | None, Tensor] = {}

    def list_all(self) -> list[Tensor]:
        """The buffers as they are now."""
        model = None if self._model is None else self._model()
        return [] if model is None else [*model.buffers()]

    @cached_property
    def _by_memory(self) -> dict[int | None, Tensor]:
        """The buffers by their memory, which views of them share."""
        return {_torch.find_storage_id(buffer): buffer for buffer in self.list_all()}

    def __contains__(self, tensor: Tensor) -> bool:
        return self._by_memory.get(_torch.find_storage_id(tensor)) is tensor

    def save(self, call: Call) -> None:
        """Copy the buffers that a call is about to change."""
        if (call.is_inplace or call.facts.statistics_at or call.facts.replaces_memory) and self._by_memory:
            for key in map(_torch.find_storage_id, call.tensors):
                if key in self._by_memory and key not in self._before:
                    self._before[key] = self._by_memory[key].clone()

    def restore(self) -> None:
        """Give the buffers the values that they had before the forward pass."""
        with torch.no_grad():
            for key, before in self._before.items():
                self._by_memory[key].copy_(before)


# ---- aten ops ----


@cache
def find_writes(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an op writes to: position and name. `set_` and `resize_` write to no memory."""
    if op.overloadpacket.__name__ in ("set_", "resize_", "detach_") or op.namespace == "prim":
        return ()
    arguments = enumerate(_torch.get_schema(op).arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


# Torch functions with the arguments of an aten op of another name.
_SPELLINGS: dict[str, Any] = {
    "_to_copy": Tensor.to, "_unsafe_view": Tensor.view, "_reshape_alias": Tensor.as_strided, "alias": Tensor.detach,
    "lift_fresh": Tensor.detach, "_softmax": Tensor.softmax, "_log_softmax": Tensor.log_softmax,
}  # fmt: skip


@cache
def _find_function(op: Any) -> Callable[..., Any]:
    """The torch function that takes the same arguments as an aten op, or the op itself."""
    name = op.overloadpacket.__name__
    if op.namespace != "aten":
        return op
    owners = (Tensor, torch, torch.nn.functional)
    return _SPELLINGS.get(name) or next((getattr(o, name) for o in owners if callable(getattr(o, name, None))), op)


def reads_shape(op: Any) -> bool:
    """Whether an op reads the shape or the dtype of its argument, and no values."""
    known = facts(_find_function(op))
    return known.makes_like or known.makes_new


def make_aten_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[Any, ...], batch: int) -> Call:
    """The call of an aten op, as the call of a torch function where there is one."""
    tensors = tuple(find_tensors((args, kwargs)))
    func, name = _find_function(op), op.overloadpacket.__name__
    if name == "slice":
        given: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
        dim, start, end, step = given
        index = (*[slice(None)] * (dim % args[0].dim()), slice(start, end, step))
        return Call(Tensor.__getitem__, (args[0], index), {}, tensors, where, batch)
    if name == "index":
        index = tuple(slice(None) if item is None else item for item in args[1])
        return Call(Tensor.__getitem__, (args[0], index), {}, tensors, where, batch)
    if name in ("_softmax", "_log_softmax"):
        args = args[:2]
    return Call(func, args, kwargs, tensors, where, batch)


@cache
def has_own_dispatch(kind: type) -> bool:
    """Whether a class of tensors handles aten ops itself, as a wrapper of other tensors."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def has_wrappers(args: Any, kwargs: Any) -> bool:
    """Whether an argument wraps other tensors: of a transform of torch.func, or of a class that handles ops itself."""
    is_inside_transform = _torch.is_inside_transform()
    for tensor in find_tensors((args, kwargs)):
        if has_own_dispatch(type(tensor)) or (is_inside_transform and _torch.is_wrapped_by_transform(tensor)):
            return True
    return False
