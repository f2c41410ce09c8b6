"""The verification of a recording: of each call of the model, and of a row in the first backward pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.copies import CannotCopy
from persample._internal.tree import find_tensors
from persample.backward import asked_sources
from persample.batches import Arguments
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.forward import CONTRIBUTIONS
from persample.recording.verification import (
    NOT_REPEATABLE,
    NotVerified,
    RowCheck,
    Verification,
    describe,
    describe_environment,
    start_verification,
)
from persample.recording.wiring import Wiring


class Verifier:
    """Verifies the calls of a recording, and notes in its gradients what was found.

    Attributes:
        is_running: whether calls of the model are extra passes.
        rng_state: of the random number generator when the recording began.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.is_running = False
        self.rng_state = torch.get_rng_state()
        self._options, self._processes, self._notes = wiring.options, wiring.processes, wiring.batch.notes
        self._tracker, self._collector, self._delivery = wiring.tracker, wiring.collector, wiring.delivery
        self._recorded = wiring.batch.parameters
        self._row_check: RowCheck | None = None  # if a call was verified
        self._verification: Verification | None = None  # of the running call
        # The module of the running call, its arguments and environment, if calls like it were verified.
        self._verified_before: tuple[nn.Module, Arguments, Hashable] | None = None
        self._has_status = False  # whether it is known if the calls so far are verified
        self._had_met = False  # whether samples of one unit were combined before the running call
        self._reads_before = 0  # numbers of samples that Python had read before the running call

    # ---- calls of the model ----

    def prepare(self, called: nn.Module, arguments: Arguments) -> None:
        """Prepare the verification of a call. The tracker must know where the samples lie in its arguments."""
        if self._options.coupled is not None:  # samples alone differ from those of the batch
            self.note_status(CONTRIBUTIONS)
            return
        environment = describe_environment(called, self._options, arguments)
        found = start_verification(called, self._options, self._processes, self._tracker, arguments, environment)
        if isinstance(found, str):
            self._verification = None
            self._verified_before = (called, _copy(arguments), environment) if found.startswith("verified") else None
            self.note_status(found)
        else:
            self._verification = found

    def start_call(self) -> None:
        """Note that a call of the model runs from now on."""
        self._had_met = self._units_have_met
        self._reads_before = self._tracker.path.reads.count

    def end_call(self, output: Any) -> None:
        """Verify the output of the call that has ended; None if it has failed.

        Raises:
            PerSampleError: steps are isolated, the call cannot be verified, and samples have left torch in it.
        """
        has_reads = self._tracker.path.reads.count > self._reads_before
        verification = self._take_verification(output)
        if output is None:
            return
        if verification is not None:
            with self._run():
                # A check compares all rows itself.
                has_row = self._options.positions is None and asked_sources.get() is None
                self.note_status(verification.finish(output, has_row))
            self._notes.note_row_verification(verification.no_row)
            if verification.row is not None:
                if self._row_check is None:
                    self._row_check = RowCheck(self._recorded)
                    self._delivery.show_rows_to(self._row_check)
                self._row_check.add(verification.row)
        if self._options.is_isolated and self._tracker.batch > 1 and (verification is None or verification.is_telling):
            self._refuse_unverified(has_reads)

    def _take_verification(self, output: Any) -> Verification | None:
        """The verification of the call that has ended: that which was prepared, or one that is made now."""
        verification, self._verification = self._verification, None
        known, self._verified_before = self._verified_before, None
        if known is not None and output is not None:
            status = self._tracker.path.find_status(known[-1])
            if status is not None and not self._options.is_tried_again(status):
                self.note_status(status)
            elif self._tracker.batch > 1:  # else there is nothing to mix with
                verification = self._start_late_verification(*known)
        if self._units_have_met and not self._had_met:
            self.note_status(describe(NotVerified("the model combines samples of one unit"), self._options))
            return None
        return verification

    def _refuse_unverified(self, has_reads: bool) -> None:
        """Refuse a call that was not verified. If all of it runs in torch, the tracker has followed the samples."""
        found = self._notes.verification
        if found == f"not verified: {NOT_REPEATABLE}":
            raise PerSampleError(
                f"{NOT_REPEATABLE.capitalize()}: the model uses what it has kept outside of its modules (a global, "
                "a closure), which may be samples. In private training a sample must not influence others: keep "
                "nothing there that the model uses, or keep it in an attribute of the model, which is watched."
            )
        if not has_reads:
            return
        is_excluded = self._options.verify is False or type(self._processes) is not Processes
        if found.startswith("not verified") and not is_excluded:
            raise PerSampleError(
                "The model reads values of samples as numbers or arrays (item, numpy), which cannot be followed. "
                "Private training then runs samples alone and compares them with the batch, and cannot do so here: "
                f"{found.partition(': ')[2]}. Compute with torch alone, or change what prevents it. Or pass "
                "verify=False to make_private (recording={'verify': False} to PrivateOptimizer): then it is your part "
                "that no sample influences others."
            )

    def note_nested_call(self) -> None:
        """Give up the verification of a model that calls itself."""
        if self._options.coupled is None:
            self._verification = None
            self.note_status("not verified: the model calls itself")

    def note_status(self, status: str) -> None:
        """Note what was found for a call: a recording is verified if all of its calls are."""
        if self._has_status and self._notes.verification.startswith("not verified"):
            return
        self._has_status = True
        self._notes.note_verification(status)

    def _start_late_verification(
        self, called: nn.Module, arguments: Arguments, environment: Hashable
    ) -> Verification | None:
        """Prepare the verification of a call that has just run and may have done something new."""
        with _torch.DisableTorchFunction():
            is_random = torch.cuda.is_initialized() or not torch.equal(torch.get_rng_state(), self.rng_state)
            try:
                return Verification(called, self._options, self._tracker, arguments, environment, is_random)
            except NotVerified as reason:
                self.note_status(describe(reason, self._options, is_late=True))
                return None

    @property
    def _units_have_met(self) -> bool:
        units = self._tracker.counted.units
        return units is not None and units.have_met

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Inside the block, extra passes run."""
        self.is_running = True
        try:
            with self._tracker.pause():
                yield
        finally:
            self.is_running = False

    # ---- a row of the first backward pass ----

    @contextmanager
    def compare_row(self, roots: Any, inputs: list[Tensor]) -> Iterator[None]:
        """Inside the block a backward pass runs. At its end, compare a row if calls were verified."""
        check = self._row_check
        if check is None or not check.calls or check.is_noting:  # the latter: a pass inside of a pass
            yield
            return
        uses = {retained.node_number for retained in self._collector.retained.list_alive()}
        with self._note_row(check):
            if inputs:
                raise NotVerified("the backward pass has inputs=")
            check.begin(find_tensors(roots), self._collector.anchor_node, uses)
        yield
        try:
            if check.is_noting:
                with self._note_row(check), self._run(), self._collector.pull_back():
                    self._notes.note_row_verification(check.compare())
                    check.end()
        finally:
            check.forget()

    @contextmanager
    def _note_row(self, check: RowCheck) -> Iterator[None]:
        """Note why no row can be compared, if that is what the block finds; calls like these are not tried again."""
        try:
            yield
        except NotVerified as reason:
            self._notes.note_row_verification(f"no row was compared: {reason}")
            check.end()

    def close(self) -> None:
        """Forget the graphs of verified calls."""
        if self._row_check is not None:
            self._row_check.forget()


def _copy(arguments: Arguments) -> Arguments:
    """The arguments as they are before the call; themselves if they cannot be copied, which prevents a verification."""
    try:
        return arguments.copy()
    except CannotCopy:
        return arguments
