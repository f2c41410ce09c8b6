"""What a recording fills with what its backward passes find, and what the answers are computed from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.precision import widen
from persample.errors import PerSampleError
from persample.gradients.explanation import TriedFunctions
from persample.gradients.rows import BatchRows, LossReduction, NotRecorded
from persample.gradients.squared_norms import NonFinite, SquaredNorms
from persample.gradients.stack import Stack
from persample.layouts import Reduced
from persample.terms import Term, add_terms, find_factors, map_factors


class OutsideMemory:
    """The memory of tensors from outside, and the copies that a backward pass has made of parts of it."""

    def __init__(self) -> None:
        # Ids of freed memory may remain: that can cause a copy without need, and nothing else.
        self._ids: set[int] = set()
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}  # by place in memory: a factor, kept alive, and its copy

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor as outside."""
        storage_id = _torch.find_storage_id(tensor)
        if storage_id is not None:
            self._ids.add(storage_id)

    def copy_factors(self, term: Term) -> Term:
        """The same term, with copies of its factors that lie in outside memory."""
        return map_factors(term, self._copy) if any(map(self._contains, find_factors(term))) else term

    def forget_copies(self) -> None:
        """End a backward pass: from now on the memory may have other values."""
        self._copies.clear()

    def _contains(self, tensor: Tensor) -> bool:
        return _torch.find_storage_id(tensor) in self._ids or _torch.is_foreign_memory(tensor)

    def _copy(self, tensor: Tensor) -> Tensor:
        if not self._contains(tensor):
            return tensor
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if place not in self._copies:
            self._copies[place] = (tensor, _copy_memory(tensor))
        return self._copies[place][1]


def _copy_memory(tensor: Tensor) -> Tensor:
    """A copy that needs no more memory than the tensor: entries that an expanded tensor repeats are copied once."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not 0 < length < tensor.numel():
        return tensor.clone()
    memory = torch.as_strided(tensor, (length,), (1,)).clone()
    return torch.as_strided(memory, tensor.shape, tensor.stride(), 0)


class ForwardNotes:
    """What is noted while a forward pass is followed and verified. All losses of the pass share it.

    Attributes:
        tried: the functions whose motion was found by trial; the tracker fills it.
        outside: the memory of tensors from outside.
        verification: whether samples were compared with the batch, in words.
        row_verification: whether a row was compared with the gradient of the sample alone, in words.
    """

    def __init__(self) -> None:
        self.tried = TriedFunctions()
        self.outside = OutsideMemory()
        self.verification = "not verified: no forward pass has ended"
        self.row_verification = ""

    def note_verification(self, status: str) -> None:
        """Note whether samples were compared with the batch."""
        self.verification = status

    def note_row_verification(self, status: str) -> None:
        """Note whether a row was compared with the gradient of the sample alone."""
        self.row_verification = status

    def copy(self) -> ForwardNotes:
        """The same statuses, for rows that were computed from others."""
        other = ForwardNotes()
        other.verification, other.row_verification = self.verification, self.row_verification
        return other

    def describe(self) -> list[str]:
        """The last lines of `repr`."""
        rows = self.row_verification if self.verification.startswith("verified") else ""
        return [*([f"  {rows}"] if rows.startswith("no row") else []), f"  {self.verification})"]


@dataclass(frozen=True)
class RecordedBatch:
    """What all intakes of a recording share: with several losses, each loss has an intake.

    Attributes:
        parameters: the recorded parameters by name.
        rows: the rows of the batch.
        loss_reduction: how the loss combines the samples, None: as found.
        owns_divisor: see `LossReduction`.
        nonfinite: what happens to samples whose gradient is not finite.
        notes: what is noted about the forward pass.
    """

    parameters: Mapping[str, Tensor]
    rows: BatchRows
    loss_reduction: str | None = None
    owns_divisor: bool = False
    nonfinite: NonFinite = "raise"
    notes: ForwardNotes = field(default_factory=ForwardNotes)


class Intake(ABC):
    """The gradients of one recording, as its backward passes bring them. Subclasses differ in what they keep.

    A recording sets the batch in `rows`, calls `receive` with what a backward pass found for a parameter, and `finish`
    when the pass has ended.

    Attributes:
        is_early: whether the terms of a parameter are to be received as soon as all its uses have arrived.
        keeps_rows: whether the rows are kept after a backward pass.
        parameters: the recorded parameters by name.
        shared: by name, the gradients that belong to no sample.
        zeroed: parameters for which `zero_grad()` was called since the last backward pass.
    """

    is_early = False
    keeps_rows = False

    def __init__(self, batch: RecordedBatch) -> None:
        self.rows, self.notes, self.nonfinite = batch.rows, batch.notes, batch.nonfinite
        self.reduction = LossReduction(batch.loss_reduction, batch.owns_divisor)
        parameters, processes = batch.parameters, batch.rows.processes
        self.shared: dict[str, Tensor] = {}
        self.zeroed: list[Tensor] = []
        self._held: dict[str, Term] = {}  # with a row for each sample: until the pass has ended, if units are split
        if self.rows.is_alone:
            self.parameters = dict(parameters)
            self._names = {id(p): name for name, p in parameters.items()}
        else:
            self.parameters = {name: processes.get_template(p) for name, p in parameters.items()}
            self._names = {id(processes.get_used(p)): name for name, p in parameters.items()}
        self.is_backward_done = False

    # ---- filling ----

    def grow(self, batch_size: int) -> None:
        """Add samples to the batch, unless the whole batch must be known at once."""
        if need := self._find_need_of_whole_batch():
            raise PerSampleError(
                f"This forward pass gets another part of the batch than the last one, and {need}: pass samples= with "
                "the tensor that has one row for each sample, or the whole batch in one call."
            )
        self.rows.grow(batch_size)

    def _find_need_of_whole_batch(self) -> str:
        """Why all samples must be known before the first forward pass, in words; empty if they need not be."""
        if self.is_backward_done and not self.keeps_rows:
            return "the rows of the last one are not kept"
        return self.rows.find_need_of_whole_batch()

    def receive(self, parameter: Tensor, term: Term) -> None:
        """Take what a backward pass found for a parameter; parameters that are not recorded are ignored."""
        name = self._names.get(id(parameter))
        if name is None:
            return
        term = self.reduction.weigh(term)
        if self.rows.split is None:
            self.receive_rows(name, self.rows.merge(term))
        else:
            self._held[name] = add_terms([self._held[name], term]) if name in self._held else term

    def receive_shared(self, parameter: Tensor, grad: Tensor) -> None:
        """Take a gradient of a parameter that belongs to no sample."""
        name = self._names.get(id(parameter))
        if name is not None:
            self.shared[name] = self.shared[name] + grad if name in self.shared else grad.detach().clone()

    @abstractmethod
    def receive_rows(self, name: str, term: Term) -> None:
        """Take the rows of a parameter."""

    def receive_stack(self, parameters: Sequence[Tensor], term: Term) -> None:
        """Take one term for several parameters: the samples of each parameter after those of the last."""
        found = self._names
        names = [found.get(id(parameter), "") for parameter in parameters]
        if self.rows.split is not None:
            for parameter, (_, own) in zip(parameters, Stack(names, term).split(), strict=True):
                self.receive(parameter, own)
            return
        term = self.reduction.weigh(term, len(names))
        term = self.rows.merge(term, len(names))
        if "" not in names:
            self._receive_stack(Stack(names, term))
            return
        for name, own in Stack(names, term).split():
            if name:
                self.receive_rows(name, own)

    @abstractmethod
    def _receive_stack(self, stack: Stack) -> None: ...

    def note_loss(self, loss: Reduced, reaches_weights: bool = True) -> None:
        """Take how the loss that the running backward pass starts from combines the samples."""
        self.reduction.note_loss(loss, self.rows, reaches_weights)

    def finish(self) -> None:
        """Note that a backward pass, or a pass inside it, has ended."""
        self.reduction.end_pass(self.rows)
        if self.rows.split is not None:
            self._receive_rows_of_units()
        if self.rows.units is not None and self.rows.units.reduction == "mean" and self.rows.met_units:
            raise PerSampleError(
                "unit_reduction='mean' averages the gradients of the samples of a unit, but the code combines these "
                "samples, so that none of them has a loss of its own. Leave unit_reduction out."
            )
        self.is_backward_done = True

    @torch.no_grad()
    def _receive_rows_of_units(self) -> None:
        """Take the rows of this process, after the processes have added up the parts of units that they share."""
        split, processes, scale = self.rows.split, self.rows.processes, self.scale
        assert split is not None
        held, self._held = self._held, {}
        is_used = torch.tensor([name in held for name in self.parameters], dtype=torch.int32, device=self.rows.device)
        for (name, p), count in zip(self.parameters.items(), processes.add_tensors(is_used).tolist(), strict=True):
            if count:
                term = held.pop(name, None)
                shared_rows = split.add_up_shared(term, p, scale)
                if split.shared.count:
                    shared_rows = processes.add_tensors(shared_rows)
                own = split.join(term, shared_rows, scale)
                if own is not None:
                    self.receive_rows(name, own)

    @property
    def is_first_of_two(self) -> bool:
        """Whether the running backward pass is the first of two for one answer."""
        return False

    @property
    def is_complete(self) -> bool:
        """Whether a backward pass that has ended was the last one."""
        return True

    def drop_zeroed(self) -> None:
        """Forget what was found for parameters for which `zero_grad()` was called."""
        zeroed, self.zeroed = self.zeroed, []
        if zeroed:
            self.drop(zeroed)

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget what was found for some parameters."""
        return

    def needs_two_passes(self, factor_bytes: int) -> bool:
        """Whether two backward passes are needed; the terms of one pass would keep so many bytes."""
        return False

    def add_rows(self, parameter: Tensor, term: Term) -> Tensor:
        """The sum over the samples of a parameter's term, before it is scaled: what is added to `p.grad`."""
        return term.sum(torch.ones(term.batch, device=parameter.device))

    # ---- for the answers ----

    @property
    def scale(self) -> float:
        """What the rows have to be multiplied by."""
        return self.reduction.get_scale(self.rows)

    def check_done(self) -> None:
        """Raise if no backward pass has been recorded."""
        if self.rows.batch_size and not self.is_backward_done:
            raise NotRecorded(
                "No backward pass has been recorded yet: call backward on a loss of the model's outputs first."
            )

    @abstractmethod
    def settle_rows(self) -> SquaredNorms:
        """The squared norms, such that the norms of whole rows are reliable."""

    @abstractmethod
    def settle_parts(self) -> SquaredNorms:
        """The squared norms, such that the norms of each parameter's part are reliable."""

    @abstractmethod
    def find_nonfinite(self) -> set[int]:
        """The rows that are not finite."""

    @abstractmethod
    def describe_term(self, name: str) -> str:
        """What was kept for a parameter."""


def add_over_processes(intake: Intake, name: str, part: Tensor, double: bool = False) -> Tensor:
    """The sum of what all processes found for a parameter.

    The result has one dtype on all processes, because a process that did not use the parameter has zeros of any.
    """
    if intake.rows.is_alone:
        return part
    dtype = widen(intake.parameters[name].new_empty(0)).dtype
    if double:
        dtype = torch.promote_types(dtype, torch.float64)
    return intake.rows.processes.add_up(name, part, dtype if part.is_complex() else dtype.to_real())


def add_all_over_processes(intake: Intake, parts: dict[str, Tensor], own: bool) -> dict[str, Tensor]:
    """The sums of what all processes found; with `own`, the parts of this process."""
    if own or intake.rows.is_alone:
        return parts
    return {name: add_over_processes(intake, name, part) for name, part in parts.items()}


def make_zeros(intake: Intake, name: str) -> Tensor:
    """`(batch,)`: the norms for a parameter that was not used."""
    return widen(intake.parameters[name].new_empty(0)).abs().new_zeros(intake.rows.count)
