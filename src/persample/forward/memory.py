"""What an audit knows about memory: which storages hold values of samples, and which were written in another thread.

For each storage that holds values of samples, it is kept where the samples lie in the tensors that were seen on it, by
their geometry (address, shape, strides). A write removes what was known.

Modes of torch are local to a thread, so no mode sees what another thread makes. The garbage collector does: an object
that is younger than the last collection of its generation is in one of the two young generations.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from persample import _torch
from persample._internal.tree import find_tensors
from persample.layouts import Lost, Where, add_samples_to_layout, find_layout_of_view

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

    def overlaps(self, geometry: Geometry) -> bool:
        """Whether a tensor with this geometry has an entry in common with a tensor of samples."""
        with_samples = (other for other, known in self.known.items() if any(where is not None for where in known))
        return any(_overlap(geometry, other) for other in with_samples)


_MAX_ENTRIES = 10_000_000  # of tensors whose entries are compared one by one


class Memories:
    """The storages that an audit has seen with values of samples, and those that code outside torch may write to.

    Args:
        written_outside: memory to which code outside torch has written in some pass of the model.
    """

    def __init__(self, written_outside: set[StorageWeakRef]) -> None:
        self._written_outside = written_outside
        self._memories: dict[int, tuple[Memory, int]] = {}  # by storage; and by how many bytes it starts later
        self._exposed: list[Memory] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # of memory that code outside torch may write to
        self._has_exposed_samples = False

    def locate(self, tensor: Tensor, make: bool = False) -> tuple[Memory | None, Geometry]:
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

    def note(self, tensor: Tensor, where: Where | None) -> None:
        """Note where the samples lie in a tensor."""
        memory, geometry = self.locate(tensor, make=where is not None)
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

    def note_write(self, tensor: Tensor, cause: str) -> None:
        """Forget what was known about memory that was written to; `cause`: how samples came there, '' if none did."""
        memory, _ = self.locate(tensor, make=bool(cause))
        if memory is not None:
            memory.known.clear()
            self._copies.pop(id(memory), None)
            if cause:
                memory.has_samples, memory.cause = True, cause

    def find_samples(self, tensor: Tensor) -> str | None:
        """How samples came into the memory of a tensor, None if it holds no samples."""
        memory, geometry = self.locate(tensor)
        if memory is None or not memory.has_samples:
            return None
        return memory.cause or ("it shares memory with a tensor of samples" if memory.overlaps(geometry) else None)

    def find_layout_by_base(self, tensor: Tensor, memory: Memory, batch: int) -> Where | None:
        """The layout of a tensor with an unknown geometry: from its base, if that is known."""
        base = tensor._base
        known = None if base is None else memory.known.get(self.locate(base)[1])
        if base is not None and known is not None:
            where: Where | None = find_layout_of_view(tensor, base, known[-1], batch)
            self.note(tensor, where)
            return where
        return Lost(memory.cause or "samples were written into its memory through another tensor")

    def grow(self, before: int, batch: int) -> None:
        """Samples are added to the batch, which had `before` samples."""
        for memory, _ in self._memories.values():
            for geometry, known in memory.known.items():
                known[:] = [add_samples_to_layout(where, geometry[1], before, batch) for where in known]

    # ---- memory outside torch ----

    def expose(self, tensor: Tensor, has_samples: bool, buffers: Iterable[Tensor]) -> None:
        """Note that code outside torch may read and write the memory of a tensor from now on."""
        storage = _torch.find_storage(tensor)
        if storage is None or not storage.nbytes():
            return
        self._add_exposed(tensor)
        if has_samples and not self._has_exposed_samples:
            self._has_exposed_samples = True
            for buffer in buffers:
                self._add_exposed(buffer)  # a numpy view of it may exist since long
        if self._has_exposed_samples:
            self._copy_exposed()

    def note_rebuilt(self, tensor: Tensor) -> None:
        """A tensor was given another storage. A new storage after samples have left torch may hold copies of them."""
        memory, _ = self.locate(tensor)
        if memory is None and self._has_exposed_samples:
            memory, _ = self.locate(tensor, make=True)
            if memory is not None:
                memory.has_samples = True
                memory.cause = "it was rebuilt from a copy of the memory of samples (pickle, torch.load)"

    def _add_exposed(self, tensor: Tensor) -> None:
        memory, _ = self.locate(tensor, make=True)
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
        if memory.ref in self._written_outside or not torch.equal(content, before):
            self._written_outside.add(memory.ref)  # the same values may be written in the next pass
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


def is_whole_of_new_memory(made: Tensor, arguments: Any) -> bool:
    """Whether a result is the whole of some memory that no argument of its call has."""
    storage = _torch.find_storage_id(made)
    is_whole = made.numel() * made.element_size() == made.untyped_storage().nbytes()
    return is_whole and all(_torch.find_storage_id(tensor) != storage for tensor in find_tensors(arguments))


def is_view_of_any(tensor: Tensor, arguments: Any) -> bool:
    """Whether a tensor shares its memory with another one among the arguments of a call."""
    storage = _torch.find_storage_id(tensor)
    others = (_torch.find_storage_id(other) for other in find_tensors(arguments) if other is not tensor)
    return storage is not None and storage in others


# ---- other threads ----


_OLD_GENERATION = 2


class Origins:
    """The constants and the writes that an audit has seen, from `start` to `stop`.

    >>> before, origins = torch.ones(2), Origins()
    >>> origins.start([], [])
    >>> after = torch.ones(2)
    >>> origins.is_young(before), origins.is_young(after)
    (False, True)
    >>> origins.stop()
    """

    def __init__(self) -> None:
        self._before: dict[int, ref[Tensor]] = {}  # the young tensors at the start
        self._aged: dict[int, ref[Tensor]] = {}  # made since the start, and no longer in a young generation
        self._seen: dict[int, StorageWeakRef] = {}  # memory of constants with a known origin
        self._versions: dict[int, tuple[int, int]] = {}  # of each buffer: its memory, and how often it was changed
        self._written: set[int] = set()  # memory that an op has written to

    def start(self, constants: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        """Note what exists."""
        for tensor in constants:
            self.note(tensor)
        for buffer in buffers:
            self.is_changed(buffer)
        self._before = {id(t): ref(t) for t in _find_young_tensors()}
        gc.callbacks.append(self._note_collection)

    def stop(self) -> None:
        """Stop the observation of collections."""
        if self._note_collection in gc.callbacks:
            gc.callbacks.remove(self._note_collection)

    def is_young(self, tensor: Tensor) -> bool:
        """Whether a tensor was made after the start."""
        if _refers_to(self._before, tensor):
            return False
        return _refers_to(self._aged, tensor) or any(young is tensor for young in _find_young_tensors())

    def _note_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Before a collection that makes young objects old: note the tensors among them."""
        if phase == "start" and info["generation"] >= _OLD_GENERATION - 1:
            self._aged |= {id(t): ref(t) for t in _find_young_tensors() if not _refers_to(self._before, t)}

    def note(self, tensor: Tensor) -> None:
        """Note that a constant was made by an op that was seen, or existed before."""
        storage = _torch.find_storage(tensor)
        if storage is not None:
            self._seen[_torch.get_storage_key(storage)] = StorageWeakRef(storage)

    def note_write(self, tensor: Tensor) -> None:
        """Note that an op has written to the memory of a tensor."""
        if (storage := _torch.find_storage(tensor)) is not None:
            self._written.add(_torch.get_storage_key(storage))

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether a constant was made by no op that was seen. Noted then: the question is asked once.

        Memory that torch has not allocated comes from outside, by numpy for example: its values are constants.
        """
        storage = _torch.find_storage(tensor)
        if storage is None or _torch.get_storage_key(storage) in self._seen or not storage.resizable():
            return False
        self.note(tensor)
        return self.is_young(tensor)

    def is_changed(self, buffer: Tensor) -> bool:
        """Whether a buffer was changed by no op that was seen since the last call."""
        storage = _torch.find_storage(buffer)
        if storage is None or buffer.is_inference():
            return False
        now = _torch.get_storage_key(storage), buffer._version
        before = self._versions.setdefault(id(buffer), now)
        self._versions[id(buffer)] = now
        is_seen = now[0] in self._written
        self._written.discard(now[0])
        return before[0] == now[0] and before[1] != now[1] and not is_seen


def _find_young_tensors() -> list[Tensor]:
    # No list may hold all objects and itself be one of them: such a cycle would keep everything alive.
    found: list[Tensor] = []
    for generation in range(_OLD_GENERATION):
        found += [obj for obj in gc.get_objects(generation) if issubclass(type(obj), Tensor)]
    return found


def _refers_to(references: dict[int, ref[Tensor]], tensor: Tensor) -> bool:
    reference = references.get(id(tensor))
    return reference is not None and reference() is tensor
