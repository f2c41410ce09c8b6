"""What all kinds of recorded gradients have in common: the parameters, the batch, the norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from persample import _torch
from persample._internal.dtypes import widen
from persample._internal.host import check_conditions
from persample._internal.precision import in_full_precision
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.forward import CONTRIBUTIONS, TriedFunctions
from persample.gradients.clipping import compute_clip_factors
from persample.gradients.explanation import Explanation
from persample.gradients.reduction import LossReduction
from persample.gradients.split_units import SplitUnits, split_units
from persample.gradients.squared_norms import NonFinite, SquaredNorms
from persample.gradients.stack import Stack
from persample.gradients.units import UnitOptions, Units
from persample.layouts import Reduced, SampleUnits, make_sample_units
from persample.terms import Term, add_terms, find_factors, merge_samples


class NotKept(PerSampleError, AttributeError):
    """A recording was asked for an answer that it has not kept."""


class NotRecorded(PerSampleError, AttributeError):
    """A recording was asked for an answer before the pass that it comes from. `hasattr` is False until then."""


class RecordedGradients(ABC):
    """The gradients of one recording. Its subclasses differ in what they keep, and so in what they can answer.

    A recording fills it: `start` with the batch size of each forward pass, `receive` with what a backward pass found
    for a parameter, `finish` when the backward pass has ended.
    """

    is_early = False  # whether the terms of a parameter are to be received as soon as all its uses have arrived

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction,
        processes: Processes,
        nonfinite: NonFinite = "raise",
        units: UnitOptions | None = None,
    ) -> None:
        self._nonfinite_mode = nonfinite
        self._unit_options = units
        self._units: Units | None = None  # of this batch; without, each sample has its own row
        self._split_units: SplitUnits | None = None  # if other processes have samples of the same units
        self._shared: dict[str, Tensor] = {}  # by name: gradients that belong to no sample
        self._held: dict[str, Term] = {}  # by name, with a row for each sample: until the pass has ended, if so
        if type(processes) is Processes:
            self._parameters = dict(parameters)
            self._names = {id(p): name for name, p in parameters.items()}
        else:
            self._parameters = {name: processes.get_template(p) for name, p in parameters.items()}
            self._names = {id(processes.get_used(p)): name for name, p in parameters.items()}
        self._reduction = loss_reduction
        self._noted_pass: int | None = None  # the backward pass for which `note_loss` was called, while it runs
        self._enclosing_loss: Reduced | None = None  # of a pass that does not reach weights itself, while it runs
        self._processes = processes
        self._batch_size: int | None = None
        self._has_parts = False  # whether the batch has come in several parts; the mean of one sample is a mean, too
        self._is_backward_done = False
        self.tried = TriedFunctions()  # filled by the tracker
        self.verification = "not verified: no forward pass has ended"
        self.row_verification = ""  # whether a row was compared with the gradient of the sample alone

    def _describe_verification(self) -> list[str]:
        """The last lines of `repr`."""
        rows = self.row_verification if self.verification.startswith("verified") else ""
        return [*([f"  {rows}"] if rows.startswith("no row") else []), f"  {self.verification})"]

    # ---- filling ----

    def start(self, batch_size: int) -> int:
        """Set the batch size; all forward passes of a recording must have the same."""
        if self._batch_size is None:
            check_conditions()
        elif self._batch_size != batch_size:
            raise PerSampleError(
                f"A forward pass of {batch_size} samples in a recording that has one of {self._batch_size}. Use one "
                "recording for each batch."
            )
        if self._unit_options is not None and self._units is None:
            self._units = self._unit_options.find_units(batch_size, self._device)
            if self._units.are_named and type(self._processes) is not Processes:
                self._split_units = split_units(self._units, self._processes)
            if self._split_units is not None:
                self._split_units.check_memory(self._parameters.values(), self._processes)
                self._units = self._split_units.own
        self._batch_size = batch_size
        return batch_size

    def make_sample_units(self) -> SampleUnits | None:
        """The units of the samples, for the forward pass: samples of one unit may be combined."""
        if self._units is not None and self._split_units is None:
            self._reduction.units = make_sample_units(self._units.rows)
        return self._reduction.units

    def share_sample_units(self, units: SampleUnits | None) -> None:
        """Take the units that another loss of the same forward pass has."""
        self._reduction.units = units

    def grow(self, batch_size: int) -> None:
        """Add samples to the batch: a forward pass has got another part of it."""
        self.check_can_grow()
        self._batch_size, self._has_parts = batch_size, True

    def check_can_grow(self) -> None:
        """Refuse parts of a batch if the whole batch must be known at once."""
        if need := self._find_need_of_whole_batch():
            raise PerSampleError(
                f"This forward pass gets another part of the batch than the last one, and {need}: pass samples= with "
                "the tensor that has one row for each sample, or the whole batch in one call."
            )

    def _find_need_of_whole_batch(self) -> str:
        """Why all samples must be known before the first forward pass, in words; empty if they need not be."""
        if self._is_backward_done and not self._keeps_rows:
            return "the rows of the last one are not kept"
        if self._unit_options is not None:
            return "units are given"
        return "" if type(self._processes) is Processes else "several processes share the batch"

    @property
    def _keeps_rows(self) -> bool:
        """Whether the rows are kept after a backward pass."""
        return False

    def has_same_units(self, batch_size: int) -> bool:
        """Whether the next batch, of this size, has the units of this one: a function may give others for each."""
        if self._unit_options is None or self._units is None or not callable(self._unit_options.ids):
            return True
        units = self._unit_options.find_units(batch_size, self._device)
        before = self._units if self._split_units is None else self._split_units.given
        return list(units.names) == list(before.names) and list(units.rows) == list(before.rows)

    def receive(self, parameter: Tensor, term: Term) -> None:
        """Take what a backward pass found for a parameter; parameters that are not recorded are ignored."""
        name = self._names.get(id(parameter))
        if name is None:
            return
        term = self._reduction.weigh(term)
        if self._split_units is None:
            self._receive(name, self._merge(term))
        else:
            self._held[name] = add_terms([self._held[name], term]) if name in self._held else term

    def receive_shared(self, parameter: Tensor, grad: Tensor) -> None:
        """Take a gradient of a parameter that belongs to no sample."""
        name = self._names.get(id(parameter))
        if name is not None:
            self._shared[name] = self._shared[name] + grad if name in self._shared else grad.detach().clone()

    @abstractmethod
    def _receive(self, name: str, term: Term) -> None: ...

    @in_full_precision
    def receive_stack(self, parameters: Sequence[Tensor], term: Term) -> None:
        """Take one term for several parameters: the samples of each parameter after those of the last."""
        found = self._names
        names = [found.get(id(parameter), "") for parameter in parameters]
        if self._split_units is not None:
            for parameter, (_, own) in zip(parameters, Stack(names, term).split(), strict=True):
                self.receive(parameter, own)
            return
        term = self._reduction.weigh(term, len(names))
        term = self._merge(term, len(names))
        if "" not in names:
            self._receive_stack(Stack(names, term))
            return
        for name, own in Stack(names, term).split():
            if name:
                self._receive(name, own)

    @abstractmethod
    def _receive_stack(self, stack: Stack) -> None: ...

    def _merge(self, term: Term, times: int = 1) -> Term:
        """The term with a row for each unit; it has the samples of `times` parameters, one after the other."""
        if self._units is None:
            return term
        return merge_samples(term, self._units.groups.to(next(find_factors(term)).device).repeat(times))

    def note_loss(self, loss: Reduced, reaches_weights: bool = True) -> None:
        """Take how the loss that the running backward pass starts from combines the samples.

        All backward passes of a recording must agree. Without this call, a pass starts from the samples' own losses. A
        pass that does not reach weights counts only if passes inside it do, as with reentrant checkpoints.
        """
        if not reaches_weights:
            self._enclosing_loss = loss
            _torch.call_after_backward(self._forget_enclosing_loss)
            return
        self._noted_pass = _torch.get_backward_pass()
        if self.batch_size < 2:  # the sum is the mean
            return
        self._reduction.take(loss, self.batch_size)

    def _forget_enclosing_loss(self) -> None:
        self._enclosing_loss = None

    def finish(self) -> None:
        """Note that a backward pass has ended."""
        if self._noted_pass is None and self._enclosing_loss is not None:
            self.note_loss(self._enclosing_loss)
            self._noted_pass = None
        elif self._noted_pass is None and self.batch_size > 1 and not (self._has_parts and self._scale > 1):
            self._reduction.set_found("sum")
        elif self._noted_pass == _torch.get_backward_pass():  # else a pass inside another one has ended
            self._noted_pass = None
            self._reduction.end_pass()
        if self._split_units is not None:
            self._receive_rows_of_units(self._split_units)
        if self._units is not None and self._units.reduction == "mean" and self._reduction.units_have_met:
            raise PerSampleError(
                "unit_reduction='mean' averages the gradients of the samples of a unit, but the code combines these "
                "samples, so that none of them has a loss of its own. Leave unit_reduction out."
            )
        self._is_backward_done = True

    @torch.no_grad()
    def _receive_rows_of_units(self, split: SplitUnits) -> None:
        """Take the rows of this process, after the processes have added up the parts of units that they share."""
        held, self._held = self._held, {}
        is_used = torch.tensor([name in held for name in self._parameters], dtype=torch.int32, device=self._device)
        scale, counts = self._scale, self._processes.add_tensors(is_used).tolist()
        for (name, p), count in zip(self._parameters.items(), counts, strict=True):
            if count:
                term = held.pop(name, None)
                shared_rows = split.add_up_shared(term, p, scale)
                if split.shared.count:
                    shared_rows = self._processes.add_tensors(shared_rows)
                own = split.join(term, shared_rows, scale)
                if own is not None:
                    self._receive(name, own)

    @property
    def is_first_of_two(self) -> bool:
        """Whether the running backward pass is the first of two for one answer."""
        return False

    @property
    def is_complete(self) -> bool:
        """Whether a backward pass that has ended was the last one."""
        return True

    @property
    def has_positions(self) -> bool:
        """Whether the recording splits gradients into parts for each position."""
        return False

    def note_verification(self, status: str) -> None:
        """Note whether samples were compared with the batch, in words."""
        self.verification = status

    def note_row_verification(self, status: str) -> None:
        """Note whether a row was compared with the gradient of the sample alone, in words."""
        self.row_verification = status

    def end_pass(self) -> None:
        """Note that a backward pass has ended, with all passes inside it."""
        return

    def run_backward(self, run: Callable[..., Any], anchor: Tensor, factor_bytes: int) -> None:
        """Run a call of `loss.backward()`.

        Args:
            run: runs the call, with other values of the arguments that it is given by name.
            anchor: what a pass that needs the weights only may be for.
            factor_bytes: what the terms of the pass would keep.
        """
        run()

    def note_sum(self, parameter: Tensor, term: Term, total: Tensor) -> None:
        """Note the sum over the samples of a parameter's term, before it is scaled."""
        return

    def note_outside(self, tensor: Tensor) -> None:
        """Note a tensor from outside: its memory may change without the recording noticing."""
        return

    # ---- answers that all kinds have ----

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        if self._batch_size is None:
            raise NotRecorded("No forward pass has been recorded yet: call the model inside the block.")
        return self._batch_size

    def __len__(self) -> int:
        """The number of rows of this process: `row_count`, and 0 before the first forward pass."""
        return 0 if self._batch_size is None else self.row_count

    def __bool__(self) -> bool:
        """True, also for an empty batch: a recording is no list."""
        return True

    @property
    def row_count(self) -> int:
        """The number of rows of all answers: the number of units if the recording has units, else of samples."""
        batch_size = self.batch_size
        return batch_size if self._units is None else len(self._units.names)

    @property
    def units(self) -> list[Any]:
        """The unit of each row, in the order of the rows; without units, the numbers of the samples."""
        return list(range(self.batch_size) if self._units is None else self._units.names)

    @property
    def names(self) -> list[str]:
        """The names of the recorded parameters, as in `model.named_parameters()`."""
        return list(self._parameters)

    @property
    def loss_reduction(self) -> str:
        """How the back-propagated loss combines the samples, as given or as found in backward.

        "sum", "mean", or, if samples have different parts of the divisor, what it counts: "mean over 36 targets".
        """
        return str(self._reduction)

    def shared(self) -> dict[str, Tensor]:
        """`{name: shape}`: the gradient of what the loss adds to the samples' parts, such as a penalty on the weights.

        It belongs to no sample, so it is in no row. The gradient that `backward` computes is `sum()`, or `mean()` of a
        mean loss, and this.

        >>> import persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     (model(torch.randn(5, 3)).square().mean() + model.weight.square().sum()).backward()
        >>> torch.equal(grads.shared()["weight"], 2 * model.weight)
        True
        """
        self._check_done()
        return {
            name: self._shared[name] if name in self._shared else torch.zeros_like(p)
            for name, p in self._parameters.items()
        }

    @property
    def has_own_means(self) -> bool:
        """Whether the parts of a mean were divided by the samples' own numbers, so that rows do not add up to it."""
        return self._reduction.has_own_means

    @property
    def coupled(self) -> str | None:
        """ "contributions" if the rows are contributions of samples that may influence each other, else None."""
        return "contributions" if self.verification == CONTRIBUTIONS else None

    @property
    def processes(self) -> Processes:
        """The processes that share the batch."""
        return self._processes

    def samples(self) -> int:
        """The number of samples of all processes; with one process, the `batch_size`."""
        return self._processes.count(self.batch_size)

    def _count_rows(self) -> int:
        """The number of rows of all processes."""
        return self._processes.count(self.row_count)

    def explain(self) -> Explanation:
        """What was kept for each parameter, and which functions were tried because persample does not know them.

        >>> import persample
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> with persample.record(model, keep="norms") as grads:
        ...     model(torch.randn(5, 3)).square().mean().backward()
        >>> print(grads.explain())
          parameter  kept
          ---------  ----------
          weight     norms only
          bias       norms only
        <BLANKLINE>
        The definition of every function is known: none was tried.
        """
        return Explanation({name: self._describe_term(name) for name in self._parameters}, self.tried.list())

    @abstractmethod
    def _describe_term(self, name: str) -> str:
        """What was kept for a parameter."""

    @overload
    def norms(self, per_parameter: Literal[False] = False) -> Tensor: ...

    @overload
    def norms(self, per_parameter: Literal[True]) -> dict[str, Tensor]: ...

    @torch.no_grad()
    @in_full_precision
    def norms(self, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
        """`(batch,)`: the norm of each sample's gradient; with `per_parameter`, `{name: (batch,)}`."""
        if per_parameter:
            found = self._settle_parts().compute_part_norms()
            for name in self._parameters.keys() - found.keys():
                found[name] = self._make_zeros(name)
            return {name: found[name] * self._scale for name in self._parameters}
        squares = self._settle_rows()
        if squares.names:
            return squares.compute_norms().mul_(self._scale)
        zeros = [self._make_zeros(name) for name in self._parameters]
        return torch.stack(zeros).sum(0) if zeros else torch.zeros(self.row_count, device=self._device)

    @torch.no_grad()
    @in_full_precision
    def clip_factors(self, max_norm: float) -> Tensor:
        """`(batch,)`: the factor for each row that makes its norm at most `max_norm`."""
        return compute_clip_factors(self.norms(), max_norm)

    @property
    @in_full_precision
    def nonfinite_count(self) -> int:
        """The number of samples whose gradient is not finite, or so large that its squared norm overflows.

        With nonfinite="zero" these samples are left out. With units, it is the number of units with such a gradient.
        """
        return len(self.list_nonfinite())

    @in_full_precision
    def list_nonfinite(self) -> list[int]:
        """The rows that `nonfinite_count` counts."""
        self._check_done()
        return sorted(self._find_nonfinite())

    @abstractmethod
    def _settle_rows(self) -> SquaredNorms:
        """The squared norms, such that the norms of whole rows are reliable."""

    @abstractmethod
    def _settle_parts(self) -> SquaredNorms:
        """The squared norms, such that the norms of each parameter's part are reliable."""

    @abstractmethod
    def _find_nonfinite(self) -> set[int]:
        """The samples whose gradient is not finite."""

    def _describe_nonfinite(self, count: int) -> str:
        if not count:
            return ""
        return f", {count} {self._row_kind} not finite{' and left out' if self._nonfinite_mode == 'zero' else ''}"

    # ---- inside ----

    @property
    def _scale(self) -> float:
        """Undoes the division by the batch size in a mean loss, or by the number of units if these are combined."""
        if self._reduction.kind != "mean":
            return 1.0
        units = self._reduction.units
        return float(len(units.first) if units is not None and units.have_met else self.batch_size)

    @property
    def _row_kind(self) -> str:
        return "samples" if self._units is None else "units"

    def _describe_rows(self) -> str:
        if self._units is None:
            return f"batch_size={self.batch_size}"
        return f"{self.row_count} units of {self.batch_size} samples ({self._units.reduction})"

    def _describe_reduction(self) -> str:
        apart = ", a part of the loss that belongs to no sample in shared()" if self._shared else ""
        return f"loss_reduction='{self._reduction}'{'' if self._reduction.given else ' as found'}{apart}"

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def _add_over_processes(self, name: str, part: Tensor, double: bool = False, own: bool = False) -> Tensor:
        """The sum of what all processes found for a parameter; with `own`, the part of this process.

        The result has one dtype on all processes, because a process that did not use the parameter has zeros of any.
        """
        if own or type(self._processes) is Processes:
            return part
        dtype = widen(self._parameters[name].new_empty(0)).dtype
        if double:
            dtype = torch.promote_types(dtype, torch.float64)
        return self._processes.add_up(name, part, dtype if part.is_complex() else dtype.to_real())

    def _add_all_over_processes(self, parts: dict[str, Tensor], own: bool) -> dict[str, Tensor]:
        if own or type(self._processes) is Processes:
            return parts
        return {name: self._add_over_processes(name, part) for name, part in parts.items()}

    def _make_zeros(self, name: str) -> Tensor:
        """`(batch,)`: the norms for a parameter that was not used."""
        return widen(self._parameters[name].new_empty(0)).abs().new_zeros(self.row_count)

    def _check_done(self) -> None:
        if self.batch_size and not self._is_backward_done:
            raise NotRecorded(
                "No backward pass has been recorded yet: call backward on a loss of the model's outputs first."
            )

    @property
    def _is_empty(self) -> bool:
        return self._batch_size is None or not self._is_backward_done
