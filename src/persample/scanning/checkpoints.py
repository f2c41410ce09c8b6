"""The states of the model that a scan looks at, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from persample.losses import describe_value
from persample.scanning.digest import digest_of
from persample.scanning.errors import ScanError

State = Mapping[str, Tensor]
_INNER = ("state_dict", "model_state_dict", "model")  # where trainers put the model's own state


class Checkpoints:
    """States of a model, each with the learning rate that training had there; without any, the model as it is."""

    def __init__(
        self,
        model: nn.Module,
        states: Sequence[State | str | Path] | None = None,
        learning_rates: Sequence[float] | None = None,
    ) -> None:
        if states is not None and (isinstance(states, (str, Path, Mapping)) or not len(states)):
            raise ScanError("checkpoints has to be a list of state dicts or of files, with at least one.")
        self._model = model
        self._states = [None] if states is None else [_apart(state, model) for state in states]
        rates = [1.0] * len(self._states) if learning_rates is None else [float(rate) for rate in learning_rates]
        if len(rates) != len(self._states):
            raise ScanError(f"There are {len(rates)} learning rates for {len(self._states)} checkpoints.")
        self.learning_rates = rates

    @contextmanager
    def each(self) -> Iterator[Iterator[int]]:
        """Loads one after the other; the model has its own state again afterwards."""
        if self._states == [None]:
            yield iter([0])
            return
        own = copy.deepcopy(self._model.state_dict())
        try:
            yield self._loaded()
        finally:
            self._model.load_state_dict(own)

    def digests(self) -> list[str]:
        """What tells each state from others."""
        if self._states == [None]:
            return [digest_of(dict(self._model.named_parameters()), dict(self._model.named_buffers()))]
        return [digest_of(dict(self._read(state))) for state in self._states]

    def _loaded(self) -> Iterator[int]:
        for i, state in enumerate(self._states):
            try:
                self._model.load_state_dict(dict(self._read(state)))
            except RuntimeError as error:
                raise ScanError(f"Checkpoint {self._name(i)} does not fit the model: {error}") from error
            yield i

    def _read(self, state: Any) -> State:
        if isinstance(state, Mapping):
            return _inner(state)
        if not isinstance(state, (str, Path)):
            raise ScanError(f"A checkpoint is a state dict or a file, got {describe_value(state)}.")
        path = Path(state)
        if not path.is_file():
            raise ScanError(f"There is no checkpoint {path}.")
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                return load_file(path)
            return _inner(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise ScanError(f"{path} cannot be read as a checkpoint: {type(error).__name__}: {error}") from error

    def _name(self, i: int) -> str:
        state = self._states[i]
        return str(state) if isinstance(state, (str, Path)) else str(i)


def _apart(state: Any, model: nn.Module) -> Any:
    """A state of its own, where it is the model's: loading another one would change it."""
    if not isinstance(state, Mapping):
        return state
    of_model = {value.data_ptr() for value in model.state_dict().values() if isinstance(value, Tensor)}
    shared = any(isinstance(value, Tensor) and value.data_ptr() in of_model for value in _inner(state).values())
    return copy.deepcopy(state) if shared else state


def _inner(state: Any) -> State:
    if not isinstance(state, Mapping):
        raise ScanError(f"A checkpoint has to hold a state dict, got {describe_value(state)}.")
    return next((state[key] for key in _INNER if isinstance(state.get(key), Mapping)), state)
