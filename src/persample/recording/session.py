"""Shared implementation of `record` and `watch`: the recording of some forward passes and of their backward passes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal import tracing
from persample._internal.allocator import keep_freed_memory
from persample._internal.copies import CannotCopy
from persample._internal.model_table import read_model
from persample._internal.parameter_hooks import refuse_parameter_hooks
from persample._internal.precision import call_in_full_precision, in_full_precision
from persample._internal.several_models import SeveralModels
from persample._internal.tree import find_tensors
from persample.backward.collector import Collector, asked_sources
from persample.backward.positions import PositionSplitter, group_by_rows
from persample.batches import Arguments, BatchSizesDiffer, NoSamplesFound
from persample.distributed import Processes, find_processes
from persample.errors import Complain, PerSampleError, get_op_name, raise_or_complain
from persample.forward.audit import Audit
from persample.forward.contributions import CONTRIBUTIONS, FirstLoss, get_advice
from persample.forward.isolation import Isolation
from persample.forward.known_tensors import TensorMap
from persample.forward.outputs import refuse_mixed_outputs
from persample.forward.outside import OutsideTensors
from persample.forward.remembered import get_remembered_constants
from persample.forward.tracker import Tracker
from persample.gradients import LossGradients, LossReduction, PerSampleGradients, StreamedClip, StreamedNorms
from persample.gradients.streamed import run_backward_twice
from persample.layouts import Call, Layout, make_layout
from persample.recording.hooks import UnrecordedGradients
from persample.recording.options import Options, select_trainable
from persample.recording.parts_of_batch import RowsInMemory
from persample.recording.readings import Readings
from persample.recording.verification import (
    NotVerified,
    RowCheck,
    Verification,
    describe,
    start_late_verification,
    start_verification,
)
from persample.terms import Term, add_terms

Gradients = PerSampleGradients | StreamedNorms | StreamedClip | LossGradients

keep_freed_memory()  # a recording allocates again what the one before it has freed


def _do_nothing(*args: Any) -> None:
    pass


def leave_ended_modes() -> None:
    """Leave the modes in this thread whose step has ended. A step that ends in another thread leaves its mode here."""
    for mode in _torch.get_function_modes():
        if isinstance(mode, Tracker) and mode.has_ended:
            _torch.remove_mode(mode)
    for mode in _torch.get_dispatch_modes():
        if isinstance(mode, Audit) and mode.is_stopped:
            _torch.remove_dispatch_mode(mode)


def is_recording() -> bool:
    """Whether a recording, of any model, is under way in this thread."""
    return any(isinstance(mode, Tracker) for mode in _torch.get_function_modes())


def is_paused() -> bool:
    """Whether a recording in this thread runs passes of its own, such as those of a verification."""
    return any(isinstance(mode, Tracker) and mode.is_paused for mode in _torch.get_function_modes())


class _End:
    """Calls a function when a backward pass has ended: once for a pass and the passes inside it.

    Reentrant checkpoints run backward passes inside of others, and two passes may compute one answer.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._is_waiting = False
        self._has_ended = False

    def note(self) -> None:
        """Note that a pass has ended."""
        self._has_ended = True
        if not self._is_waiting:
            self._call()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Wait for the end of the block, unless it raises."""
        if self._is_waiting:
            yield
            return
        self._is_waiting, self._has_ended = True, False
        try:
            yield
            self._call()
        finally:
            self._is_waiting = False

    def _call(self) -> None:
        has_ended, self._has_ended = self._has_ended, False
        if has_ended:
            self._ended()


def _end_loss(grads: LossGradients, ended: Callable[[], None]) -> None:
    grads.end_pass()
    ended()


class Recording:
    """Records the forward passes that it is told of, and the backward passes from their outputs.

    Args:
        model: the model to record.
        options: what to record.
        ended: called when a backward pass has ended.
        failed: called with the error when a backward pass has failed.
        has_hooks: hooks of the caller refuse gradients from uses that were not recorded (`refuse_unrecorded`).
        isolation: what private training refuses besides.
        complain: takes refusals in place of raising them. Then the recording is of no use, but `keep_grad` still adds
            the gradients of all uses to `grad`. Not available under several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        ended: Callable[[], None] = _do_nothing,
        failed: Callable[[BaseException], None] = _do_nothing,
        has_hooks: bool = False,
        isolation: Isolation | None = None,
        complain: Complain | None = None,
    ) -> None:
        leave_ended_modes()
        if is_recording():
            gc.collect()  # a dropped model with reference cycles is alive, and so is the step that it was called for
        if is_recording():
            raise PerSampleError(
                "Recordings cannot be nested: leave one block before you enter the next. The step of a watched model "
                "ends with rest(), the step of a model in private training with its optimizer's step()."
            )
        self._model, self.options = ref(model), options  # a watched model shall be freed with its last name
        self.processes = find_processes(model)
        modules, parameters = read_model(model)
        trainable = select_trainable(parameters)
        self.recorded = options.select(trainable)
        if has_hooks:
            _refuse_computed_parameters(trainable)
        refuse_parameter_hooks(trainable if options.keep_grad else self.recorded)
        self.grads = grads = self._make_gradients()
        self._remembered = None
        if isolation is None and tracing.get_trace() is None:
            self._remembered = get_remembered_constants(model)
            self._remembered.start_step()
        self._failed = failed
        # Several processes, and `keep_grad`, write into `p.grad` themselves, so they need hooks.
        is_alone = type(self.processes) is Processes
        self.needs_hooks = not is_alone or options.keep_grad
        complain = complain if is_alone else None
        self._is_watched = has_hooks
        self._has_hooks = has_hooks or self.needs_hooks
        unrecorded = self._unrecorded = UnrecordedGradients(self.recorded)

        if isinstance(grads, LossGradients):
            ended = partial(_end_loss, grads, ended)
        end = self._end = _End(ended)

        def finish() -> None:
            unrecorded.check()
            _call(complain, grads.finish)
            end.note()

        used = trainable.values() if is_alone else map(self.processes.get_used, trainable.values())
        deliver = partial(_deliver, grads, self.processes, options.keep_grad, complain)
        self._row_check = rows = RowCheck(self.recorded)
        self.collector = Collector(
            used,
            rows.follow(deliver),
            partial(call_in_full_precision, finish),
            early=isinstance(grads, (StreamedNorms, StreamedClip)),
            deliver_stack=None if options.keep_grad else rows.follow_stack(grads.receive_stack),
            deliver_shared=partial(_deliver_shared, grads, self.processes, options.keep_grad),
        )
        self.collector.complain = complain
        self._note_empty_passes()
        note_loss = partial(_call, complain, grads.note_loss)
        self.tracker = Tracker(
            self.collector,
            model,
            loss_reduction=options.loss_reduction,
            processes=self.processes,
            run_backward=self._run_backward,
            note_loss=note_loss if options.coupled is None else FirstLoss(note_loss, options.loss_reduction),
            outside=self._make_outside(),
            note_outside=_do_nothing if isinstance(grads, (StreamedNorms, StreamedClip)) else grads.outside.add,
            isolation=isolation,
            complain=complain,
            is_coupled=options.coupled is not None,
            divisors=options.divisor_mode,
        )
        if isolation is None and tracing.get_trace() is None:  # a compiled step has no such option
            self.tracker.advice = get_advice(self.tracker.advice, options.coupled is not None)
        # FSDP frees weights that a use without a tap would keep, and a traced step has no values.
        self.tracker.can_retain = is_alone and tracing.get_trace() is None
        if options.positions is not None:
            self._split_positions(options.positions)
        if is_alone:
            self.tracker.start_by_use = self._start_by_use
        self._readings = Readings(options.batch_size)
        self._rows = RowsInMemory()
        self._batch_size: int | None = None  # as soon as it is known
        self._has_declared = False  # whether samples were declared before anything was called
        self.tracker.tried = grads.tried
        self.tracker.modules = modules
        self._rng_state = torch.get_rng_state()
        self._verification: Verification | None = None
        self._has_status = False  # whether it is known if the calls so far are verified
        # The module of the running call and its arguments, if calls like it were verified.
        self._verified_before: tuple[nn.Module, Arguments] | None = None
        self._had_met = False  # whether samples of one unit were combined before the running call
        self.is_verifying = False  # calls of the model are extra passes
        if options.samples is not None:
            self._declare_samples(options.samples)

    def _note_empty_passes(self) -> None:
        """End backward passes of an empty batch as well: no term arrives, but each pass runs the anchor's node."""
        grads, collector = self.grads, ref(self.collector)  # which keeps the node

        def note(_: Any) -> None:
            if not grads.batch_size and (found := collector()) is not None:
                found.note_pass()

        self.collector.anchor_node.register_prehook(note)

    def _make_gradients(self) -> Gradients:
        options = self.options

        def make_reduction() -> LossReduction:
            return LossReduction(options.loss_reduction, options.divisor_mode == "own")

        common = (self.recorded, make_reduction(), self.processes)
        if options.bound is not None:
            return StreamedClip(*common, options.bound, options.nonfinite, options.unit_options)
        if options.keep == "norms":
            return StreamedNorms(*common, options.nonfinite, options.unit_options)
        if options.losses is not None:
            kept = (self.processes, options.nonfinite, options.unit_options, options.positions)
            return LossGradients(options.losses, lambda: PerSampleGradients(self.recorded, make_reduction(), *kept))
        return PerSampleGradients(*common, options.nonfinite, options.unit_options, options.positions)

    def _split_positions(self, count: int) -> None:
        """Split the terms of sequences into parts for each position."""
        if type(self.processes) is not Processes:
            raise PerSampleError("positions is not available under several processes.")
        self.collector.positions = PositionSplitter(count)
        self.tracker.can_retain = False  # uses that are computed as one are not split

    def _make_outside(self) -> OutsideTensors:
        batch_dim, given = self.options.batch_dim, self.options.list_constants()
        tensors = [constant for constant in given if isinstance(constant, Tensor)]
        dim = batch_dim if isinstance(batch_dim, int) else 0
        # A reduction that is given decides what numbers mean that may be sizes.
        return OutsideTensors(
            self._get_model(),
            dim,
            tensors,
            is_block=not self._is_watched and self.options.loss_reduction is None,
            remembered=self._remembered,
        )

    # ---- the forward pass ----

    def start_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], declared_size: int | None = None
    ) -> bool:
        """Tell the tracker where the samples lie in the arguments of a call that is about to run.

        Args:
            module: the model, or a submodule that is called in its place.
            declared_size: the size of the batch if the user has declared it.

        Returns:
            False if it is not known yet where the samples lie.
        """
        model = self._get_model()
        if module is model:
            self._start_model(args, kwargs, None)
        elif isinstance(model, SeveralModels) and any(module is each for each in model.children()):
            self._start_model(args, kwargs, module)
        else:
            return self._start_part(args, kwargs, module, declared_size)
        return True

    def _start_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module | None) -> None:
        with _torch.DisableTorchFunction():
            arguments = self._make_arguments(args, kwargs, part)
            if part is None:
                arguments.check_names(self._get_model())
            if (self._has_declared or (part and self._batch_size)) and arguments.has_known(self.tracker):
                self._continue_arguments(arguments, part)
            elif not self._add_part(arguments, part):
                self._start_arguments(arguments, self._find_batch_size(arguments), part)
        self._begin_inside()

    def _start_part(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module, declared_size: int | None
    ) -> bool:
        """A call without samples, such as that of an embedding of positions, belongs to the batch of other calls."""
        with _torch.DisableTorchFunction():
            batch = self._batch_size
            arguments = self._make_arguments(args, kwargs, part)
            if batch is not None and arguments.has_known(self.tracker):
                self._continue_arguments(arguments, part)
            elif not self._add_part(arguments, part):
                arguments = arguments.without_constants(self.tracker)
                known = declared_size if batch is None else batch
                size = self._readings.choose(self._find_sizes(arguments), known, partial(_name_part, ref(part)))
                if size is not None:
                    self._start_arguments(arguments, size, part)
                elif known is None:
                    return False
                else:
                    self._start_batch(known, ())
        self._begin_inside()
        return True

    def _add_part(self, arguments: Arguments, part: nn.Module | None) -> bool:
        """Follow a call with another part of the tensors of earlier calls; False if the arguments are no such part.

        The rows of one tensor are different samples. If the user gave the batch size, each call has a whole batch.
        """
        is_followed = self.tracker.isolation is None and self.options.coupled is None and tracing.get_trace() is None
        if self._batch_size is None or self.options.batch_size is not None or not is_followed:
            return False
        try:
            rows = arguments.list_rows(arguments.find_batch_size())
        except (NoSamplesFound, BatchSizesDiffer):
            return False
        numbers = self._rows.find(rows)
        if numbers is None or numbers == list(range(self._batch_size)):
            return False
        if self._is_watched:
            raise PerSampleError(
                "Two calls in one step of a watched model get different parts of one tensor. If they are parts of one "
                "batch, call the model once, or use record(); if each call has a batch of its own, copy the parts "
                "(clone), or drop the outputs of the first call before the second."
            )
        self.processes.start_forward()
        total = max(self._batch_size, 1 + max(numbers))
        if total > self._batch_size:
            self.grads.grow(total)
            self.tracker.grow(total)
            self._batch_size = self.collector.batch = total
            if _PARTS_ADVICE not in self.tracker.advice:
                self.tracker.advice += _PARTS_ADVICE
        for tensor, dim in rows:
            self.tracker.add_input(tensor, make_layout(dim, tuple(numbers), total))
        self._note_rows(rows, numbers)
        self._start_verification(arguments, part)
        return True

    def _note_rows(self, rows: Sequence[tuple[Tensor, int]], numbers: Sequence[int]) -> None:
        if self.tracker.isolation is None:
            self._rows.add(rows, numbers)
            for tensor, _ in rows:
                self.tracker.note_given(tensor)

    def _start_by_use(self, call: Call) -> bool:
        """Find the samples among the tensors of an op that uses weights outside of calls of modules."""
        outside = self.tracker.outside
        assert outside is not None
        with _torch.DisableTorchFunction():
            found = outside.find_sizes(call.tensors)
            place = f"{get_op_name(call.func)} with weights, outside of calls of modules"
            batch = self._readings.choose(found, self._batch_size, lambda: place) if found else None
            if batch is None:
                return False
            if self._batch_size is not None and (batch > 1 or found[batch].requires_grad):
                raise PerSampleError(
                    f"A tensor of shape {tuple(found[batch].shape)} that requires grad, and has the size of the batch, "
                    f"is used in a call of {place}. Pass it in samples= if it has one row for each sample, or else in "
                    "constants=."
                )
            if self.options.verify == "always":
                raise PerSampleError(
                    f"The option verify='always' is given, but only calls of modules can be verified, and there is a "
                    f"call of {place}."
                )
            if self._batch_size is None:
                self._start_batch(batch, call.tensors)
            for tensor in call.tensors:
                if (dim := outside.find_dim(tensor, batch)) is not None and not self.tracker.is_constant(tensor):
                    self.tracker.add_input(tensor, Layout(dim))
            status = "not verified: weights are used outside of calls of modules"
            self._note_status(status if self.options.coupled is None else CONTRIBUTIONS)
        self.tracker.begin_audit()
        return True

    def _declare_samples(self, samples: Any) -> None:
        """Tell the tracker of tensors that have one row for each sample, before anything is called."""
        given = self.options.batch_dim
        constants = tuple(self.options.list_constants())
        arguments = Arguments(_take_samples, (samples,), {}, given if isinstance(given, int) else 0, constants)
        self._start_batch(self._find_batch_size(arguments), arguments.iterate_tensors())
        arguments.add_to(self.tracker, search=False)
        self._note_rows(arguments.list_rows(self.tracker.batch), range(self.tracker.batch))
        self._has_declared = True

    def _start_arguments(self, arguments: Arguments, batch_size: int, part: nn.Module | None) -> None:
        if arguments.reading is not None and arguments.reading.is_structural and self.tracker.outside is not None:
            self.tracker.outside.forget_early()
        self._start_batch(batch_size, arguments.iterate_tensors())
        if part is not None and arguments.has_known(self.tracker):  # made of tensors from outside, inside the block
            arguments.add_unknown_to(self.tracker)
        else:
            arguments.add_to(self.tracker, search=self.options.batch_size is not None)
        self.tracker.note_integers(arguments.iterate_integers())
        self._note_rows(arguments.list_rows(batch_size), range(batch_size))
        if self._remembered is not None and arguments.reading is not None:
            for name in arguments.reading.constants:
                self._remembered.note_name(part or self._get_model(), name)
        self._start_verification(arguments, part)

    def _continue_arguments(self, arguments: Arguments, part: nn.Module | None) -> None:
        arguments.add_unknown_to(self.tracker)
        self.tracker.note_integers(arguments.iterate_integers())
        self._start_verification(arguments, part)

    def _start_batch(self, batch_size: int, tensors: Iterable[Tensor]) -> None:
        self.processes.start_forward()
        self._batch_size = self.grads.start(batch_size)
        if self.options.units is not None and self.tracker.isolation is None and self.options.coupled is None:
            self.tracker.counted.units = self.grads.make_sample_units()
        self.tracker.start_batch(batch_size, tensors)

    def _find_sizes(self, arguments: Arguments) -> set[int]:
        """The batch sizes that fit the arguments of a part."""
        try:
            found = {arguments.find_batch_size()}
        except NoSamplesFound:
            found = set()
        except BatchSizesDiffer as error:
            found = {*error.sizes}
        outside = self.tracker.outside
        assert outside is not None
        return found.union(*[outside.find_early_sizes(tensor) for tensor in arguments.iterate_tensors()])

    def _begin_inside(self) -> None:
        if self.tracker.isolation is not None:
            self.tracker.isolation.start_forward(self._get_model())
        self.tracker.is_inside = True
        self._had_met = self._units_have_met
        self.tracker.begin_audit()

    @property
    def _units_have_met(self) -> bool:
        units = self.tracker.counted.units
        return units is not None and units.have_met

    def hide_earlier_data(self) -> None:
        """In private training: the model, which is about to run, must not use data of earlier steps."""
        if self.tracker.isolation is not None:
            with _torch.DisableTorchFunction():
                self.tracker.isolation.hide_data(self.tracker)

    def end_forward(self, output: Any) -> None:
        """Note that the call of the model has ended, with None if it has failed, and verify its output."""
        if output is not None:
            self.tracker.check_state()
            with _torch.DisableTorchFunction():
                refuse_mixed_outputs(output, self.tracker)
        if self.tracker.isolation is not None:
            self.tracker.isolation.show_data(self.tracker)
        self.tracker.is_inside = False
        verification, self._verification = self._verification, None
        may_differ = output is not None and self.tracker.path.may_differ_from_earlier_passes()
        if may_differ and self._verified_before is not None:
            verification = self._start_late_verification(*self._verified_before)
        self._verified_before = None
        if self._units_have_met and not self._had_met:
            reason = NotVerified("the model combines samples of one unit")
            verification = None
            self._note_status(describe(reason, self.options))
        if verification is not None and output is not None:
            self.is_verifying = True
            try:
                with self.tracker.pause():
                    # A check compares all rows itself.
                    verification.has_row = self.options.positions is None and asked_sources.get() is None
                    self._note_status(verification.finish(output, self.options))
            finally:
                self.is_verifying = False
            self.grads.row_verification = verification.no_row
            if verification.row is not None:
                self._row_check.add(verification.row)

    def _start_late_verification(self, called: nn.Module, arguments: Arguments) -> Verification | None:
        """Prepare the verification of a call that has just run and may have done something new."""
        if self.tracker.batch < 2:  # nothing to mix with
            return None
        is_random = torch.cuda.is_initialized() or not torch.equal(torch.get_rng_state(), self._rng_state)
        with _torch.DisableTorchFunction():
            found = start_late_verification(called, self.options, self.tracker, arguments, is_random)
        if isinstance(found, str):
            self._note_status(found)
            return None
        return found

    def _note_status(self, status: str) -> None:
        """Note what was found for a call: a recording is verified if all of its calls are."""
        if self._has_status and self.grads.verification.startswith("not verified"):
            return
        self._has_status, self.grads.verification = True, status

    def note_nested_call(self) -> None:
        """Give up the verification of a model that calls itself."""
        if self.options.coupled is None:
            self._verification = None
            self._note_status("not verified: the model calls itself")

    def _start_verification(self, arguments: Arguments, part: nn.Module | None) -> None:
        if self.options.coupled is not None:  # samples alone differ from those of the batch
            self._note_status(CONTRIBUTIONS)
            return
        called = part or self._get_model()
        with self.tracker.pause():
            found = start_verification(called, self.options, self.processes, self.tracker, arguments)
        if isinstance(found, str):
            self._verification = None
            self._verified_before = (called, _copy(arguments)) if found.startswith("verified") else None
            self._note_status(found)
        else:
            self._verification = found

    def add_samples(self, declared: TensorMap[int]) -> None:
        """Declare tensors of the data, with their batch dimensions."""
        with _torch.DisableTorchFunction():
            for tensor, dim in declared.items():
                self.tracker.add_samples(tensor, dim)

    def has_known(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module) -> bool:
        """Whether a submodule is called with a tensor that depends on samples of this step."""
        with _torch.DisableTorchFunction():
            return self._make_arguments(args, kwargs, part).has_known(self.tracker)

    def can_continue_with(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module) -> bool:
        """Whether the arguments of a submodule have no samples, or as many as this step, with the same units."""
        with _torch.DisableTorchFunction():
            size = self._batch_size
            sizes = self._find_sizes(self._make_arguments(args, kwargs, part).without_constants(self.tracker))
        return size is not None and (not sizes or (size in sizes and self.grads.has_same_units(size)))

    def find_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples in the arguments of a call of the model."""
        with _torch.DisableTorchFunction():
            return self._find_batch_size(self._make_arguments(args, kwargs, None))

    def _make_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module | None) -> Arguments:
        forward = (part or self.processes.get_called_module(self._get_model())).forward
        constants = tuple(self.options.list_constants())
        if self._remembered is not None and self.options.batch_size is None:
            constants += tuple(self._remembered.list_names(part or self._get_model()))
        return Arguments(
            forward,
            args,
            kwargs,
            self.options.batch_dim,
            constants,
            finds_states=True,
            reads_sizes=self.tracker.isolation is None,
            batch_size=self.options.batch_size,
        )

    def _get_model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # it is being called
        return model

    def _find_batch_size(self, arguments: Arguments) -> int:
        given = self.options.batch_size
        return arguments.find_batch_size() if given is None else given

    def undo_forward(self) -> None:
        """Restore the model's buffers and the state of the random number generator."""
        self.tracker.restore_buffers()
        torch.set_rng_state(self._rng_state)

    # ---- the backward pass ----

    def _run_backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = list(find_tensors(_get_inputs(func, args, kwargs)))
        if any(id(t) in self.collector.parameters for t in inputs):  # which are not in the graph of the loss
            raise PerSampleError(
                "backward(inputs=...) asks for gradients of parameters inside a recording, which keeps them per sample."
                " Call backward() without inputs, and name the parameters that count in record(parameters=[...])."
            )
        self._check_gradients(args, kwargs)
        self.tracker.end_audit()
        is_first = self._begin_row(args[0], inputs) if self._row_check.calls else False
        self.collector.prepare_backward()
        is_graph_kept = _is_graph_kept(func, args, kwargs)
        if len(args) > 1 or kwargs:
            for tensor in find_tensors((args[1:], kwargs)):  # the gradient of the output, if it is given
                self.tracker.note_outside(tensor)
        try:
            with self._end.wait(), nullcontext() if self._has_hooks else self._unrecorded:
                if func is Tensor.backward and self._choose_passes() == 2:
                    result = run_backward_twice(self.collector.anchor, func, args, kwargs)
                else:
                    result = func(*args, **kwargs)
                    if _get_inputs(func, args, kwargs) is None:
                        self.collector.end_without_tap()
                if is_first:
                    self._compare_row()
                return result
        except BaseException as error:
            self._failed(error)
            is_graph_kept = True  # the user may try again
            raise
        finally:
            self.collector.forget_gradients(is_graph_kept)

    def _begin_row(self, roots: Any, inputs: list[Tensor]) -> bool:
        """Prepare to compare a row after the backward pass that is about to run; False if it cannot be compared."""
        if self._row_check.is_noting:  # a pass inside of a pass
            return False
        nodes = [self.collector.anchor_node, *(retained.node for retained in self.collector.retained)]
        try:
            if inputs:
                raise NotVerified("the backward pass has inputs=")
            self._row_check.begin(find_tensors(roots), nodes)
        except NotVerified as reason:
            self._end_row(f"no row was compared: {reason}")
            return False
        return True

    def _compare_row(self) -> None:
        """Compare the row of a sample with its gradient alone, after the first backward pass."""
        self.is_verifying = self.collector.is_pulling_back = True
        try:
            with self.tracker.pause():
                self._end_row(self._row_check.compare())
        except NotVerified as reason:
            self._end_row(f"no row was compared: {reason}")
        finally:
            self._row_check.forget()
            self.is_verifying = self.collector.is_pulling_back = False

    def _end_row(self, status: str) -> None:
        self.grads.row_verification = status
        self._row_check.end()

    def _check_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In private training: check what the code around the model has done, and the gradients that it passes on."""
        if self.tracker.isolation is None:
            return
        try:
            self.tracker.check_state()
            given = args[1:2] or [kwargs.get("gradient", kwargs.get("grad_tensors"))]
            for output, gradient in zip(find_tensors(args[:1]), find_tensors(given), strict=False):
                self.tracker.check_gradient(output, gradient)
        except BaseException as error:
            self._failed(error)
            raise

    def _choose_passes(self) -> int:
        grads = self.grads
        return grads.choose_passes(self.collector.factor_bytes) if isinstance(grads, StreamedClip) else 1

    def close(self) -> None:
        """Break the reference cycles with the tracker and the graph, so that what was recorded is freed at once."""
        if self.tracker.isolation is not None:
            with _torch.DisableTorchFunction():
                self.tracker.isolation.end_step(self.tracker)
        self.tracker.run_backward = self.tracker.start_by_use = None
        self._rows = RowsInMemory()
        self._row_check.forget()
        self.collector.release()


_PARTS_ADVICE = (
    " The calls of the model get different parts of one tensor, whose rows were read as different samples. If each "
    "call gets the whole batch, as with pairs, pass batch_size=."
)


def _take_samples(samples: Any) -> None:
    """Has the signature that names the tensors of the option `samples`."""


def _name_part(part: ref[nn.Module]) -> str:
    """A submodule in words."""
    return f"{type(part()).__name__}, a part of the model"


def _is_graph_kept(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `backward` keeps the graph for another pass; both functions have this argument third."""
    kept = args[2] if len(args) > 2 else kwargs.get("retain_graph")
    creates_graph = args[3] if len(args) > 3 else kwargs.get("create_graph")
    return bool(creates_graph if kept is None else kept)


def _get_inputs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensors that a call of `backward` is for; None if it is for all leaves of the graph."""
    position = 4 if func is Tensor.backward else 5
    return args[position] if len(args) > position else kwargs.get("inputs")


def _copy(arguments: Arguments) -> Arguments:
    """The arguments as they are before the call; themselves if they cannot be copied, which prevents a verification."""
    try:
        return arguments.copy()
    except CannotCopy:
        return arguments


def _refuse_computed_parameters(trainable: Mapping[str, Tensor]) -> None:
    """Refuse tensors in the places of parameters, which autograd would not add gradients to."""
    for name, p in trainable.items():
        if not p.is_leaf:
            raise PerSampleError(
                f"'{name}' is not a parameter in this call of the model but was computed from other tensors, as with "
                "torch.func.functional_call. Use record(model), with the call inside the block."
            )


def _call(complain: Complain | None, function: Callable[..., None], *args: Any) -> None:
    """Call a function, with refusals passed on to `complain` if there is one."""
    try:
        function(*args)
    except PerSampleError as error:
        raise_or_complain(error, complain)


@in_full_precision
def _deliver(
    grads: Gradients,
    processes: Processes,
    keep_grad: bool,
    complain: Complain | None,
    parameter: Tensor,
    terms: Sequence[Term],
) -> None:
    """Pass what was found for a parameter to the gradients. The collector must not refer to the recording itself."""
    has_positions = isinstance(grads, (PerSampleGradients, LossGradients)) and grads.has_positions
    for group in group_by_rows(terms) if has_positions else [terms]:
        _deliver_term(grads, processes, keep_grad, complain, parameter, add_terms(group))


def _deliver_shared(grads: Gradients, processes: Processes, keep_grad: bool, parameter: Tensor, shared: Tensor) -> None:
    """Pass what belongs to no sample to the gradients."""
    if isinstance(grads, StreamedClip) and grads.is_first_of_two:
        return
    grads.receive_shared(parameter, shared)
    if keep_grad:
        processes.add_to_grad(parameter, shared)


def _deliver_term(
    grads: Gradients,
    processes: Processes,
    keep_grad: bool,
    complain: Complain | None,
    parameter: Tensor,
    term: Term,
) -> None:
    _call(complain, grads.receive, parameter, term)
    if keep_grad and not (isinstance(grads, StreamedClip) and grads.is_first_of_two):
        total = term.sum(torch.ones(term.batch, device=parameter.device))
        if isinstance(grads, StreamedNorms):
            grads.note_sum(parameter, term, total)
        processes.add_to_grad(parameter, total.to(parameter.dtype))
