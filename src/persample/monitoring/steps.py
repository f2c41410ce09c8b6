"""Some steps of a training run, each measured by a recording, while the run stays as it is."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.models import SeveralModels, combine_models
from persample._internal.tree import iterate_tensors
from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients import RecordedGradients
from persample.monitoring.attempt import Attempt, Ids, State, can_share_recording
from persample.monitoring.turns import TURNS
from persample.recording import (
    Constants,
    Model,
    ModuleHook,
    Options,
    Selection,
    Verify,
    find_parts,
    find_watch,
    get_trainable,
    is_paused,
    is_recording,
    leave_ended_modes,
)

T = TypeVar("T")
Self = TypeVar("Self", bound="MeasuredSteps[Any]")

_LOGGER = logging.getLogger("persample.monitoring")

# What measures the steps of each model at present. They share recordings, which keep what any of them needs.
_MEASURING: WeakKeyDictionary[nn.Module, WeakSet[AnySteps]] = WeakKeyDictionary()


class StepOptions(TypedDict, total=False):
    """The options of `record` that each tool in a run has. `Options` documents them."""

    parameters: Selection | None
    batch_dim: BatchDim
    loss_reduction: str | None
    constants: Constants
    verify: Verify


class MeasuredSteps(ABC, Generic[T]):
    """Records every `every`-th step of a model. A subclass says what is computed from its gradients, and kept.

    Hooks and recordings refer to it weakly: if it is dropped, the run goes on without it.

    Args:
        model: the model that is trained; or several, as for `record`.
        every: how many calls of the model go by until the next one is measured.
        options: those of the recordings.

    Attributes:
        ids: the ids of the samples of the next call of the model.
        step: the number of calls of the model in training mode so far. It can be set, to the step of a trainer.
        is_strict: whether a step that cannot be measured is an error.
    """

    is_strict = False

    def __init__(self, model: Model, every: int, options: Mapping[str, Any]) -> None:
        if every < 1:
            raise PerSampleError(f"every must be at least 1, got {every}.")
        model = combine_models(model)
        self.ids: Ids = None
        self.step = 0
        self._options = {"keep": "norms", **options, "keep_grad": True}
        self._names = list(Options(**self._options).select(get_trainable(model)))
        if not self._names:
            raise PerSampleError("There is no parameter to monitor: none of the chosen parameters requires grad.")
        self._every, self._calls = every, 0
        self._attempt: Attempt[T] | None = None  # at the step that is being measured, or was measured last
        self._warned: set[str] = set()
        self._open_call_hook: RemovableHandle | None = None
        self._has_open_call = False  # whether the call before one that is due has had no backward pass yet
        self._several = model if isinstance(model, SeveralModels) else None  # which nothing else keeps
        self._model = ref(model)
        # Until the first call, all parts of the model have hooks; then only the module that was called, and the model.
        self._hooks = self._add_hooks(model)
        _MEASURING.setdefault(model, WeakSet()).add(self)

    @abstractmethod
    def measure(self, grads: RecordedGradients, attempt: Attempt[T]) -> T | None:
        """Called when the backward pass of a step has ended. The result may still be dropped."""

    @abstractmethod
    def keep(self, found: T, attempt: Attempt[T]) -> None:
        """Called when it is known that the result of a step counts."""

    def prepare(self, model: nn.Module) -> Mapping[str, Any]:
        """Called before a step is recorded that nothing else records; returns options of this recording."""
        return {}

    def note_call(self, ids: Ids) -> None:
        """Called with the ids of each call of the model, also of those that are not measured."""
        return

    def stop(self) -> None:
        """End the measuring; the model is as it was before."""
        self._end_attempt()
        TURNS.leave(self)
        leave_ended_modes()
        for hook in self._hooks.values():
            hook.remove()
        if self._open_call_hook is not None:
            self._open_call_hook.remove()
        for measuring in _MEASURING.values():
            measuring.discard(self)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def keep_result(self) -> None:
        """Keep what was measured last, if there is something new."""
        if (attempt := self._attempt) is None:
            return
        found, attempt.found = attempt.found, None
        if attempt.refusal is not None:
            self.warn(f"Step {attempt.step} is not measured, nor are other steps like it: {attempt.refusal}")
        if found is not None:
            self.keep(found, attempt)

    def warn(self, text: str) -> None:
        """Log a warning, once for each kind."""
        kind = text.partition(": ")[2] or text
        if kind not in self._warned:
            self._warned.add(kind)
            _LOGGER.warning("%s", text)

    # ---- calls of the model ----

    def _add_hooks(self, model: nn.Module) -> WeakKeyDictionary[nn.Module, RemovableHandle]:
        own = ref(self)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (steps := own()) is not None:
                steps._start_call(module, args, kwargs)

        trainable = get_trainable(model)
        modules = [model, *find_parts(model, {id(trainable[name]) for name in self._names})]
        return WeakKeyDictionary(
            {m: m.register_forward_pre_hook(ModuleHook(before), with_kwargs=True, prepend=True) for m in modules}
        )

    def _start_call(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide about a call that is about to run: is it part of a step, and is the step measured?"""
        is_training = (called.training or self.is_strict) and torch.is_grad_enabled()
        if not is_training or _torch.get_backward_pass() >= 0 or is_paused():  # or a recomputation, or a verification
            return
        model = self._model()
        if called is not model and any(module is model for module in _torch.iterate_running_modules()):
            return
        if not self.step and self._attempt is None:  # a loop that begins with this part does so in all steps
            for module in [m for m in self._hooks if m is not called and m is not model]:
                self._hooks.pop(module).remove()
        ids, self.ids = self.ids, None
        self.note_call(ids)
        if self._attempt is not None and (self._attempt.state is not State.WAITING or self._attempt.is_abandoned):
            self._end_attempt()
        is_given_up = self._attempt is not None
        if self._attempt is not None:
            if self._attempt.continue_with(ids):
                return
            self._end_attempt()
        step, self.step = self.step, self.step + 1
        if not (is_given_up or self._is_due()):
            self._calls += 1
            if self._is_due():
                self._note_open_call(called)
        elif self._has_open_call and not is_given_up:  # this call may belong to the step of the last one
            self._note_open_call(called)
        elif model is not None and self._can_measure(model):
            self._calls += 1
            self._attempt = self._try(model, step, ids)
            self._attempt.begin(called, args, kwargs)

    def _try(self, model: nn.Module, step: int, ids: Ids) -> Attempt[T]:
        """Record the next call of the model."""
        own = ref(self)

        def measure(grads: RecordedGradients, attempt: Attempt[T]) -> T | None:
            return None if (steps := own()) is None else steps.measure(grads, attempt)

        options, others = self._options, [other for other in _MEASURING[model] if other is not self and other._is_due()]
        if not others and find_watch(model) is None:
            options = {**options, **self.prepare(model)}
        elif any(other._options["keep"] == "everything" for other in others):
            options = {**options, "keep": "everything"}
        return Attempt(model, step, ids, measure, options, self.is_strict)

    def _is_due(self) -> bool:
        return self._calls % self._every == 0

    def _can_measure(self, model: nn.Module) -> bool:
        """Whether the call can be recorded here, or what records it (`Attempt`) records enough.

        If not, the next call is measured.
        """
        leave_ended_modes()
        if can_share_recording(model, self._options) or not (is_recording() or TURNS.must_give_way(self)):
            TURNS.take(self)
            return True
        TURNS.wait(self)
        if self.is_strict:
            raise PerSampleError(
                "Something else records this step (record, watch, or a monitor of another model), so that the samples "
                "of the validation batch cannot be kept out of p.grad. Stop it first."
            )
        return False

    def _note_open_call(self, called: nn.Module) -> None:
        """Note that the call that is about to run, and is not measured, waits for its backward pass."""
        if self._open_call_hook is not None:
            self._open_call_hook.remove()
        own = ref(self)

        def close(grad: Tensor) -> None:
            if (steps := own()) is not None:
                steps._has_open_call = False

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (steps := own()) is not None:
                hook.remove()
                for tensor in iterate_tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(close)
                        steps._has_open_call = True

        self._open_call_hook = hook = called.register_forward_hook(ModuleHook(after))

    def _end_attempt(self) -> None:
        """Stop the recording of a step that has ended or was given up, and keep its result."""
        if self._attempt is not None:
            self._attempt.end()
            self.keep_result()
            self._attempt = None


def check_ids(ids: Ids, count: int) -> Sequence[int | str] | None:
    """The ids of the rows of a step as a list; None if there are none."""
    if ids is None:
        return None
    found = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(found) != count:
        raise PerSampleError(f"Monitor.ids has {len(found)} entries, but the batch has {count} samples.")
    return found


AnySteps = MeasuredSteps[Any]
