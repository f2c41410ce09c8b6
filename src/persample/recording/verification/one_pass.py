"""Which passes are verified, and the verification of one: made before it, finished after it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from random import SystemRandom
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal import tracing
from persample._internal.copies import CannotCopy
from persample._internal.graph import find_nodes, is_reentrant
from persample._internal.rng import RngState
from persample._internal.state import ModuleState
from persample._internal.tree import iterate_tensors
from persample.batches import Arguments
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.forward import Tracker
from persample.layouts import Layout, Reduced
from persample.recording.options import Options
from persample.recording.verification.comparison import Comparison
from persample.recording.verification.differences import Part, make_part
from persample.recording.verification.rows import VerifiedCall, make_outputs
from persample.recording.verification.runs import (
    NotVerified,
    Runs,
    check_unnoticed_by_hooks,
    check_unnoticed_by_modes,
    describe,
    open_extra_passes,
    shorten,
)
from persample.recording.verification.sample_calls import Call, SampleCalls, has_unequal_sizes

# How many samples are run alone, besides two, if the model has read values of samples.
_MAX_SAMPLES = 8


class Verification:
    """The verification of one forward pass: made before it, finished after it.

    Args:
        model: the model that is about to run.
        arguments: its arguments.
        tracker: knows where the samples lie in the arguments and, after the forward pass, in the outputs.
        make_note: called at the end of the pass; makes the function that is called with what was found, unless memory
            ran out or the batch tells nothing about others.
        is_random: whether the pass draws random numbers, if it has already run: passes in its environment were verified
            before, and it may do something new.
        draws_samples: whether the samples to run alone are drawn, in place of the first and the last.

    Attributes:
        has_row: whether a row of the gradients can be compared after the backward pass.
        row: what is needed for that, after `finish`; `no_row` says why it is missing.
        is_telling: False if the outputs are not finite or, in private training, if all samples are equal.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        tracker: Tracker,
        make_note: Callable[[], Callable[[str], None]],
        is_random: bool | None = None,
        draws_samples: bool = False,
    ) -> None:
        self.model = model
        self._tracker, self._make_note, self._is_random = tracker, make_note, is_random
        try:  # copies: the forward pass may change its containers and objects
            self.calls = SampleCalls(arguments.copy(), self.batch, tracker.find_layout)
        except CannotCopy as error:
            raise NotVerified(f"among the arguments, {error}") from error
        self.outputs = 0  # how many tensors the forward pass returned
        self.is_telling = True
        self.has_row = True
        self.row: VerifiedCall | None = None
        self.no_row = ""
        self.samples: dict[int, Call] = {}
        self.draws_samples = draws_samples
        self._numbers = [0, self.batch - 1, *range(0, self.batch, -(-self.batch // _MAX_SAMPLES))]  # to run alone
        if draws_samples:
            self._numbers = SystemRandom().sample(range(self.batch), min(self.batch, 2 + _MAX_SAMPLES))
        self._add_samples(self._numbers[:2])
        try:
            self.before = ModuleState(model)
        except Exception as error:
            raise NotVerified(f"the state of the model cannot be copied: {shorten(error)}") from error
        if self.before.handle is not None:
            raise NotVerified(f"the model holds an object of type {self.before.handle}, which cannot be restored")
        self.random_before = RngState(self.before.generators)

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self._tracker.batch

    @property
    def checks_places(self) -> bool:
        """Whether a sample's number in the batch must not count."""
        return self._tracker.isolation is not None

    @property
    def row_sample(self) -> int:
        """The sample whose row is compared."""
        return list(self.samples)[0 if self.draws_samples else -1]

    @property
    def advice(self) -> str:
        """What to do about samples that are mixed."""
        return self._tracker.advice

    def _add_samples(self, numbers: Iterable[int]) -> None:
        """Take these samples from the arguments, to run them alone."""
        for n in numbers:
            with _torch.disable_dispatch_modes():  # an audit must not see it
                call = self.calls.take(n)
            if call is None:
                raise NotVerified("the arguments cannot be cut into samples")
            self.samples.setdefault(n, call)

    def finish(self, output: Any, options: Options) -> str:
        """Run samples alone, compare their outputs, and leave the model as it was.

        Returns:
            What was found, in words.

        Raises:
            SamplesMixed: the output of a sample alone differs from its part of the output of the batch.
        """
        try:
            with _torch.DisableTorchFunction():
                parts = self._find_parts(output)
                if not parts and not self._find_sums(output):
                    raise NotVerified("no output has a part for each sample, or is a sum over them")
                # Each sample may take another branch.
                if self._tracker.path.has_read_samples and not self.calls.has_changed:
                    self._add_samples(self._numbers[2:])
            with open_extra_passes(self.model, (self.before, self.random_before), bool(self._is_random)) as runs:
                comparison = Comparison(self, runs, parts)
                status = comparison.run() if parts else comparison.compare_sums(self._find_sums(output))
                self._keep_row(comparison, output, runs)
        except NotVerified as reason:
            status = describe(reason, options, is_late=self._is_random is not None)
        except torch.OutOfMemoryError:
            return "not verified: out of memory"  # not remembered
        if self.is_telling:
            note = self._make_note()
            if self.row is None:
                note(status)
            else:
                self.row.remember = partial(note, status)
        return status

    def _keep_row(self, comparison: Comparison, output: Any, runs: Runs) -> None:
        """Keep what is needed to compare the row of a sample after the backward pass."""
        outputs = list(iterate_tensors(output))
        parts = [(outputs[p.position], p.layout, comparison.row.get(p.position), p.position) for p in comparison.parts]
        found = [(o, w, own, n) for o, w, own, n in parts if own is not None and own.requires_grad and o.requires_grad]
        if not found:
            cause = "the forward pass draws random numbers" if runs.is_random else "no output has rows with gradients"
            self.no_row = f"no row was compared: {cause}"
            return
        if any(is_reentrant(node) for _, _, own, _ in found for node in find_nodes(own)):
            self.no_row = "no row was compared: the model has a reentrant checkpoint"
            return
        sample = self.row_sample
        given = iterate_tensors(self.calls.whole)
        self.row = VerifiedCall(
            sample=sample,
            batch=self.batch,
            outputs=make_outputs(found),
            arguments=[tensor for tensor in given if tensor.requires_grad],
            call=self.samples[sample],
            inputs=comparison.row_inputs,
            model=ref(self.model),
            ambiguity=self.calls.find_undivided(),
            advice=self.advice,
            rounding=runs.rounding,
        )

    def _find_parts(self, output: Any) -> list[Part]:
        """The outputs in which the samples lie in known places."""
        parts = []
        self.outputs = sum(1 for _ in iterate_tensors(output))
        for position, tensor in enumerate(iterate_tensors(output)):
            if tensor.dim() and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
                try:
                    layout = self._tracker.find_layout(tensor)
                except PerSampleError:  # refused when it is used
                    continue
                if isinstance(layout, Layout):
                    parts.append(make_part(position, tensor, layout))
        return parts

    def _find_sums(self, output: Any) -> dict[int, Tensor]:
        """The outputs that are sums or means over the samples, such as a loss, by position."""
        found = {}
        for position, tensor in enumerate(iterate_tensors(output)):
            where = self._tracker.find_layout(tensor)
            if isinstance(where, Reduced) and where.is_clear and tensor.numel() == 1:
                found[position] = tensor.detach()
        return found


# ---- which passes are verified ----


def start_verification(
    model: nn.Module,
    options: Options,
    processes: Processes,
    tracker: Tracker,
    arguments: Arguments,
    environment: Hashable,
) -> Verification | str:
    """Prepare the verification of a forward pass that is about to run, or return what is already known.

    The tracker must know where the samples lie in the arguments. Whether passes in this environment were verified is
    known before the pass. Which path it takes is known after it (`Path.find_status`).
    """
    if options.verify is False:
        return "not verified: verify=False"
    try:
        if tracing.get_trace() is not None:
            raise NotVerified("the step is compiled")
        if type(processes) is not Processes:
            raise NotVerified("several processes share the batch")
        known = tracker.path.program.environments
        status = None if options.verify == "always" else known.get(environment)
        if status is not None and not _is_due(status, environment, options, tracker):
            return status
        if options.verify is None:
            check_unnoticed_by_modes()
        if tracker.batch < 2:
            return "not verified: the batch has fewer than two samples"
    except NotVerified as reason:
        return describe(reason, options)
    try:
        return make_verification(model, options, tracker, arguments, environment)
    except NotVerified as reason:
        known[environment] = describe(reason, options)
        return known[environment]


def make_verification(
    model: nn.Module,
    options: Options,
    tracker: Tracker,
    arguments: Arguments,
    environment: Hashable,
    is_random: bool | None = None,
) -> Verification:
    """Prepare the verification of a forward pass, or raise `NotVerified`.

    With `is_random`, the pass has just run, and may do something else than the first one in its environment. Extra
    passes start from the state after it. If it was another one before, a second run of the batch gives other outputs.
    """
    if options.verify is None:
        check_unnoticed_by_modes()
        check_unnoticed_by_hooks(model)
    make_note = partial(tracker.path.make_note, environment)
    return Verification(model, arguments, tracker, make_note, is_random, options.verifies_again)


def _is_due(status: str, environment: Hashable, options: Options, tracker: Tracker) -> bool:
    """Whether a pass in an environment with this status is to be verified again."""
    if not isinstance(options.verify, int):
        return False
    return tracker.path.program.is_due(environment, options.verify) or options.is_tried_again(status)


def describe_environment(called: nn.Module, options: Options, arguments: Arguments) -> Hashable:
    """What a forward pass depends on, besides its path through the program of the model and the values of tensors."""
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    call = ref(called), called.training, len(arguments.args), *arguments.kwargs
    graph = torch.is_grad_enabled()  # without, no row is compared
    dtypes = tuple([tensor.dtype for tensor in arguments.iterate_tensors()])
    sizes = options.isolate and tracing.get_trace() is None and has_unequal_sizes(arguments)
    return options.verify, graph, call, repr(options.batch_dim), options.batch_size is None, *devices, dtypes, sizes
