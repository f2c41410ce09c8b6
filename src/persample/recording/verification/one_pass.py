"""Which passes are verified, and the verification of one: made before it, finished after it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
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
        tracker: knows where the samples lie in the arguments and, after the forward pass, in the outputs.
        environment: what the pass depends on besides its path.
        is_random: whether the pass draws random numbers, if it has already run: passes in its environment were verified
            before, and it may do something new. Extra passes start from the state after it. If it was another one
            before, a second run of the batch gives other outputs.

    Attributes:
        row: what is needed to compare a row after the backward pass, after `finish`; `no_row` says why it is missing.
        is_telling: False if the outputs are not finite or, in private training, if all samples are equal.

    Raises:
        NotVerified: the pass cannot be verified.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        tracker: Tracker,
        arguments: Arguments,
        environment: Hashable,
        is_random: bool | None = None,
    ) -> None:
        if options.verify is None:
            check_unnoticed_by_modes()
            check_unnoticed_by_hooks(model)
        self.model, self.tracker, self._options = model, tracker, options
        self._environment, self._is_random = environment, is_random
        try:  # copies: the forward pass may change its containers and objects
            self.calls = SampleCalls(arguments.copy(), tracker.batch, tracker.find_layout)
        except CannotCopy as error:
            raise NotVerified(f"among the arguments, {error}") from error
        self.is_telling, self.no_row = True, ""
        self.checks_places = tracker.is_isolated  # whether a sample's number in the batch must not count
        self.row: VerifiedCall | None = None
        self.samples: dict[int, Call] = {}  # that are run alone
        self.constants: set[int] = set()  # positions of outputs in which no samples are known
        batch, self.draws_samples = tracker.batch, options.verifies_again
        self._numbers = [0, batch - 1, *range(0, batch, -(-batch // _MAX_SAMPLES))]
        if self.draws_samples:
            self._numbers = SystemRandom().sample(range(batch), min(batch, 2 + _MAX_SAMPLES))
        self._add_samples(self._numbers[:2])
        try:
            before = ModuleState(model)
        except Exception as error:
            raise NotVerified(f"the state of the model cannot be copied: {shorten(error)}") from error
        if before.handle is not None:
            raise NotVerified(f"the model holds an object of type {before.handle}, which cannot be restored")
        self._before = before, RngState(before.generators)

    @property
    def row_sample(self) -> int:
        """The sample whose row is compared."""
        return list(self.samples)[0 if self.draws_samples else -1]

    def _add_samples(self, numbers: Iterable[int]) -> None:
        """Take these samples from the arguments, to run them alone."""
        for n in numbers:
            with _torch.disable_dispatch_modes():  # an audit must not see it
                call = self.calls.take(n)
            if call is None:
                raise NotVerified("the arguments cannot be cut into samples")
            self.samples.setdefault(n, call)

    def finish(self, output: Any, has_row: bool) -> str:
        """Run samples alone, compare their outputs, and leave the model as it was; returns what was found, in words.

        Args:
            has_row: whether a row of the gradients can be compared after the backward pass.

        Raises:
            SamplesMixed: the output of a sample alone differs from its part of the output of the batch.
        """
        try:
            with _torch.DisableTorchFunction():
                parts = self._find_parts(output)
                sums = {} if parts else self._find_sums(output)
                if not parts and not sums:
                    raise NotVerified("no output has a part for each sample, or is a sum over them")
                # Each sample may take another branch.
                if self.tracker.path.has_read_samples and not self.calls.has_changed:
                    self._add_samples(self._numbers[2:])
            with open_extra_passes(self.model, self._before, bool(self._is_random)) as runs:
                comparison = Comparison(self, runs, parts, len(list(iterate_tensors(output))), has_row)
                status = comparison.run() if parts else comparison.compare_sums(sums)
                self._keep_row(comparison, output, runs)
        except NotVerified as reason:
            status = describe(reason, self._options, is_late=self._is_random is not None)
        except torch.OutOfMemoryError:
            return "not verified: out of memory"  # not remembered
        if self.is_telling:
            note = partial(self.tracker.path.make_note(self._environment), status)
            if self.row is None:
                note()
            else:
                self.row.remember = note
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
            batch=self.tracker.batch,
            outputs=make_outputs(found),
            arguments=[tensor for tensor in given if tensor.requires_grad],
            call=self.samples[sample],
            inputs=comparison.row_inputs,
            model=ref(self.model),
            ambiguity=self.calls.find_undivided(),
            advice=self.tracker.advice,
            rounding=runs.rounding,
        )

    def _find_parts(self, output: Any) -> list[Part]:
        """The outputs in which the samples lie in known places; others without samples are noted in `constants`."""
        parts = []
        for position, tensor in enumerate(iterate_tensors(output)):
            if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
                try:
                    layout = self.tracker.find_layout(tensor)
                except PerSampleError:  # refused when it is used
                    continue
                if isinstance(layout, Layout):
                    parts.append(make_part(position, tensor, layout))
                elif layout is None and not (tensor.requires_grad or self.checks_places):
                    self.constants.add(position)
        return parts

    def _find_sums(self, output: Any) -> dict[int, Tensor]:
        """The outputs that are sums or means over the samples, such as a loss, by position."""
        found = {}
        for position, tensor in enumerate(iterate_tensors(output)):
            where = self.tracker.find_layout(tensor)
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
        if status is not None and not (
            isinstance(options.verify, int)
            and (tracker.path.program.is_due(environment, options.verify) or options.is_tried_again(status))
        ):
            return status
        if options.verify is None:
            check_unnoticed_by_modes()
        if tracker.batch < 2:
            return "not verified: the batch has fewer than two samples"
    except NotVerified as reason:
        return describe(reason, options)
    try:
        with tracker.pause():
            return Verification(model, options, tracker, arguments, environment)
    except NotVerified as reason:
        known[environment] = describe(reason, options)
        return known[environment]


def describe_environment(called: nn.Module, options: Options, arguments: Arguments) -> Hashable:
    """What a forward pass depends on, besides its path through the program of the model and the values of tensors."""
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    call = ref(called), called.training, len(arguments.args), *arguments.kwargs
    graph = torch.is_grad_enabled()  # without, no row is compared
    dtypes = tuple([tensor.dtype for tensor in arguments.tensors])
    sizes = options.is_isolated and tracing.get_trace() is None and has_unequal_sizes(arguments)
    return options.verify, graph, call, repr(options.batch_dim), options.batch_size is None, *devices, dtypes, sizes
