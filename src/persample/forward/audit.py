"""What no function mode sees: writes through aliases, transforms of torch.func, scripted functions, shared memory.

The tracker knows tensors by identity and sees torch functions only. The audit knows memory, and sees every aten op. It
is on in the first forward pass of a model, and again from the first function on that differs from every audited pass.

For each storage that holds values of samples, the audit keeps where the samples lie in the tensors that were seen on
it, by their geometry (address, shape, strides). A write removes what was known. Inside a torch function that the
tracker follows, the tracker's answer is noted afterwards. Any other op (in vmap, in a scripted function, in
`autograd.grad`) is followed here. A tensor that the tracker takes for a constant although its memory holds samples gets
the layout that its memory has, or is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from persample import _torch
from persample._internal.facts import all_with, facts
from persample._internal.functions import find_results, is_inplace
from persample._internal.precision import INDEX_DTYPES
from persample._internal.tree import find_tensors
from persample.errors import get_op_name, refuse_forward_mode
from persample.forward.births import Births
from persample.forward.program import Program, Site
from persample.forward.unseen import has_parameters_behind
from persample.layouts import (
    Call,
    Layout,
    Lost,
    Motion,
    Reduced,
    Where,
    add_samples_to_layout,
    find_layout_of_view,
    find_motion,
)

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker

# ---- what is known about memory ----

# Position in memory, shape, strides and size of an element: tensors with the same geometry have the same entries.
Geometry = tuple[Any, ...]


@dataclass(eq=False)
class Memory:
    """What is known about a storage.

    Attributes:
        ref: the storage; it is not kept alive.
        address: where it starts; 0 if that was not needed yet.
        has_samples: whether it holds values that were computed from samples.
        known: where the samples lie in tensors with this geometry, as of the last write.
        selected: the geometries of parts of a constant that values of samples have selected.
        cause: how samples came there, for tensors whose geometry is not known.
        place: the module in which an op outside torch functions wrote to it, in words.
    """

    ref: StorageWeakRef
    address: int = 0
    has_samples: bool = False
    known: dict[Geometry, list[Where | None]] = field(default_factory=dict)
    selected: set[Geometry] = field(default_factory=set)
    cause: str = ""
    place: str = ""


_MAX_ENTRIES = 10_000_000  # of tensors whose entries are compared one by one


def _is_view_of_any(tensor: Tensor, arguments: Any) -> bool:
    """Whether a tensor shares its memory with another one among the arguments of a call."""
    storage = _torch.find_storage(tensor)
    if storage is None:
        return False
    key = _torch.get_storage_key(storage)
    others = (_torch.find_storage(other) for other in find_tensors(arguments) if other is not tensor)
    return any(other is not None and _torch.get_storage_key(other) == key for other in others)


def _holds_samples(memory: Memory, geometry: Geometry) -> bool:
    """Whether a tensor with this geometry has an entry in common with a tensor of samples."""
    return any(
        _overlap(geometry, other) for other, known in memory.known.items() if any(where is not None for where in known)
    )


def _overlap(a: Geometry, b: Geometry) -> bool:
    (first, last), (other_first, other_last) = _find_range(a), _find_range(b)
    if last < other_first or other_last < first:
        return False
    if math.prod(a[1]) + math.prod(b[1]) > _MAX_ENTRIES or a[3] != b[3]:
        return True
    return bool(torch.isin(_list_entries(a), _list_entries(b)).any())


def _find_range(geometry: Geometry) -> tuple[int, int]:
    """The first and the last byte of a tensor; an empty range for a tensor without entries."""
    start, shape, strides, size = geometry
    if 0 in shape:
        return start, start - 1
    return start, start + size * (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))) - 1


def _list_entries(geometry: Geometry) -> Tensor:
    """The positions of all entries of a tensor, in bytes."""
    start, shape, strides, size = geometry
    entries = torch.tensor([start])
    for n, stride in zip(shape, strides, strict=True):
        entries = (entries[:, None] + torch.arange(n) * (stride * size)).flatten()
    return entries


# ---- aten ops ----


@cache
def _find_writes(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an op writes to: position and name. `set_` and `resize_` write to no memory."""
    if op.overloadpacket.__name__ in ("set_", "resize_", "detach_") or op.namespace == "prim":
        return ()
    arguments = enumerate(_torch.get_schema(op).arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


# Ops for which `_find_writes` has found nothing: a set is faster than a cached function.
_WITHOUT_WRITES: set[Any] = set()

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


def _reads_shape(op: Any) -> bool:
    """Whether an op reads the shape or the dtype of its argument, and no values."""
    known = facts(_find_function(op))
    return known.makes_like or known.makes_new


def _make_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[Any, ...], batch: int) -> Call:
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


# ---- torch functions ----

# Functions that run other ops than those of their own forward: these are followed one by one.
_RUNNING_OTHERS = {*all_with("differentiates"), *_torch.DUAL_FUNCTIONS}


@cache
def _has_own_dispatch(kind: type) -> bool:
    """Whether a class of tensors handles aten ops itself, as a wrapper of other tensors."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def _has_wrappers(args: Any, kwargs: Any) -> bool:
    """Whether an argument wraps other tensors: of a transform of torch.func, or of a class that handles ops itself."""
    is_inside_transform = _torch.is_inside_transform()
    for tensor in find_tensors((args, kwargs)):
        if _has_own_dispatch(type(tensor)) or (is_inside_transform and _torch.is_wrapped_by_transform(tensor)):
            return True
    return False


_UNSEEN = "in code that is not made of torch functions (torch.func, vmap, a scripted function, autograd.grad)"

_ELSEWHERE = "was written in another thread, or where no mode of torch is active"

# The private base class may be missing. Then the first use of the audit raises, and not the import.
_Mode: Any = _torch.TorchDispatchMode if isinstance(_torch.TorchDispatchMode, type) else object


class Audit(_Mode):
    """While it is on, every aten op of a forward pass is seen, and the memory of samples is known.

    Args:
        tracker: the tracker of the pass.
        program: the audited passes of its model.
        site: where the pass is in the program.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: it would import the compiler, which takes seconds. A recording compiles nothing anyway."""
        return False

    def __init__(self, tracker: Tracker, program: Program, site: Site) -> None:
        super().__init__()
        self._tracker = tracker
        self._program = program
        self.site: Site | None = site
        self._is_whole = site is program.root
        self.is_new = self._is_whole  # whether the pass is one that is new, or that must be audited as a whole
        self._has_finding = False
        self.is_stopped = False
        self._is_differentiating = False  # whether autograd.grad is running
        self._depth = 0  # of torch functions that the tracker follows
        self._has_samples = False  # whether the running function has samples among its arguments
        self._is_dual = False  # whether it runs in forward-mode AD, which computes tangents inside of functions
        self._memories: dict[int, tuple[Memory, int]] = {}  # by storage; and by how many bytes it starts later
        self._exposed: list[Memory] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # of memory that code outside torch may write to
        self._has_exposed_samples = False
        self._births = Births()
        self._seen: dict[int, StorageWeakRef] = {}  # memory of constants with a known origin
        self._versions: dict[int, tuple[int, int]] = {}  # of each buffer: its memory, and how often it was changed
        self._written: set[int] = set()  # memory that an op has written to

    def start(self) -> None:
        """Note where the samples lie now, and enter the mode."""
        self.add_known_tensors()
        model = self._tracker.model
        for tensor in [] if model is None else [*model.parameters(), *model.buffers()]:
            self._note_origin(tensor)
        for buffer in [] if model is None else model.buffers():
            self._is_changed_unseen(buffer)
        self._births.start()
        _torch.insert_outermost_dispatch_mode(self)

    def stop(self) -> None:
        """Leave the mode, and note whether later passes of the same sequence must be audited."""
        self.is_stopped = True
        _torch.remove_dispatch_mode(self)
        self._births.stop()
        if self._has_finding:
            self._program.note_finding()
        elif self._is_whole:
            self._program.audits_due = max(0, self._program.audits_due - 1)
        elif self.is_new and self._program.audits_due == 0:  # what happened before the audit began was not seen
            self._program.audits_due = 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, the mode is off."""
        _torch.remove_dispatch_mode(self)
        try:
            yield
        finally:
            _torch.insert_outermost_dispatch_mode(self)

    def add_known_tensors(self) -> None:
        """Note the memory of each tensor whose layout the tracker knows."""
        for tensor, (where, _) in self._tracker.iterate_known():
            if where is not None:
                self._note(tensor, where)

    def find_samples(self, tensor: Tensor) -> str | None:
        """How samples came into the memory of a tensor, None if it holds no samples."""
        memory, geometry = self._locate(tensor)
        if memory is None or not memory.has_samples:
            return None
        if memory.cause:
            return memory.cause
        return "it shares memory with a tensor of samples" if _holds_samples(memory, geometry) else None

    def note_finding(self) -> None:
        """Audit the next passes too: something was found that the tracker has not seen."""
        self._has_finding = True

    def grow(self, before: int, batch: int) -> None:
        """Samples are added to the batch, which had `before` samples."""
        for memory, _ in self._memories.values():
            for geometry, known in memory.known.items():
                known[:] = [add_samples_to_layout(where, geometry[1], before, batch) for where in known]

    def advance(self, key: Any) -> None:
        """Note the next function of the sequence."""
        if self.site is not None:
            self.is_new |= self.site.get(key) is None
            self.site = self._program.get_next(self.site, key)

    # ---- torch functions ----

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function under the tracker, and note what the tracker found."""
        self.advance(func)
        if func in _RUNNING_OTHERS:
            outer, self._is_differentiating = self._is_differentiating, True
            try:
                return func(*args, **kwargs)
            finally:
                self._is_differentiating = outer
        if _has_wrappers(args, kwargs):
            return func(*args, **kwargs)
        return self.follow(func, args, kwargs)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run` for a function that the tracker follows as a whole."""
        if facts(func).exposes_memory:
            self._expose(args[0])
        with self.follow_whole():
            changed = self._save_known(args) if is_inplace(func) else None
            result = self._tracker.follow(func, args, kwargs, self.find_layout)
            if self._is_dual:
                self._refuse_lost_tangents((args, kwargs))
            if not self._has_samples:
                for made in find_tensors(result):
                    self._note_origin(made)
            elif is_inplace(func) or result is None:
                self._note_written(args)
                if changed is not None:
                    self._restore_known(*changed)
            else:
                for made in find_tensors(result):
                    self._note_result(made, (args, kwargs))
        return result

    def _note_result(self, made: Tensor, arguments: Any) -> None:
        """Note the layout of a result.

        A view of a constant (`table[i]` with an index of samples) belongs to the samples that selected it, but its
        memory holds no values of samples.
        """
        where = self._tracker.get_known(made)
        memory, _ = self._locate(made)
        if where is not None and (memory is None or not memory.has_samples) and _is_view_of_any(made, arguments):
            memory, geometry = self._locate(made, make=True)
            if memory is not None:
                memory.selected.add(geometry)
        else:
            self._note(made, where)
            if memory is not None and memory.cause and isinstance(where, Layout) and self._is_new(made, arguments):
                memory.cause = ""  # written by ops inside the call, such as the addition of a bias

    def _refuse_lost_tangents(self, arguments: Any) -> None:
        """Refuse forward-mode AD through a use of a weight: the tap has no forward derivative."""
        tensors = list(find_tensors(arguments))
        if not any(map(self._tracker.is_weight, tensors)) or not any(map(self._tracker.find_known_layout, tensors)):
            return
        with _torch.DisableTorchFunction():
            has_tangent = any(map(_torch.has_tangent, tensors))
        if has_tangent:
            self._has_finding = True
            refuse_forward_mode(self._tracker.place())

    @contextmanager
    def follow_whole(self) -> Iterator[None]:
        """Inside the block, ops are part of a call whose results the tracker follows."""
        outer = self._has_samples, self._is_dual
        self._depth, self._has_samples, self._is_dual = self._depth + 1, False, _torch.is_inside_forward_ad()
        try:
            yield
        finally:
            self._depth -= 1
            self._has_samples, self._is_dual = outer[0] or self._has_samples, outer[1]

    def find_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in an argument of a torch function, None if it does not depend on the batch."""
        tracker = self._tracker
        memory, geometry = self._locate(tensor)
        if memory is None or not memory.has_samples:
            where = tracker.find_known_layout(tensor)
            is_unseen = (memory is None and self._is_foreign(tensor)) or self._is_changed_unseen(tensor)
            if where is None and is_unseen:
                where = self._name_place(Lost(f"a tensor of shape {tuple(tensor.shape)} {_ELSEWHERE}"))
                self._has_finding = True
            if where is not None and (memory is None or geometry not in memory.selected):
                self._note(tensor, where)
        elif tensor.grad_fn is not None and not tracker.is_known(tensor) and not self._is_view_of_known(tensor):
            where = self._find_layout_of_unseen(tensor, memory, geometry)
        else:
            where = self._find_layout_in_memory(tensor, memory, geometry, tracker.find_known_layout(tensor))
        self._has_samples |= where is not None and not self._is_index(tensor, where)
        return where

    def _is_index(self, tensor: Tensor, where: Where) -> bool:
        """Whether a tensor of numbers from outside torch selects rows, outside of private training."""
        is_imported = isinstance(where, Lost) and where.imported and tensor.dtype in INDEX_DTYPES
        return is_imported and self._tracker.isolation is None

    def _is_view_of_known(self, tensor: Tensor) -> bool:
        return tensor._base is not None and self._tracker.is_known(tensor._base)

    def _find_layout_of_unseen(self, tensor: Tensor, memory: Memory, geometry: Geometry) -> Where | None:
        """The layout of a tensor with a gradient that no torch function returned."""
        where = self._find_layout_in_memory(tensor, memory, geometry, None)
        if where is not None and has_parameters_behind(tensor, self._tracker):
            cause = f"a tensor of shape {tuple(tensor.shape)} was computed from weights and samples {_UNSEEN}"
            where = Lost(cause, memory.place)
        self._tracker.set_layout(tensor, where)
        return where

    def _find_layout_in_memory(
        self, tensor: Tensor, memory: Memory, geometry: Geometry, found: Where | None
    ) -> Where | None:
        """The layout of a tensor whose memory holds samples; the tracker has `found` one."""
        known = memory.known.get(geometry)
        where = found
        is_followed = isinstance(found, Layout) and not memory.cause
        if known is None and found is None and not memory.cause and self._tracker.is_given(tensor):
            return None  # the rest of a tensor of which the model has got a part
        if known is None and not is_followed and (memory.cause or _holds_samples(memory, geometry)):
            where = self._find_layout_by_base(tensor, memory)
        elif known is None:  # inputs and targets may be parts of one tensor, also with entries in common
            self._note(tensor, found)
        elif found not in known:
            where = known[-1]
        if where is not None and id(tensor) in self._tracker.collector.parameters:
            where = Lost(memory.cause or "samples were written into the parameter")
        if where != found:
            self._has_finding = True
        return self._name_place(where)

    @staticmethod
    def _is_new(made: Tensor, arguments: Any) -> bool:
        """Whether a result is the whole of some memory that no argument of its call has."""
        storage = _torch.find_storage_id(made)
        is_whole = made.numel() * made.element_size() == made.untyped_storage().nbytes()
        return is_whole and all(_torch.find_storage_id(tensor) != storage for tensor in find_tensors(arguments))

    def _find_layout_by_base(self, tensor: Tensor, memory: Memory) -> Where | None:
        """The layout of a tensor with an unknown geometry: from its base, if that is known."""
        base = tensor._base
        known = None if base is None else memory.known.get(self._locate(base)[1])
        if base is not None and known is not None:
            where: Where | None = find_layout_of_view(tensor, base, known[-1], self._tracker.batch)
            self._note(tensor, where)
            return where
        return Lost(memory.cause or "samples were written into its memory through another tensor")

    def _save_known(self, args: tuple[Any, ...]) -> tuple[Tensor, Where | None, Memory, dict[Geometry, Any]] | None:
        """What is known about the memory that a call is about to write to."""
        tensor = next(find_tensors(args[:1]), None)
        memory = None if tensor is None else self._locate(tensor)[0]
        if tensor is None or memory is None or memory.cause:
            return None
        return tensor, self.find_layout(tensor), memory, {key: list(known) for key, known in memory.known.items()}

    def _restore_known(
        self, tensor: Tensor, where: Where | None, memory: Memory, known: dict[Geometry, list[Where | None]]
    ) -> None:
        """After a write that left each entry with its sample: other tensors in this memory are as they were."""
        if isinstance(where, Layout) and self._tracker.get_known(tensor) == where:
            memory.known, memory.cause = {**known, **memory.known}, ""

    def _note_written(self, args: tuple[Any, ...]) -> None:
        """Note what the tracker found for a tensor that a call with samples wrote to, and for its base."""
        for tensor in find_tensors(args[:1]):
            for changed in (tensor, tensor._base):
                if changed is not None and self._tracker.is_known(changed):
                    self._note(changed, self._tracker.get_known(changed))

    # ---- aten ops ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Stopped in another thread, so that the mode is still on the stack of this one; or the recording was given up.
        if self.is_stopped or self._tracker.has_ended:
            return func(*args, **(kwargs or {}))
        if self._depth and not types and not self._is_dual and func in _WITHOUT_WRITES:  # by far the most frequent case
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if any(map(_has_own_dispatch, types)):
            return NotImplemented
        if _torch.get_backward_pass() >= 0 and not self._is_differentiating:
            return func(*args, **kwargs)
        with _torch.DisableTorchFunction():
            if not hasattr(func, "overloadpacket"):
                return self._run_higher_order(func, args, kwargs)
            if not self._depth or self._is_dual:
                return self._run_op(func, args, kwargs)
            result = func(*args, **kwargs)
            if _find_writes(func):
                self._note_writes(func, args, kwargs, self._has_samples)
            else:
                _WITHOUT_WRITES.add(func)
            return result

    def _run_higher_order(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that calls functions, such as torch.cond: the ops inside are not seen."""
        has_samples = any(map(self._find_layout_of_operand, find_tensors((args, kwargs))))
        result = op(*args, **kwargs)
        if has_samples and not self._depth:
            for made in find_tensors(result):
                self._note(made, self._name_place(Lost(f"{op} runs ops that are not seen")))
        return result

    def _run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and follow an op that is not part of a torch function that the tracker follows."""
        where = tuple(map(self._find_layout_of_operand, find_tensors((args, kwargs))))
        result = op(*args, **kwargs)
        self._note_writes(op, args, kwargs, any(where))
        if op.overloadpacket.__name__ == "set_":
            self._has_finding |= any(where)  # no function mode sees it, so in later passes only an audit does
            self._note_rebuilt(args[0])
        elif any(where) and (isinstance(where[0], Layout) or not _reads_shape(op)):
            call = _make_call(op, args, kwargs, where, self._tracker.batch)
            results = find_results(result, args)
            motion = find_motion(call, results) if results else Motion(())
            if self._tracker.places is not None and results:
                self._tracker.places.check(call, motion, self._tracker)
            layouts = motion.results
            for made, layout in zip(results, layouts, strict=True):
                if isinstance(layout, Lost) and not layout.place:
                    layout = replace(layout, cause=f"{layout.cause}, {_UNSEEN}")
                self._note(made, self._name_place(layout))
                if (memory := self._locate(made)[0]) is not None:
                    memory.place = self._tracker.place()
        else:
            for made in find_tensors(result):
                self._note_origin(made)
            if self._tracker.places is not None:
                self._tracker.places.note_constant(_make_call(op, args, kwargs, where, self._tracker.batch), result)
        return result

    def _find_layout_of_operand(self, tensor: Tensor) -> Where | None:
        memory, geometry = self._locate(tensor)
        if memory is None or not memory.has_samples:
            return self._tracker.get_known(tensor)
        known = memory.known.get(geometry)
        return self._find_layout_by_base(tensor, memory) if known is None else known[-1]

    def _note_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_samples: bool) -> None:
        """Forget what was known about memory that an op has written to."""
        for position, name in _find_writes(op):
            written = args[position] if position < len(args) else kwargs.get(name)
            for tensor in find_tensors(written):
                if (storage := _torch.find_storage(tensor)) is not None:
                    self._written.add(_torch.get_storage_key(storage))
                memory, _ = self._locate(tensor, make=has_samples)
                if memory is not None:
                    memory.known.clear()
                    self._copies.pop(id(memory), None)
                    if has_samples:
                        self._set_samples(memory, get_op_name(op.overloadpacket))

    # ---- memory ----

    def _locate(self, tensor: Tensor, make: bool = False) -> tuple[Memory | None, Geometry]:
        """The memory of a tensor, None if nothing is known about it, and the geometry of the tensor there."""
        storage = None if tensor.is_nested else _torch.find_storage(tensor)
        if storage is None:
            return None, ()
        key = _torch.get_storage_key(storage)
        found = self._memories.get(key)
        if found is None and (self._exposed or not storage.resizable()):
            found = self._find_overlap(storage)
        if found is None and make:
            found = Memory(StorageWeakRef(storage)), 0
        if found is None:
            return None, ()
        memory, shift = self._memories[key] = found
        if self._copies:
            self._check_copy(memory)
        size = tensor.element_size()
        return memory, (tensor.storage_offset() * size + shift, tensor.shape, tensor.stride(), size)

    def _note(self, tensor: Tensor, where: Where | None) -> None:
        """Note where the samples lie in a tensor."""
        if tensor.is_nested:
            self._tracker.refuse_nested()
        if where is None:
            self._note_origin(tensor)
        memory, geometry = self._locate(tensor, make=where is not None)
        if memory is None:
            return
        if where is not None:
            memory.has_samples = True
        elif not memory.known.keys() - {geometry} and tensor.nbytes == tensor.untyped_storage().nbytes():
            memory.has_samples = False  # all of it is constant
        known = memory.known.setdefault(geometry, [])
        if where in known:
            known.remove(where)
        known.append(where)

    def _set_samples(self, memory: Memory, name: str) -> None:
        memory.has_samples = True
        memory.cause = f"{name}, in {self._tracker.place()}, wrote samples into its memory through another tensor"

    def _name_place(self, where: Where | None) -> Where | None:
        is_nameless = isinstance(where, (Lost, Reduced)) and not where.place
        return replace(where, place=self._tracker.place()) if is_nameless else where  # type: ignore[type-var]

    # ---- other threads ----

    def _note_origin(self, tensor: Tensor) -> None:
        """Note that a constant was made by an op that was seen, or existed before."""
        storage = _torch.find_storage(tensor)
        if storage is not None:
            self._seen[_torch.get_storage_key(storage)] = StorageWeakRef(storage)

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether a constant was made during the forward pass by no op that was seen, so in another thread.

        Memory that torch has not allocated comes from outside, by numpy for example: its values are constants. In the
        code of a loss, threads make tensors of their own, such as the targets of a loader. The arguments of a function
        inside another one were made there.
        """
        if self._depth > 1 or not self._tracker.is_inside or not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        storage = _torch.find_storage(tensor)
        if storage is None or _torch.get_storage_key(storage) in self._seen or not storage.resizable():
            return False
        self._note_origin(tensor)
        return self._births.is_new(tensor)

    def _is_changed_unseen(self, tensor: Tensor) -> bool:
        """Whether a buffer was changed by no op that was seen since the last call, so in another thread."""
        storage = _torch.find_storage(tensor)
        if storage is None or tensor.is_inference() or tensor not in self._tracker.buffers:
            return False
        now = _torch.get_storage_key(storage), tensor._version
        before = self._versions.setdefault(id(tensor), now)
        self._versions[id(tensor)] = now
        is_seen = now[0] in self._written
        self._written.discard(now[0])
        return before[0] == now[0] and before[1] != now[1] and not is_seen

    # ---- memory outside torch ----

    def _expose(self, tensor: Any) -> None:
        """Note that code outside torch may read and write the memory of a tensor from now on."""
        where = self.find_layout(tensor)
        storage = _torch.find_storage(tensor)
        if storage is None or not storage.nbytes():
            return
        self._add_exposed(tensor)
        if where is not None and not self._has_exposed_samples:
            self._has_exposed_samples = True
            for buffer in [] if self._tracker.model is None else self._tracker.model.buffers():
                self._add_exposed(buffer)  # a numpy view of it may exist since long
        if self._has_exposed_samples:
            self._copy_exposed()

    def _add_exposed(self, tensor: Tensor) -> None:
        memory, _ = self._locate(tensor, make=True)
        if memory is not None and memory not in self._exposed:
            memory.address = _torch.get_address(tensor.untyped_storage())
            self._exposed.append(memory)

    def _copy_exposed(self) -> None:
        """Copy exposed constants, to see whether code outside torch changes them."""
        for memory in self._exposed:
            if id(memory) not in self._copies and not memory.has_samples:
                storage = _torch.get_storage(memory.ref)
                if storage is not None:
                    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    self._copies[id(memory)] = (content, content.clone())

    def _check_copy(self, memory: Memory) -> None:
        content, before = self._copies.get(id(memory), (None, None))
        if content is None or before is None:
            return
        if memory.ref in self._program.written_outside or not torch.equal(content, before):
            self._program.written_outside.add(memory.ref)  # the same values may be written in the next pass
            self._copies.pop(id(memory), None)  # this audit may have seen the comparison, and come here before
            memory.known.clear()
            memory.has_samples = True
            memory.cause = "its memory was written from outside torch (a numpy view, a pointer) after samples had left"

    def _find_overlap(self, storage: torch.UntypedStorage) -> tuple[Memory, int] | None:
        """The exposed memory that a storage shares: by numpy or DLPack, the same memory becomes another storage."""
        start, size = _torch.get_address(storage), storage.nbytes()
        # Memory that torch has not allocated may be that of samples, handed over where no mode sees it.
        for memory in (self._exposed if storage.resizable() else self._list_memories()) if size else ():
            other = _torch.get_storage(memory.ref)
            # A storage can be resized: its memory is freed then, and may belong to another one.
            if other is None or _torch.get_address(other) != memory.address:
                continue
            if memory.address < start + size and start < memory.address + other.nbytes():
                return memory, start - memory.address
        return None

    def _list_memories(self) -> list[Memory]:
        """All memory that is known, with its address."""
        memories = list({id(memory): memory for memory, _ in self._memories.values()}.values())
        for memory in memories:
            storage = _torch.get_storage(memory.ref)
            if not memory.address and storage is not None:
                memory.address = _torch.get_address(storage)
        return memories

    def _note_rebuilt(self, tensor: Tensor) -> None:
        """A tensor was given another storage. A new storage after samples have left torch may hold copies of them."""
        memory, _ = self._locate(tensor)
        if memory is None and self._has_exposed_samples:
            memory, _ = self._locate(tensor, make=True)
            if memory is not None:
                memory.has_samples = True
                memory.cause = "it was rebuilt from a copy of the memory of samples (pickle, torch.load)"
