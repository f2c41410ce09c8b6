"""The parts of a recording that know each other: what follows the samples, collects terms, and keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor, nn

from persample._internal import tracing
from persample._internal.graph import refuse_parameter_hooks
from persample._internal.models import Members
from persample.backward import Collector, PositionSplitter, Receiver, group_by_rows
from persample.distributed import Processes, find_processes
from persample.errors import Complain, PerSampleError, raise_or_complain
from persample.forward import ADVICE, FirstLoss, OutsideTensors, Tracker, get_program
from persample.gradients import (
    BatchRows,
    ClipIntake,
    Gradients,
    Intake,
    KeptTerms,
    LossGradients,
    NormsIntake,
    PerSampleGradients,
    RecordedBatch,
    ReducedIntake,
    ReducedTerms,
    StreamedClip,
    StreamedNorms,
)
from persample.layouts import Reduced
from persample.recording.hooks import UnrecordedGradients
from persample.recording.options import Options, select_trainable
from persample.recording.verification import RowCheck
from persample.terms import Term, add_terms


class Delivery(Receiver):
    """Passes what backward passes find to the gradients and, with `keep_grad`, to `p.grad`.

    The collector keeps it, so it must not refer to the recording.

    Args:
        intakes: what the recording fills: with several losses, each backward pass fills the next one.
        complain: takes refusals in place of raising them; sums are added to `p.grad` all the same.
        recorded: the recorded parameters. A gradient of one that arrives by itself came from a use that was not seen.
        ended: called at the end of a backward pass.
    """

    def __init__(
        self,
        intakes: Sequence[Intake],
        processes: Processes,
        options: Options,
        complain: Complain | None,
        recorded: Mapping[str, Tensor],
        ended: Callable[[], None],
    ) -> None:
        self.complain, self.is_early, self.takes_stacks = complain, intakes[0].is_early, not options.keep_grad
        self._intakes, self._processes, self._keep_grad = intakes, processes, options.keep_grad
        self._losses, self._has_positions = options.losses, options.positions is not None
        self._passes = 0  # that have ended
        self._row_check: ref[RowCheck] | None = None
        self._first_loss = FirstLoss(options.loss_reduction) if options.coupled else None
        self.unrecorded, self._ended = UnrecordedGradients(recorded), ended
        self._is_waiting = False
        self._has_ended = False

    @property
    def has_zeroed(self) -> bool:
        """Whether `zero_grad()` was called since the last backward pass."""
        return bool(self._intakes[0].zeroed)

    def drop_zeroed(self) -> None:
        """Before a backward pass: begin the rows of some parameters anew, as their `grad`, after `zero_grad()`."""
        if self._losses is None:
            self._intakes[0].drop_zeroed()

    @property
    def _intake(self) -> Intake:
        """What the running backward pass fills."""
        if self._losses is None:
            return self._intakes[0]
        if self._passes >= len(self._intakes):
            raise PerSampleError(
                f"A recording with losses={list(self._losses)} has had a backward pass for each of them, and another "
                "one has begun. Name all losses, or add them up before backward()."
            )
        return self._intakes[self._passes]

    @property
    def is_complete(self) -> bool:
        """Whether a backward pass that has ended was the last one."""
        return self._intakes[0].is_complete if self._losses is None else self._passes >= len(self._intakes)

    def grow(self, batch_size: int) -> None:
        """Add samples to the batch: a forward pass has got another part of it."""
        if self._losses is not None and self._passes:
            raise PerSampleError(
                "This forward pass gets another part of the batch than the last one, after a backward pass of one of "
                "the losses: pass samples= with the tensor that has one row for each sample."
            )
        for intake in self._intakes:
            intake.grow(batch_size)

    def run_backward(self, run: Callable[..., None], anchor: Tensor, factor_bytes: int) -> None:
        """Run a call of `loss.backward()`; before it, if there are two passes, one that reaches the weights only.

        Args:
            run: runs the call, with other values of the arguments that it is given by name.
            anchor: what the pass for the weights is for.
            factor_bytes: what the terms of the pass would keep.
        """
        if self._intakes[0].needs_two_passes(factor_bytes):
            run(retain_graph=True, inputs=[anchor])
        run()

    def deliver(self, parameter: Tensor, terms: Sequence[Term]) -> None:
        self._note_row([parameter], terms)
        for group in group_by_rows(terms) if self._has_positions else [terms]:
            term = add_terms(group)
            self._call(self._intake.receive, parameter, term)
            if self._keep_grad and not self._intake.is_first_of_two:
                self._processes.add_to_grad(parameter, self._intake.add_rows(parameter, term).to(parameter.dtype))

    def deliver_stack(self, parameters: Sequence[Tensor], term: Term) -> None:
        self._note_row(parameters, [term])
        self._intake.receive_stack(parameters, term)

    def _note_row(self, parameters: Sequence[Tensor], terms: Sequence[Term]) -> None:
        check = None if self._row_check is None else self._row_check()
        if check is not None and check.is_noting:
            check.note(parameters, terms)

    def show_rows_to(self, check: RowCheck) -> None:
        """Show all that is delivered to the comparison of a row, which is not kept: it holds nodes of the graph."""
        self._row_check = ref(check)

    def deliver_shared(self, leaf: Tensor, shared: Tensor, is_parameter: bool) -> None:
        if self._is_waiting and self._intake.is_first_of_two:
            return
        self._intake.receive_shared(leaf, shared)
        if self._keep_grad or not is_parameter:
            self._processes.add_to_grad(leaf, shared)

    def note_loss(self, loss: Reduced, reaches_weights: bool = True) -> None:
        """Note the loss that the running backward pass starts from."""
        found = loss if self._first_loss is None else self._first_loss.select(loss)
        if found is not None:
            self._call(self._intake.note_loss, found, reaches_weights)

    def note_outside(self, tensor: Tensor) -> None:
        if self._intakes[0].keeps_rows:
            self._intakes[0].notes.outside.add(tensor)

    def note_zeroed(self, parameter: Tensor) -> None:
        self._intakes[0].zeroed.append(parameter)

    def note_tried(self, func: Callable[..., Any], place: str) -> None:
        self._intakes[0].notes.tried.add(func, place)

    def finish(self) -> None:
        """Note that a pass, or a pass inside it, has ended."""
        self.unrecorded.check()
        self._call(self._intake.finish)
        self._has_ended = True
        if not self._is_waiting:
            self._end()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Inside the block, all passes are one: those of reentrant checkpoints, and two for one answer."""
        if self._is_waiting:
            yield
            return
        self._is_waiting, self._has_ended = True, False
        try:
            yield
            self._end()
        finally:
            self._is_waiting = False

    def _end(self) -> None:
        has_ended, self._has_ended = self._has_ended, False
        if has_ended:
            self._passes += 1
            self._ended()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except PerSampleError as error:
            raise_or_complain(error, self.complain)


@dataclass(frozen=True)
class Wiring:
    """The parts of a recording.

    Attributes:
        model: the model, which is freed with its last name also while it is watched.
        batch: the recorded parameters, and the rows of the batch.
        outside: decides about tensors from outside.
        is_alone: whether this process has the whole batch.
        is_watched: whether the calls are steps of a watched model, each with a whole batch.
    """

    options: Options
    model: ref[nn.Module]
    processes: Processes
    batch: RecordedBatch
    grads: Gradients
    delivery: Delivery
    collector: Collector
    outside: OutsideTensors
    tracker: Tracker
    is_watched: bool

    @property
    def is_alone(self) -> bool:
        """Whether this process has the whole batch."""
        return type(self.processes) is Processes


def make_wiring(
    model: nn.Module,
    options: Options,
    ended: Callable[[], None],
    is_watched: bool,
    complain: Complain | None,
    members: Members,
) -> Wiring:
    """Make the parts of a recording; see `Recording` for the arguments."""
    processes = find_processes(model)
    trainable = select_trainable(members.parameters)
    recorded = options.select(trainable)
    _check_parameters(trainable, trainable if options.keep_grad else recorded, is_watched)
    batch, intakes, grads = _make_gradients(options, recorded, processes)
    is_alone, is_traced = type(processes) is Processes, tracing.get_trace() is not None
    is_coupled, complain = options.coupled is not None, complain if is_alone else None
    delivery = Delivery(intakes, processes, options, complain, recorded, ended)
    collector = Collector(
        trainable.values() if is_alone else map(processes.get_used, trainable.values()),
        delivery,
        None if options.positions is None else PositionSplitter(options.positions),
        # FSDP frees weights, a traced step has no values, and uses that are computed as one have no positions.
        can_retain=is_alone and not is_traced and options.positions is None,
    )
    is_exact = options.is_isolated or is_traced  # sizes decide alone, and `coupled` is no option
    outside = _make_outside(model, options, is_watched, remembers=not is_exact)
    tracker = Tracker(
        collector,
        model,
        loss_reduction=options.loss_reduction,
        advice=ADVICE[None if is_exact else is_coupled],
        processes=processes,
        outside=outside,
        detectors=() if options.guard is None else options.guard.detectors,
        is_isolated=options.is_isolated,
        is_coupled=is_coupled,
        divisors=options.divisor_mode,
        members=members,
    )
    parts = batch, grads, delivery, collector, outside, tracker
    return Wiring(options, ref(model), processes, *parts, is_watched)


def _check_parameters(trainable: Mapping[str, Tensor], used: Mapping[str, Tensor], is_watched: bool) -> None:
    """Refuse hooks and, in the places of parameters, tensors that autograd would not add gradients to."""
    refuse_parameter_hooks(used)
    for name, p in trainable.items():
        if is_watched and not p.is_leaf:
            raise PerSampleError(
                f"'{name}' is not a parameter in this call of the model but was computed from other tensors, as with "
                "torch.func.functional_call. Use record(model), with the call inside the block."
            )


def _make_gradients(
    options: Options, recorded: Mapping[str, Tensor], processes: Processes
) -> tuple[RecordedBatch, Sequence[Intake], Gradients]:
    """What the recording fills, and the gradients that the user asks."""
    if options.positions is not None and type(processes) is not Processes:
        raise PerSampleError("positions is not available under several processes.")
    rows, owns_divisor = BatchRows(recorded.values(), processes, options.unit_options), options.divisor_mode == "own"
    batch = RecordedBatch(recorded, rows, options.loss_reduction, owns_divisor, options.nonfinite)
    if options.reduce is not None:
        reduced = ReducedIntake(batch, options.reduce)
        return batch, [reduced], ReducedTerms(reduced)
    if options.bound is not None:
        clip = ClipIntake(batch, options.bound)
        return batch, [clip], StreamedClip(clip)
    if options.keep == "norms":
        norms = NormsIntake(batch)
        return batch, [norms], StreamedNorms(norms)
    if options.losses is not None:
        several = [KeptTerms(batch, options.positions) for _ in options.losses]
        return batch, several, LossGradients(options.losses, several)
    kept = KeptTerms(batch, options.positions)
    return batch, [kept], PerSampleGradients(kept)


def _make_outside(model: nn.Module, options: Options, is_watched: bool, remembers: bool) -> OutsideTensors:
    remembered = get_program(model).constants if remembers else None
    if remembered is not None:
        remembered.start_step()
    constants = [constant for constant in options.list_constants() if isinstance(constant, Tensor)]
    dim = options.batch_dim if isinstance(options.batch_dim, int) else 0
    # A reduction that is given decides what numbers mean that may be sizes.
    return OutsideTensors(model, dim, constants, not is_watched and options.loss_reduction is None, remembered)
