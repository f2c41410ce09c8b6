"""What is known about the tensors of a forward pass, by identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from persample import _torch
from persample._torch import get_saved_tensor_hooks
from persample.backward import Collector
from persample.layouts import CountedSizes, Summed, Where, add_samples_to_layout

V = TypeVar("V")


class TensorMap(Generic[V]):
    """A dict with tensors as keys, by identity; it keeps no tensor alive.

    It is read several times for each op of a forward pass, so it is a plain dict of ids. The weak reference beside each
    value shows whether an id now belongs to another tensor.

    >>> import torch
    >>> a, names = torch.ones(2), TensorMap()
    >>> names[a] = "a"
    >>> names.get(a), names.get(torch.ones(2))
    ('a', None)
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[ref[Tensor], V]] = {}

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        self.entries[id(tensor)] = (ref(tensor), value)

    def get(self, tensor: Tensor) -> V | None:
        entry = self.entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def discard(self, tensor: Tensor) -> None:
        """Remove a tensor, if it is there."""
        if tensor in self:
            del self.entries[id(tensor)]

    def keep_last(self, count: int) -> None:
        """Remove tensors that no longer exist, and all but the last `count` others."""
        alive = [(key, entry) for key, entry in self.entries.items() if entry[0]() is not None]
        self.entries = dict(alive[-count:])

    def __bool__(self) -> bool:
        return bool(self.entries)

    def items(self) -> Iterator[tuple[Tensor, V]]:
        """The tensors that still exist, and their values."""
        for reference, value in list(self.entries.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, value

    def __contains__(self, tensor: Tensor | None) -> bool:
        entry = self.entries.get(id(tensor))
        return entry is not None and tensor is not None and entry[0]() is tensor


class KnownTensors(TensorMap[tuple[Where | None, bool]]):
    """Where the samples lie in the tensors of a forward pass, and what else is known about them.

    The value of a tensor is its layout, and whether the tensor required grad when the layout was found.

    Attributes:
        summed: how sums over the samples were computed.
        of_hidden_weights: the tensors that were computed from weights and samples without grad.
        has_inputs: whether a tensor from outside was declared to have samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.summed: TensorMap[Summed] = TensorMap()
        self.of_hidden_weights: TensorMap[bool] = TensorMap()
        self.has_inputs = False
        # By memory address: a checkpoint inside a checkpoint returns what it saved as another object.
        self._saved: dict[tuple[Any, ...], Where | None] = {}
        self._given: dict[int | None, StorageWeakRef] = {}  # memory of samples from outside

    def get_layout(self, tensor: Tensor) -> Where | None:
        """The layout that was set for a tensor, None if there is none."""
        known = self.get(tensor)
        return None if known is None else known[0]

    def set_layout(self, tensor: Tensor, layout: Where | None) -> None:
        """Set the layout of a tensor, which a checkpoint may be saving."""
        self.entries[id(tensor)] = (ref(tensor), (layout, tensor.requires_grad))
        if get_saved_tensor_hooks() is not None:
            self._saved[_get_address(tensor)] = layout

    def get_saved_layout(self, tensor: Tensor) -> Where | None:
        """The layout of a tensor that a checkpoint has saved, which may be another object now."""
        return self._saved.get(_get_address(tensor))

    def grow(self, before: int, batch: int) -> None:
        """Samples are added to the batch, which had `before` samples."""
        for tensor, (where, had_grad) in list(self.items()):
            self[tensor] = (add_samples_to_layout(where, tensor.shape, before, batch), had_grad)
        for address, where in list(self._saved.items()):
            self._saved[address] = add_samples_to_layout(where, address[2], before, batch)

    # ---- memory of samples from outside ----

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with samples that came from outside, of which it is the rest."""
        storage = self._given.get(_torch.find_storage_id(tensor))
        return storage is not None and not storage.expired()

    def note_given(self, tensor: Tensor) -> None:
        """Note that a tensor of samples comes from outside, so that other parts of its memory do, too."""
        storage = _torch.find_storage(tensor)
        if storage is not None:
            self._given[_torch.find_storage_id(tensor)] = StorageWeakRef(storage)


class ForwardPass(Protocol):
    """What those who run a use of weights need to know about the forward pass; the tracker provides it."""

    batch: int
    collector: Collector
    is_coupled: bool  # whether samples may influence each other
    advice: str  # what the user can do if samples are mixed, in the words of the front end
    counted: CountedSizes
    known: KnownTensors

    def place(self) -> str:
        """The module whose code is running, in words."""


def _get_address(tensor: Tensor) -> tuple[Any, ...]:
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
