"""Data loaders that hand each batch to the optimizer of private training, which then knows the samples.

Targets, masks and weights come from the loader, and the model may never see them as arguments. They are declared before
the model is called, so that the loss is followed as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from persample.private.optimizer import PrivateOptimizer
from persample.private.units import get_content


def hand_out_batches(loader: DataLoader[Any], optimizer: PrivateOptimizer) -> Any:
    """A copy of a loader, of the same class for `isinstance`, whose batches are known to the optimizer."""
    kind: Any = type(loader)
    made: Any = object.__new__(_make_class(kind))
    # Not setattr: a loader refuses some of its attributes.
    vars(made).update(vars(loader), private_optimizer=ref(optimizer))
    return made


class _HandingOut:
    """Base of loaders that hand out their batches. A copy of such a loader, and a saved one, are ordinary loaders."""

    private_optimizer: ref[PrivateOptimizer]
    original_class: type

    def __iter__(self) -> Iterator[Any]:
        return _Batches(super().__iter__(), self.private_optimizer)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "private_optimizer"}
        return object.__new__, (self.original_class,), state


class _Batches:
    """Iterator over the batches of a loader. It has the attributes of the loader's own iterator."""

    def __init__(self, batches: Iterator[Any], optimizer: ref[PrivateOptimizer]) -> None:
        self._batches, self._optimizer = batches, optimizer
        made = optimizer()
        self._loop = None if made is None else made.arrivals.handed_out.begin_loop()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            return get_content(next(self._batches))
        return optimizer.arrivals.load(self._batches, self._loop)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


@cache
def _make_class(kind: type) -> type:
    if issubclass(kind, _HandingOut):
        return kind
    return type(kind.__name__, (_HandingOut, kind), {"original_class": kind})
