"""Which tensors were made since a moment, in any thread.

Modes of torch are local to a thread, so no mode sees what another thread makes. The garbage collector does: an object
that is younger than the last collection of its generation is in one of the two young generations.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

from torch import Tensor

_OLD_GENERATION = 2


class Births:
    """The tensors that are made between `start` and `stop`.

    >>> import torch
    >>> before, births = torch.ones(2), Births()
    >>> births.start()
    >>> after = torch.ones(2)
    >>> births.is_new(before), births.is_new(after)
    (False, True)
    >>> births.stop()
    """

    def __init__(self) -> None:
        self._before: dict[int, ref[Tensor]] = {}
        self._aged: dict[int, ref[Tensor]] = {}  # made since the start, and no longer in a young generation

    def start(self) -> None:
        """Note the young tensors that exist."""
        self._before = {id(t): ref(t) for t in _find_young_tensors()}
        gc.callbacks.append(self._note_collection)

    def stop(self) -> None:
        """Stop the observation of collections."""
        if self._note_collection in gc.callbacks:
            gc.callbacks.remove(self._note_collection)

    def is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor was made after the start."""
        if _refers_to(self._before, tensor):
            return False
        return _refers_to(self._aged, tensor) or any(young is tensor for young in _find_young_tensors())

    def _note_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Before a collection that makes young objects old: note the tensors among them."""
        if phase == "start" and info["generation"] >= _OLD_GENERATION - 1:
            self._aged |= {id(t): ref(t) for t in _find_young_tensors() if not _refers_to(self._before, t)}


def _find_young_tensors() -> list[Tensor]:
    # No list may hold all objects and itself be one of them: such a cycle would keep everything alive.
    found: list[Tensor] = []
    for generation in range(_OLD_GENERATION):
        found += [obj for obj in gc.get_objects(generation) if issubclass(type(obj), Tensor)]
    return found


def _refers_to(references: dict[int, ref[Tensor]], tensor: Tensor) -> bool:
    reference = references.get(id(tensor))
    return reference is not None and reference() is tensor
