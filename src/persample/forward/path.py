"""Where a forward pass is among the passes of its model that were audited, and what it has decided and read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

from persample import _torch
from persample._internal import tracing
from persample.forward.audit import Audit
from persample.forward.gradient_hooks import follow_module_hooks
from persample.forward.program import ANY_SITE, Pass, Program, Site, get_program
from persample.forward.written import is_writing, writes_own_memory
from persample.layouts import Call, Lost, Reduced, Where

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker


class Path:
    """The way of a forward pass through the sequences of functions of audited passes of the same model.

    Args:
        model: the model; None: nothing is audited.
        is_isolated: whether steps are isolated, which refuses more in an audited pass.

    Attributes:
        program: the program of the model.
        site: where the pass is; None while it is audited.
        audit: the audit of the pass, if one is running.
        number_of_reads: of numbers that may depend on several samples.
        has_read_values: whether the model has read values of samples, other than counts.
        checked_nodes: the results of custom functions whose backward is checked.
    """

    def __init__(self, model: nn.Module | None, is_isolated: bool) -> None:
        self.program = None if model is None else get_program(model, is_isolated)  # it does not keep the model
        self._hooks = ExitStack()  # undoes that hooks of modules on gradients are followed
        self._decisions: list[bool] = []  # what the model has read that is true or false for all samples together
        self.site: Site | None = ANY_SITE
        self.audit: Audit | None = None
        self.number_of_reads = 0
        self.has_read_values = False
        self.checked_nodes: WeakSet[Any] = WeakSet()

    # ---- the audit ----

    def begin(self, tracker: Tracker) -> None:
        """Compare the functions from now on with those of audited passes, and audit what is new."""
        if (program := self.program) is None or tracing.get_trace() is not None:
            return
        self._hooks.close()
        if (modules := tracker.find_hooked_modules()) and not tracker.is_coupled:
            self._hooks.enter_context(follow_module_hooks(modules, tracker))
        with _torch.DisableTorchFunction():
            if self.audit is not None:
                self.audit.add_known_tensors()
                return
            self.site = program.root
            if program.audits_due:
                self.start_audit(tracker)

    def start_audit(self, tracker: Tracker) -> Audit:
        """Audit the rest of the pass."""
        assert self.program is not None and self.site is not None
        self.audit = audit = Audit(tracker, self.program, self.site)
        self.site = None
        audit.start()
        return audit

    def audit_next_passes(self) -> None:
        """Audit the next passes of the model, too."""
        if self.program is not None:
            self.program.note_finding()

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
            self.audit.advance(key)
            return True
        following = None if self.site is None else self.site.get(key)
        if following is None or (any(key) and not writes_own_memory(call, tracker.iterate_known())):
            return False
        self.site = following
        return True

    def is_new_setting(self, setting: Any) -> bool:
        """Whether the pass is audited, or no audited pass has called a function of the user with these settings."""
        is_new = self.program is not None and not self.program.add_setting(setting)
        return is_new or self.audit is not None

    def grow(self, before: int, batch: int) -> None:
        """Samples are added to the batch, which had `before` samples."""
        if self.audit is not None:
            self.audit.grow(before, batch)

    def find_layout(self, tensor: Tensor, find_known_layout: Callable[[Tensor], Where | None]) -> Where | None:
        """Where the samples lie in a tensor, by its memory if an audit is running."""
        return find_known_layout(tensor) if self.audit is None else self.audit.find_layout(tensor)

    # ---- what depends on values ----

    def note_decision(self, call: Call, result: bool, compares: bool, is_inside: bool) -> None:
        """Note that a call has returned whether something is true of samples.

        `compares`: whether the function compares two tensors as a whole.
        """
        if compares or any(isinstance(where, (Lost, Reduced)) for where in call.where):
            self.number_of_reads += 1
            if is_inside:
                self._decisions.append(result)

    @property
    def has_read_samples(self) -> bool:
        """Whether the model has read values of samples as numbers, or decided on values of all samples."""
        return self.has_read_values or bool(self._decisions)

    def get_environments(self) -> dict[Hashable, str]:
        """What the first verification in each environment has found."""
        return {} if self.program is None else self.program.environments

    def is_due(self, environment: Hashable, most: int) -> bool:
        """Whether the pass that begins is to be verified again, at the latest after `most` passes."""
        return self.program is None or self.program.is_due(environment, most)

    def find_status(self, environment: Hashable) -> str | None:
        """At the end of a call: what the verification of the pass has found; None if it is to be verified.

        It is to be verified if it is new, or if values of samples were read as numbers, which code outside torch can
        use.
        """
        if self.program is None or self.has_read_values or (self.audit is not None and self.audit.is_new):
            return None
        return self.program.find_status(self._make_pass(environment))

    def make_note(self, environment: Hashable) -> Callable[[str], None]:
        """At the end of a call: a function that notes what the verification of the pass has found."""
        return partial((self.program or Program()).note_status, self._make_pass(environment))

    def _make_pass(self, environment: Hashable) -> Pass:
        site = self.site if self.audit is None else self.audit.site
        return Pass(id(site), tuple(self._decisions), environment)
