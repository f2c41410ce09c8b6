"""What all kinds of recorded gradients have in common: the parameters, the batch, the norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from persample._internal.dtypes import widen
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients.clipping import compute_clip_factors
from persample.terms import Term


class NotKept(PerSampleError, AttributeError):
    """A recording was asked for an answer that it has not kept."""


class RecordedGradients(ABC):
    """The gradients of one recording. Its subclasses differ in what they keep, and so in what they can answer.

    A recording fills it: `start` with the batch size of each forward pass, `receive` with what a backward pass found
    for a parameter, `finish` when the backward pass has ended.
    """

    def __init__(self, parameters: Mapping[str, Tensor], loss_reduction: str, processes: Processes) -> None:
        self._parameters = {name: processes.get_template(p) for name, p in parameters.items()}
        self._names = {id(processes.get_used(p)): name for name, p in parameters.items()}
        self._loss_reduction = loss_reduction
        self._processes = processes
        self._batch_size: int | None = None
        self._is_backward_done = False

    # ---- filling ----

    def start(self, batch_size: int) -> int:
        """Set the batch size; all forward passes of a recording must have the same."""
        if self._batch_size not in (None, batch_size):
            raise PerSampleError(
                f"A forward pass of {batch_size} samples in a recording that has one of {self._batch_size}. Use one "
                "recording for each batch."
            )
        self._batch_size = batch_size
        return batch_size

    def receive(self, parameter: Tensor, term: Term) -> None:
        """Take what a backward pass found for a parameter; parameters that are not recorded are ignored."""
        name = self._names.get(id(parameter))
        if name is not None:
            self._receive(name, term)

    @abstractmethod
    def _receive(self, name: str, term: Term) -> None: ...

    def finish(self) -> None:
        """Note that a backward pass has ended."""
        self._is_backward_done = True

    # ---- answers that all kinds have ----

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        if self._batch_size is None:
            raise PerSampleError("No forward pass has been recorded yet: call the model inside the block.")
        return self._batch_size

    @property
    def names(self) -> list[str]:
        """The names of the recorded parameters, as in `model.named_parameters()`."""
        return list(self._parameters)

    def samples(self) -> int:
        """The number of samples of all processes; with one process, the `batch_size`."""
        return self._processes.count(self.batch_size)

    @overload
    def norms(self, per_parameter: Literal[False] = False) -> Tensor: ...

    @overload
    def norms(self, per_parameter: Literal[True]) -> dict[str, Tensor]: ...

    @torch.no_grad()
    def norms(self, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
        """`(batch,)`: the norm of each sample's gradient; with `per_parameter`, `{name: (batch,)}`."""
        squares = self._compute_squared_norms()
        # Rounding in inner products can leave squares slightly below zero.
        if per_parameter:
            return {name: square.clamp(min=0).sqrt() * self._scale for name, square in squares.items()}
        if not squares:
            return torch.zeros(self.batch_size, device=self._device)
        return torch.stack([*squares.values()]).clamp_(min=0).sum(0).sqrt_().mul_(self._scale)

    @torch.no_grad()
    def clip_factors(self, max_norm: float) -> Tensor:
        """`(batch,)`: the factor for each row that makes its norm at most `max_norm`."""
        return compute_clip_factors(self.norms(), max_norm)

    @abstractmethod
    def _compute_squared_norms(self) -> dict[str, Tensor]:
        """The squared norm of each row's part for each parameter, before scaling."""

    # ---- inside ----

    @property
    def _scale(self) -> float:
        """Undoes the division by the batch size in a mean loss."""
        return float(self.batch_size) if self._loss_reduction == "mean" else 1.0

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def _add_over_processes(self, name: str, part: Tensor, double: bool = False, own: bool = False) -> Tensor:
        """The sum of what all processes found for a parameter; with `own`, the part of this process.

        The result has one dtype on all processes, because a process that did not use the parameter has zeros of any.
        """
        if own:
            return part
        dtype = widen(self._parameters[name].new_empty(0)).dtype
        if double:
            dtype = torch.promote_types(dtype, torch.float64)
        return self._processes.add_up(name, part, dtype if part.is_complex() else dtype.to_real())

    def _check_done(self) -> None:
        if self.batch_size and not self._is_backward_done:
            raise PerSampleError(
                "No backward pass has been recorded yet: call backward on a loss of the model's outputs first."
            )

    @property
    def _is_empty(self) -> bool:
        return self._batch_size is None or not self._is_backward_done
