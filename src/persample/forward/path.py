"""Where a recording is: its stage, and the path of its forward pass among the audited passes of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

from persample import _torch
from persample._internal import tracing
from persample.errors import SamplesMixed
from persample.forward.audit import Audit
from persample.forward.gradient_hooks import follow_module_hooks
from persample.forward.program import ANY_SITE, Pass, Program, Site, get_program
from persample.forward.reads import Reads
from persample.forward.written import is_writing, writes_own_memory
from persample.layouts import Call, Where

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker


class Stage(Enum):
    """What a recording is doing."""

    BEFORE = auto()  # nothing was called yet: the code around the model prepares the batch
    INSIDE = auto()  # a call of the model runs, as far as is known
    LOSS = auto()  # the code around the model runs after a call
    BACKWARD = auto()  # a backward pass runs
    BETWEEN = auto()  # a backward pass has ended: the code around the model may prepare another batch
    ENDED = auto()  # nothing is followed any more, and the mode can be removed at any time
    GIVEN_UP = auto()  # the same, because the recording was refused: gradients that were recorded still arrive


_OVER = (Stage.ENDED, Stage.GIVEN_UP)


class Progress:
    """The stage of a recording, and the ways from one to another.

    Attributes:
        is_paused: whether passes run that are not part of the recording.
        is_following: whether calls are followed now.
        is_in_model: whether they are, and a call of the model runs, as far as is known.
    """

    def __init__(self, is_inside: bool) -> None:
        self.stage = Stage.INSIDE if is_inside else Stage.BEFORE
        self.is_paused = False
        self._set(self.stage)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is followed any more."""
        return self.stage in _OVER

    @property
    def is_between(self) -> bool:
        """Whether a backward pass was the last that happened: a call that follows may have another batch."""
        return self.stage is Stage.BETWEEN

    def enter_model(self) -> None:
        """Note that a call of the model begins."""
        self._set(Stage.INSIDE)

    def leave_model(self) -> None:
        """Note that a call of the model has ended."""
        self._last = Stage.LOSS
        if self.stage is Stage.INSIDE:
            self._set(Stage.LOSS)

    def end(self) -> None:
        """Follow nothing from now on."""
        self._set(Stage.ENDED)

    def give_up(self) -> None:
        """Follow nothing from now on, because the recording was refused."""
        self._set(Stage.GIVEN_UP)

    @contextmanager
    def differentiate(self, has_other_batches: bool) -> Iterator[None]:
        """Inside the block, a backward pass runs. After it, there may be another batch."""
        before = self.stage
        self._set(Stage.BACKWARD)
        try:
            yield
        finally:
            if self.stage is Stage.BACKWARD:
                self._set(Stage.BETWEEN if has_other_batches and before is not Stage.INSIDE else before)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed: it runs passes that are not part of the recording."""
        was_paused, self.is_paused = self.is_paused, True
        self._set(self.stage)
        try:
            yield
        finally:
            self.is_paused = was_paused
            self._set(self.stage)

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Inside the block, a recording that has ended is followed again, until it is refused again.

        For recomputations: they must save what the forward pass has saved.
        """
        stage = self.stage
        if stage in _OVER:
            self._set(self._last)
        try:
            yield
        finally:
            if stage in _OVER:
                self._set(stage)

    def _set(self, stage: Stage) -> None:
        self.stage = stage
        self.is_following = not self.is_paused and stage not in _OVER
        self.is_in_model = self.is_following and stage is Stage.INSIDE
        if stage not in _OVER:
            self._last = stage


class Path:
    """The way of a forward pass through the sequences of functions of audited passes of the same model.

    Args:
        model: the model; without one, nothing is audited.
        is_isolated: whether steps are isolated, which refuses more in an audited pass.

    Attributes:
        program: the program of the model; it does not keep the model.
        site: where the pass is; None while it is audited.
        audit: the audit of the pass, if one is running.
        reads: what Python has read of samples.
        checked_nodes: the results of custom functions whose backward is checked.
    """

    def __init__(self, model: nn.Module | None, is_isolated: bool) -> None:
        self.program = Program() if model is None else get_program(model, is_isolated)
        self._hooks = ExitStack()  # undoes that hooks of modules on gradients are followed
        self.site: Site | None = ANY_SITE
        self.audit: Audit | None = None
        self.reads = Reads()
        self._mixed_use: SamplesMixed | None = None
        self.checked_nodes: WeakSet[Any] = WeakSet()

    # ---- the audit ----

    def begin(self, tracker: Tracker) -> None:
        """Compare the functions from now on with those of audited passes, and audit what is new."""
        if tracing.get_trace() is not None:
            return
        self._hooks.close()
        if (modules := tracker.mode.find_hooked_modules()) and not tracker.is_coupled:
            self._hooks.enter_context(follow_module_hooks(modules, tracker))
        with _torch.DisableTorchFunction():
            if self.audit is not None:
                self.audit.add_known_tensors()
                return
            self.site = self.program.root
            if self.program.audits_due:
                self.start_audit(tracker)

    def start_audit(self, tracker: Tracker) -> Audit:
        """Audit the rest of the pass."""
        assert self.site is not None
        self.audit = audit = Audit(tracker, self.program, self.site)
        self.site = None
        audit.start()
        return audit

    def end(self) -> None:
        """Let the functions that follow pass without an audit: the forward pass has ended."""
        audit, self.audit = self.audit, None  # it refers to the tracker: break the cycle
        self.site = ANY_SITE
        if audit is not None:
            audit.stop()
        self._hooks.close()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is audited."""
        with nullcontext() if self.audit is None else self.audit.pause():
            yield

    def follow_whole(self) -> AbstractContextManager[Any]:
        """Inside the block, ops are part of a call whose results are set by `set_layout`."""
        return nullcontext() if self.audit is None else self.audit.follow_whole()

    def advance_to_write(self, call: Call, tracker: Tracker) -> bool:
        """Whether all that a call writes is seen: it is audited, or writes as in an audited pass, or does not write.

        To write as in an audited pass is to write samples in the same arguments, and into memory that no other tensor
        shares: which one that would be can differ. Code outside torch may write to a constant that is exposed to it.
        """
        if tracing.get_trace() is not None:  # tensors without values have no memory
            return True
        if not is_writing(call):
            return self.audit is not None or not call.facts.exposes_memory or any(call.where)
        key = tuple([where is not None for where in call.where])
        if self.audit is not None:
            self.audit.sequence.advance(key)
            return True
        following = None if self.site is None else self.site.get(key)
        if following is None or (any(key) and not writes_own_memory(call, tracker.known.items())):
            return False
        self.site = following
        return True

    def is_new_setting(self, setting: Any) -> bool:
        """Whether the pass is audited, or no audited pass has called a function of the user with these settings."""
        return not self.program.add_setting(setting) or self.audit is not None

    def note_refusal(self) -> None:
        """Have the sequence of functions of a refused pass not count as audited."""
        if self.audit is not None:
            self.audit.sequence.has_finding = True

    def grow(self, before: int, batch: int) -> None:
        """Samples are added to the batch, which had `before` samples."""
        if self.audit is not None:
            self.audit.memories.grow(before, batch)

    def find_layout(self, tensor: Tensor, find_known_layout: Callable[[Tensor], Where | None]) -> Where | None:
        """Where the samples lie in a tensor, by its memory if an audit is running."""
        return find_known_layout(tensor) if self.audit is None else self.audit.find_layout(tensor)

    def note_mixed_use(self, error: SamplesMixed) -> None:
        """Note a use of weights on mixed samples, which is refused if the loss depends on it."""
        self._mixed_use = self._mixed_use or error

    def take_mixed_use(self) -> SamplesMixed | None:
        """The first use in this call of weights on mixed samples, which is forgotten."""
        found, self._mixed_use = self._mixed_use, None
        return found

    # ---- what depends on values ----

    @property
    def has_read_samples(self) -> bool:
        """Whether the model has read values of samples as numbers, or decided on values of all samples."""
        return self.reads.has_values or bool(self.reads.decisions)

    def find_status(self, environment: Hashable) -> str | None:
        """At the end of a call: what the verification of the pass has found; None if it is to be verified.

        It is to be verified if it is new, or if values of samples were read as numbers, which code outside torch can
        use.
        """
        if self.reads.has_values or (self.audit is not None and self.audit.sequence.is_new):
            return None
        return self.program.find_status(self._make_pass(environment))

    def make_note(self, environment: Hashable) -> Callable[[str], None]:
        """At the end of a call: a function that notes what the verification of the pass has found."""
        return partial(self.program.note_status, self._make_pass(environment))

    def _make_pass(self, environment: Hashable) -> Pass:
        site = self.site if self.audit is None else self.audit.sequence.site
        return Pass(id(site), tuple(self.reads.decisions), environment)
