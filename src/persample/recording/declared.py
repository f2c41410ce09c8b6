"""The batches that were declared before a model is called with them, and what private training adds to a recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from persample._internal.tree import iterate_tensors
from persample.forward import Detector, TensorMap
from persample.layouts import Where

_MAX_BATCHES = 16  # that are declared as samples before they are used


class DeclaredBatches:
    """Tensors that were declared as samples, and their batch dimensions.

    Those of the last batches are kept, because loaders work in advance. A subclass may follow their rows, from the
    moment when they are declared until the model is called.

    Attributes:
        batches: the declared tensors of each batch, with their batch dimensions.
    """

    def __init__(self) -> None:
        self.batches: deque[TensorMap[int]] = deque(maxlen=_MAX_BATCHES)

    def add(self, batch: Any, batch_dim: int) -> TensorMap[int]:
        """Declare the tensors of a batch."""
        declared: TensorMap[int] = TensorMap()
        for tensor in iterate_tensors(batch):
            declared[tensor] = batch_dim
        self.batches.append(declared)
        return declared

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TensorMap[int]]:
        """The batches that have tensors in the arguments of a call."""
        if not self.batches:
            return []
        given = list(iterate_tensors((args, kwargs)))
        return [declared for declared in self.batches if any(tensor in declared for tensor in given)]

    def find_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The number of samples in the batch that a call has tensors of, or that was declared last."""
        declared = [*self.batches, *self.find(args, kwargs)][-1:]
        found = (tensor.shape[dim] for batch in declared for tensor, dim in batch.items() if tensor.dim() > dim)
        return next(found, None)

    # ---- rows that are followed ----

    def start_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the model is about to be called, and follow nothing: the recording does."""

    def start_step(self) -> None:
        """Note that the call that is about to run begins a step."""

    def get_layouts(self) -> Callable[[int], Iterable[tuple[Tensor, Where]]] | None:
        """What lists, for a batch size, the layouts of the tensors that were followed; None if none were."""
        return None

    def pause(self) -> AbstractContextManager[Any]:
        """Inside the block, nothing is followed."""
        return nullcontext()

    def resume(self) -> None:
        """Follow batches that were declared in advance: a step has ended."""

    def stop(self) -> None:
        """Follow nothing any more."""


class Guard:
    """What private training adds to the recordings of a watched model.

    Args:
        detectors: refuse what breaks the bound of a sample.
        batches: the batches that are declared.
    """

    def __init__(self, detectors: tuple[Detector, ...], batches: DeclaredBatches) -> None:
        self.detectors, self.batches = detectors, batches
