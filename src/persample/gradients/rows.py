"""Which rows the gradients of a batch have, and how the back-propagated loss combines the samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.host import check_conditions
from persample.distributed import Processes
from persample.errors import PerSampleError, SamplesMixed
from persample.gradients.split_units import SplitUnits, split_units
from persample.gradients.units import UnitOptions, Units
from persample.layouts import (
    EVEN,
    Divisor,
    Reduced,
    Reduction,
    SampleUnits,
    describe_divisors,
    find_own_factors,
    make_sample_units,
)
from persample.terms import Term, find_factors, merge_samples


class NotRecorded(PerSampleError, AttributeError):
    """A recording was asked for an answer before the pass that it comes from. `hasattr` is False until then."""


class BatchRows:
    """The rows of the batch of a recording. All losses of one forward pass have the same.

    Attributes:
        size: the number of samples, None before the first forward pass.
        has_parts: whether the batch has come in several parts; the mean of one sample is a mean, too.
        units: the units of this batch; without, each sample has its own row.
        split: how rows are distributed, if other processes have samples of the same units.
        sample_units: the units of the samples, for the forward pass: samples of one unit may be combined.
    """

    def __init__(self, parameters: Iterable[Tensor], processes: Processes, units: UnitOptions | None = None) -> None:
        self._parameters = list(parameters)
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self.processes = processes
        self._unit_options = units
        self.size: int | None = None
        self.has_parts = False
        self.units: Units | None = None
        self.split: SplitUnits | None = None
        self.sample_units: SampleUnits | None = None

    def start(self, batch_size: int) -> int:
        """Set the batch size; all forward passes of a recording must have the same."""
        if self.size is None:
            check_conditions()
        elif self.size != batch_size:
            raise PerSampleError(
                f"A forward pass of {batch_size} samples in a recording that has one of {self.size}. Use one "
                "recording for each batch."
            )
        if self._unit_options is not None and self.units is None:
            self.units = self._unit_options.find_units(batch_size, self.device)
            if self.units.are_named and not self.is_alone:
                self.split = split_units(self.units, self.processes)
            if self.split is not None:
                self.split.check_memory(self._parameters, self.processes)
                self.units = self.split.own
        self.size = batch_size
        return batch_size

    def grow(self, batch_size: int) -> None:
        """Add samples to the batch: a forward pass has got another part of it."""
        self.size, self.has_parts = batch_size, True

    def find_need_of_whole_batch(self) -> str:
        """Why all samples must be known before the first forward pass, in words; empty if they need not be."""
        if self._unit_options is not None:
            return "units are given"
        return "" if self.is_alone else "several processes share the batch"

    def make_sample_units(self) -> SampleUnits | None:
        """The units of the samples, for a forward pass."""
        if self.units is not None and self.split is None:
            self.sample_units = make_sample_units(self.units.rows)
        return self.sample_units

    def has_same_units(self, batch_size: int) -> bool:
        """Whether the next batch, of this size, has the units of this one: a function may give others for each."""
        if self._unit_options is None or self.units is None or not callable(self._unit_options.ids):
            return True
        units = self._unit_options.find_units(batch_size, self.device)
        before = self.units if self.split is None else self.split.given
        return list(units.names) == list(before.names) and list(units.rows) == list(before.rows)

    def set_found(self, size: int, units: Units | None) -> None:
        """Set the rows of a batch that no forward pass is recorded for."""
        self.size, self.units = size, units

    @property
    def is_alone(self) -> bool:
        """Whether this process has the whole batch."""
        return type(self.processes) is Processes

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        if self.size is None:
            raise NotRecorded("No forward pass has been recorded yet: call the model inside the block.")
        return self.size

    @property
    def count(self) -> int:
        """The number of rows of this process."""
        return self.batch_size if self.units is None else len(self.units.names)

    def count_all(self) -> int:
        """The number of rows of all processes."""
        return self.processes.count(self.count)

    @property
    def names(self) -> Sequence[Any]:
        """The unit of each row; without units, the numbers of the samples."""
        return range(self.batch_size) if self.units is None else self.units.names

    @property
    def met_units(self) -> SampleUnits | None:
        """The units of the samples, if samples of one unit were combined, so that none has a loss of its own."""
        return self.sample_units if self.sample_units is not None and self.sample_units.have_met else None

    @property
    def kind(self) -> str:
        """What has a row, in words."""
        return "samples" if self.units is None else "units"

    def check_weights(self, answer: str, weights: Tensor) -> None:
        """Refuse weights that are not one for each row."""
        if weights.shape != (self.count,):
            count, shape = f"{self.count} {self.kind}", tuple(weights.shape)
            raise PerSampleError(f"{answer}() needs one weight for each of {count}, got shape {shape}.")

    def merge(self, term: Term, times: int = 1) -> Term:
        """The term with a row for each unit; it has the samples of `times` parameters, one after the other."""
        if self.units is None:
            return term
        return merge_samples(term, self.units.groups.to(next(find_factors(term)).device).repeat(times))

    def describe(self) -> str:
        """The number of rows, in words."""
        if self.units is None:
            return f"batch_size={self.batch_size}"
        return f"{self.count} units of {self.batch_size} samples ({self.units.reduction})"


class LossReduction:
    """How the loss of a recording combines the samples: as given, or as found in its backward passes.

    Args:
        given: "sum" or "mean"; None: as found.
        owns_divisor: divide each sample's part of a mean by its own number of targets, not by that of the batch.
    """

    def __init__(self, given: str | None = None, owns_divisor: bool = False) -> None:
        self.given = given
        self._owns_divisor = owns_divisor
        self._found: Reduction | None = None
        self._divisors: tuple[Divisor, ...] = ()
        self._batch = 0
        self._factors: Tensor | None = None  # of the samples' parts in the running backward pass
        self._noted_pass: int | None = None  # the backward pass for which `note_loss` was called, while it runs
        self._enclosing_loss: Reduced | None = None  # of a pass that does not reach weights itself, while it runs

    @property
    def kind(self) -> str:
        """ "sum" or "mean"."""
        return self.given or self._found or "sum"

    def get_scale(self, rows: BatchRows) -> float:
        """Undoes the division by the batch size in a mean loss, or by the number of units if these are combined."""
        if self.kind != "mean":
            return 1.0
        units = rows.met_units
        return float(rows.batch_size if units is None else len(units.first))

    def _describe_divisors(self, rows: BatchRows) -> str | None:
        return describe_divisors(self._divisors, self._batch, rows.met_units)

    def has_own_means(self, rows: BatchRows) -> bool:
        """Whether samples with different parts of a divisor have had theirs divided by their own numbers."""
        return self._owns_divisor and self._describe_divisors(rows) is not None

    def describe(self, rows: BatchRows) -> str:
        """How the loss combines the samples, in words."""
        divisors = self._describe_divisors(rows)
        if divisors is None:
            return self.kind
        return f"{self.kind} of the samples' own means" if self.has_own_means(rows) else f"{self.kind} over {divisors}"

    # ---- backward passes ----

    def forget(self) -> None:
        """Forget what was found: no rows are left of earlier backward passes."""
        self._found, self._divisors = None, ()

    def note_loss(self, loss: Reduced, rows: BatchRows, reaches_weights: bool = True) -> None:
        """Take how the loss that the running backward pass starts from combines the samples.

        All backward passes of a recording must agree. Without this call, a pass starts from the samples' own losses. A
        pass that does not reach weights counts only if passes inside it do, as with reentrant checkpoints.
        """
        if not reaches_weights:
            self._enclosing_loss = loss
            _torch.call_after_backward(self._forget_enclosing_loss)
            return
        self._noted_pass = _torch.get_backward_pass()
        if rows.batch_size > 1 or EVEN in loss.divisors:  # the sum of one is the mean, unless it is a part of a batch
            self._take(loss, rows)

    def _forget_enclosing_loss(self) -> None:
        self._enclosing_loss = None

    def end_pass(self, rows: BatchRows) -> None:
        """Note that a backward pass has ended."""
        if self._noted_pass is None and self._enclosing_loss is not None:
            self.note_loss(self._enclosing_loss, rows)
            self._noted_pass = None
        elif self._noted_pass is None and rows.batch_size > 1 and not (rows.has_parts and self.get_scale(rows) > 1):
            self._set_found("sum")
        elif self._noted_pass == _torch.get_backward_pass():  # else a pass inside another one has ended
            self._noted_pass = self._factors = None

    def _take(self, loss: Reduced, rows: BatchRows) -> None:
        given, where = self.given, f"{loss.cause}, in {loss.place}"
        if loss.kind == "root":
            raise SamplesMixed(f"The back-propagated loss mixes the samples: {where}.")
        if not loss.is_clear and given is None:
            raise PerSampleError(
                f"Whether the loss is a sum or a mean over the samples is not clear: {where}. Pass "
                "loss_reduction='sum' or 'mean' to say by which factor the rows are scaled, or reduce all parts alike."
            )
        if given is not None and loss.is_clear and loss.kind != given:
            raise PerSampleError(
                f"loss_reduction='{given}' was given, but the back-propagated loss is a {loss.kind} over the samples: "
                f"{where}. Pass loss_reduction='{loss.kind}', or leave it out to use what is found."
            )
        batch = rows.batch_size
        self._divisors, self._batch = loss.divisors if loss.is_share else (), batch
        factors = find_own_factors(self._divisors, batch, rows.met_units) if self._owns_divisor else None
        if isinstance(factors, str):
            raise PerSampleError(
                f"divisor='own' was given, but {factors}: {where}. Reduce each sample's loss by itself first, pass "
                "loss_reduction='sum' if the number is a factor of each sample's loss, or leave divisor='batch', which "
                "holds the number of the whole batch constant."
            )
        self._factors = factors
        self._set_found(loss.kind)

    def _set_found(self, found: Reduction) -> None:
        if self.given is None and self._found not in (None, found):
            raise PerSampleError(
                f"One backward pass of this recording starts from a {self._found} over the samples, another from a "
                f"{found}: the rows of both cannot be added up. Reduce all losses alike, or pass loss_reduction."
            )
        self._found = found

    def weigh(self, term: Term, times: int = 1) -> Term:
        """The term of the running backward pass, with each sample's part divided by its own number.

        It has the samples of `times` parameters, one after the other.
        """
        if self._factors is None:
            return term
        return term.weigh_samples(self._factors.repeat(times))
