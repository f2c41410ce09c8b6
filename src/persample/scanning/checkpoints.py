"""The checkpoints that a scan loads into the model, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.text import describe_value
from persample.scanning.digest import compute_digest
from persample.scanning.errors import ScanError

State = Mapping[str, Tensor]
_MODEL_KEYS = ("state_dict", "model_state_dict", "model")  # where training code puts the state dict of the model


class Checkpoints:
    """State dicts of a model with their learning rates. Without any, the model is used as it is."""

    def __init__(
        self,
        model: nn.Module,
        states: Sequence[State | str | Path] | None = None,
        learning_rates: Sequence[float] | None = None,
    ) -> None:
        if states is not None and (isinstance(states, (str, Path, Mapping)) or not len(states)):
            raise ScanError("checkpoints must be a list of at least one state dict or file.")
        self._model = model
        self._states = [None] if states is None else [_copy_if_shared(state, model) for state in states]
        rates = [1.0] * len(self._states) if learning_rates is None else [float(rate) for rate in learning_rates]
        if len(rates) != len(self._states):
            raise ScanError(f"Got {len(rates)} learning rates for {len(self._states)} checkpoints.")
        self.learning_rates = rates

    @property
    def count(self) -> int:
        """The number of checkpoints."""
        return len(self._states)

    @contextmanager
    def load_each(self) -> Iterator[Iterator[int]]:
        """Give an iterator that loads each checkpoint and yields its index. The block restores the model's state."""
        if self._states == [None]:
            yield iter([0])
            return
        before = copy.deepcopy(self._model.state_dict())
        try:
            yield self._load_one_by_one()
        finally:
            self._model.load_state_dict(before)

    def compute_digests(self) -> list[str]:
        """A digest of the weights of each checkpoint."""
        if self._states == [None]:
            return [compute_digest(dict(self._model.named_parameters()), dict(self._model.named_buffers()))]
        return [compute_digest(dict(_read_state(state))) for state in self._states]

    def _load_one_by_one(self) -> Iterator[int]:
        for i, state in enumerate(self._states):
            try:
                self._model.load_state_dict(dict(_read_state(state)))
            except RuntimeError as error:
                name = state if isinstance(state, (str, Path)) else i
                raise ScanError(f"Checkpoint {name} does not fit the model: {error}") from error
            yield i


def check_weights(
    settings: Mapping[str, Any], model: nn.Module, states: Sequence[State | str | Path] | None
) -> Checkpoints:
    """The checkpoints of a scan with these settings, after a comparison of the weights."""
    found = Checkpoints(model, states, settings["learning_rates"])
    if found.compute_digests() != settings["checkpoints"]:
        raise ScanError(
            "The weights of the model differ from the scanned ones. Load the scanned weights, or pass the "
            "checkpoints to Scan(...)."
        )
    return found


@contextmanager
def load_last(model: nn.Module, states: Sequence[State | str | Path] | None) -> Iterator[None]:
    """Load the last checkpoint, if any, for the block."""
    with Checkpoints(model, states if states is None else states[-1:]).load_each() as loaded:
        next(loaded)
        yield


def _read_state(state: Any) -> State:
    if isinstance(state, Mapping):
        return _find_model_state(state)
    if not isinstance(state, (str, Path)):
        raise ScanError(f"A checkpoint must be a state dict or a file, got {describe_value(state)}.")
    path = Path(state)
    if not path.is_file():
        raise ScanError(f"There is no checkpoint {path}.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return _find_model_state(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ScanError(f"{path} cannot be read as a checkpoint: {type(error).__name__}: {error}") from error


def _copy_if_shared(state: Any, model: nn.Module) -> Any:
    """Copy a state dict that shares memory with the model: loading another checkpoint would change it."""
    if not isinstance(state, Mapping):
        return state
    addresses = {value.data_ptr() for value in model.state_dict().values() if isinstance(value, Tensor)}
    tensors = [value for value in _find_model_state(state).values() if isinstance(value, Tensor)]
    return copy.deepcopy(state) if any(tensor.data_ptr() in addresses for tensor in tensors) else state


def _find_model_state(state: Any) -> State:
    """The state dict of the model in a checkpoint that may contain more, such as the optimizer's."""
    if not isinstance(state, Mapping):
        raise ScanError(f"A checkpoint must contain a state dict, got {describe_value(state)}.")
    return next((state[key] for key in _MODEL_KEYS if isinstance(state.get(key), Mapping)), state)
