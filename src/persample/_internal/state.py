"""Restoring state that a run of a model changes."""

from __future__ import annotations

import io
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from socket import socket
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.facts import facts
from persample._internal.rng import is_generator, preserve_rng
from persample._internal.tree import find_tensors, list_slots


@contextmanager
def preserve_state(*modules: Any) -> Iterator[None]:
    """Restore random number generators and the buffers of `modules` at the end of the block.

    Arguments that are not modules are ignored: a loss may be a module or a function.

    >>> norm = nn.BatchNorm1d(2)
    >>> with preserve_state(norm):
    ...     _ = norm(torch.randn(8, 2) + 3)
    >>> norm.running_mean
    tensor([0., 0.])
    """
    buffers = [b for module in modules if isinstance(module, nn.Module) for b in module.buffers()]
    before = [(b, b._version, b.detach().clone()) for b in buffers]
    try:
        with preserve_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                # Batch norm updates its statistics without a new version.
                if buffer._version != version or not torch.equal(buffer, value):
                    buffer.copy_(value)


# Elements of longer containers are not looked into: a vocabulary is not state.
_MOST_ELEMENTS = 1000

_CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)

# Objects of these packages are not looked into: loggers, pools, trainers, which hold the data and the optimizer; and
# what a recording adds to a model.
_OPAQUE = {
    "torch", "builtins", "logging", "threading", "multiprocessing", "concurrent", "asyncio", "lightning",
    "pytorch_lightning", "lightning_fabric", "accelerate", "wandb", "tensorboard", "tokenizers", "weakref",
    "persample",
}  # fmt: skip

# What a run may change and nobody can restore.
_HANDLES = (
    io.IOBase, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, type(Lock()), type(RLock()),
    socket, mmap,
)  # fmt: skip


class ModuleState:
    """What a forward pass may change in a model, at one moment.

    These are the attributes of its modules and of their parameters, by identity; the elements of lists, dicts and sets
    among them, and the attributes and slots of objects; and the values of all tensors and arrays among them that are
    not parameters. Variables of functions and of files of code are not part of it.

    Attributes:
        parameters: the plain parameters; `tensors` has all other tensors, too.
        generators: the random number generators of torch, Python and numpy among them, for an `RngState`.
        handle: the name of a type that cannot be restored, such as an open file, if there is an object of one.

    >>> model = nn.BatchNorm1d(2)
    >>> model.seen = [1]
    >>> before = ModuleState(model)
    >>> _ = model(torch.randn(8, 2) + 3), model.seen.append(2)
    >>> before.restore()
    >>> model.running_mean, model.seen
    (tensor([0., 0.]), [1])
    """

    def __init__(self, model: nn.Module, keep_values: bool = True) -> None:
        self._keeps_values = keep_values
        self.parameters = list(filter(_is_plain, model.parameters()))
        self.generators: list[Any] = []
        self.handle: str | None = None
        self.tensors: list[Tensor] = [*self.parameters]  # and all other tensors of the model
        self._undo: list[Callable[[], None]] = []
        numpy: Any = sys.modules.get("numpy")
        self._array_type: Any = numpy.ndarray if numpy else ()
        modules = list(model.modules())
        self._seen = {*map(id, model.parameters()), *map(id, modules)}
        with torch.no_grad():
            for holder in (*modules, *model.parameters()):
                self._add_container(vars(holder))
        self._seen.clear()

    def restore(self) -> None:
        """Give the model this state again, except for `generators`. What has not changed is not touched."""
        for undo in self._undo:
            undo()

    def _add_container(self, container: Any) -> None:
        kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        content = kind(container)  # not copy(), which a subclass may define in another way
        self._undo.append(partial(_restore_container, container, content))
        if len(content) <= _MOST_ELEMENTS:
            self._add_all(content.values() if kind is dict else content)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if value is not None and not isinstance(value, _CONSTANT):
                self._add(value)

    def _add(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if _is_plain(value):
                self.tensors.append(value)
                if self._keeps_values:
                    self._undo.append(partial(_restore_tensor, value, value.detach().clone()))
                self._add_container(vars(value))
        elif isinstance(value, self._array_type):
            if self._keeps_values and value.flags.writeable:
                self._undo.append(partial(_restore_array, value, value.copy()))
            if value.dtype == object and value.size <= _MOST_ELEMENTS:
                self._add_all(value.flat)
        elif is_generator(value):
            self.generators.append(value)
        elif isinstance(value, tuple):
            self._add_all(value)
        elif isinstance(value, _HANDLES) or (hasattr(value, "__next__") and not hasattr(value, "__dict__")):
            self.handle = self.handle or type(value).__name__
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS):
            self._add_container(value)
        elif not isinstance(value, nn.Module) and _get_package(value) in _OPAQUE:
            return
        if hasattr(value, "__dict__"):
            self._add_container(vars(value))
        if slots := list_slots(type(value)):
            content = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            self._undo.append(partial(_restore_slots, value, content))
            self._add_all(content.values())


# What is not state by itself, tested before all else.
_CONSTANT = (str, int, float, complex, bytes, type, types.FunctionType, types.MethodType, types.ModuleType)


def find_state_tensors(model: nn.Module) -> list[Tensor]:
    """The parameters of a model, its buffers, and the tensors in other attributes of its modules."""
    return ModuleState(model, keep_values=False).tensors


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory that can be read, compared and written."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return type(tensor) in (Tensor, nn.Parameter) and is_dense and not tensor.is_inference()


def _restore_tensor(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):
        tensor.data.copy_(value)  # `data`: autograd must not count it as a change


def _restore_array(array: Any, content: Any) -> None:
    if array.tobytes() != content.tobytes():
        array[...] = content


def _restore_container(container: Any, content: Any) -> None:
    if not container and not content:  # most attributes of a module are empty dicts of hooks
        return
    if isinstance(container, dict):
        if list(container) != list(content):
            container.clear()
            container.update(content)
        for key, value in content.items():
            if container[key] is not value:
                container[key] = value
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
        container.clear()
        container.extend(content)


def _restore_slots(value: Any, content: Mapping[str, Any]) -> None:
    for name in list_slots(type(value)):
        if name not in content:
            if hasattr(value, name):
                object.__delattr__(value, name)
        elif getattr(value, name, content) is not content[name]:
            object.__setattr__(value, name, content[name])  # the class may be frozen


def _get_package(value: Any) -> str:
    return str(type(value).__module__).partition(".")[0]


@contextmanager
def keep_tensors(state: ModuleState) -> Iterator[Writes]:
    """Restore parameters that the block writes into, the memory of all tensors, and what autograd counts as changes."""
    tensors = state.tensors
    versions = tuple(tensor._version for tensor in tensors)
    memory = [(tensor, _torch.get_storage_id(tensor), tensor.detach()) for tensor in tensors]
    writes = Writes(state.parameters)
    try:
        with _torch.make_dispatch_mode(writes.run), _Exposures(writes):
            yield writes
    finally:
        for tensor, storage, alias in memory:
            if _torch.get_storage_id(tensor) != storage:  # by `tensor.data = other`, or by `set_`
                tensor.data = alias
        for tensor, value in writes.before.values():
            tensor.data.copy_(value)
        _torch.set_versions(tuple(tensors), versions)


class Writes:
    """Copies some tensors before an op writes into them, and notes the least precise dtype of all results."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.dtypes: set[torch.dtype] = set()
        self._kept: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._kept.setdefault(_torch.get_storage_id(tensor), []).append(tensor)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op."""
        if _torch.is_mutating(func):
            for tensor in find_tensors((args, kwargs)):
                self.keep(tensor)
        result = func(*args, **kwargs)
        first = result[0] if type(result) is tuple and result else result
        if isinstance(first, Tensor):
            self.dtypes.add(first.dtype)
        return result

    def replace_dtypes(self, dtypes: set[torch.dtype]) -> set[torch.dtype]:
        """Note other dtypes from now on; returns those so far."""
        before, self.dtypes = self.dtypes, dtypes
        return before

    def keep(self, tensor: Tensor) -> None:
        """Copy what shares memory with a tensor that is about to be written into."""
        for kept in self._kept.get(_torch.get_storage_id(tensor), ()):
            if id(kept) not in self.before:
                self.before[id(kept)] = (kept, kept.detach().clone())

    @property
    def rounding(self) -> float:
        """The eps of the least precise floating-point dtype of all results."""
        return max((torch.finfo(dtype).eps for dtype in self.dtypes if dtype.is_floating_point), default=0.0)


class _Exposures(TorchFunctionMode):
    """Copies tensors before their memory is given to code outside torch, which may write into it."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if facts(func).exposes_memory:
            for tensor in find_tensors(args[:1]):
                self._writes.keep(tensor)
        return func(*args, **(kwargs or {}))
