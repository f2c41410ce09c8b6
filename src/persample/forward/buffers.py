"""The buffers of a model, which a forward pass that is refused must leave as they were."""

from __future__ import annotations

from functools import cached_property
from weakref import ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample.layouts import Call


class Buffers:
    """The buffers of a model, with copies of those that calls have changed.

    Args:
        model: the model; None: there are no buffers.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else ref(model)  # a recording must not keep its model
        self._before: dict[int | None, Tensor] = {}

    @cached_property
    def _by_memory(self) -> dict[int | None, Tensor]:
        """The buffers by their memory, which views of them share."""
        model = None if self._model is None else self._model()
        return {} if model is None else {_torch.find_storage_id(b): b for b in model.buffers()}

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
