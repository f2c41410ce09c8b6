"""One step that a monitor measures: from the call of the model until the next step begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar
from weakref import WeakMethod

from torch import Tensor, nn

from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.gradients import RecordedGradients
from persample.monitoring.measurement import ExampleId
from persample.recording import Options, Watch, find_watch, get_trainable

Ids = Sequence[ExampleId] | Tensor | None

T = TypeVar("T")

# Computes what is kept of a step from its gradients.
Measure = Callable[[RecordedGradients, "Attempt[T]"], T | None]


class State(Enum):
    """How far an attempt is."""

    WAITING = "waiting for the backward pass"
    MEASURED = "measured, unless another backward pass follows"
    REFUSED = "refused: the step cannot be measured"


class Attempt(Generic[T]):
    """Measures a step by a recording of its own, or by one that something else (private training) makes anyway.

    The result counts when the next step begins: a second backward pass through the same graph would make it wrong.

    Args:
        model: the model, whose call is about to run.
        step: the number of the step.
        ids: the ids of its samples.
        measure: computes the result.
        options: those of the recording.
        is_strict: whether a step that cannot be measured is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        step: int,
        ids: Ids,
        measure: Measure[T],
        options: Mapping[str, Any],
        is_strict: bool = False,
    ) -> None:
        self.step, self.ids = step, ids
        self.names = _list_names(model, options)  # of the parameters that are measured
        self.state = State.WAITING
        self.found: T | None = None
        self.refusal: PerSampleError | None = None
        self._measure = measure
        self._processes = find_processes(model)
        self._is_strict = is_strict
        # What was computed before the step is of no use for weights that have changed since.
        trainable = get_trainable(model)
        self._weights = [trainable[name] for name in self.names] if "reduce" in options else []
        self._versions = self._list_versions()
        receive, complain = call_weakly(self._receive), call_weakly(self._refuse)
        self._end: Callable[[], None]
        self.other = find_watch(model)
        if self.other is not None:
            self._watch = self.other
            self._end = self.other.listen(receive, complain)
        else:
            self._watch = Watch(model, receive, options, complain=None if is_strict else complain)
            self._end = self._watch.stop

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the call of the model, or of a part of it, that is about to run."""
        if self.other is None:
            try:
                self._watch.begin(module, args, kwargs)
            except PerSampleError as error:  # before anything has run
                self._end()
                if self._is_strict or type(self._processes) is not Processes:  # which may be recording, and wait
                    raise
                self._refuse(error)

    @property
    def is_abandoned(self) -> bool:
        """Whether what recorded the step has ended since, such as private training."""
        return self.other is not None and self.other.is_retired

    def continue_with(self, ids: Ids) -> bool:
        """Note another call of the model before the backward pass; returns whether it is part of the same step.

        If not, the step was given up.
        """
        is_same = self.other is None and self._watch.steps == 1 and self._list_versions() == self._versions
        if is_same and ids is not None:
            self.ids = ids
        return is_same

    def _list_versions(self) -> list[int]:
        return [weight._version for weight in self._weights]

    def end(self) -> None:
        """Stop the recording."""
        self._end()

    def _receive(self, grads: RecordedGradients) -> None:
        if self.state is not State.WAITING:
            return
        if self.other is None:
            if self._watch.steps != 1:  # a call in eval mode, or of a part of the model
                return
            self._watch.retire()
        self.state = State.MEASURED
        try:
            self.found = self._measure(grads, self)
        except PerSampleError as error:
            if self._is_strict:
                raise
            self._refuse(error)

    def _refuse(self, error: PerSampleError) -> None:
        if self.refusal is None:
            self.state, self.found, self.refusal = State.REFUSED, None, error


def can_share_recording(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether something else records the steps of a model. A monitor of other parameters does not count."""
    other = find_watch(model)
    return other is not None and (not other.is_lenient or {*_list_names(model, options)} <= {*other.names})


def _list_names(model: nn.Module, options: Mapping[str, Any]) -> list[str]:
    return list(Options(**options).select(get_trainable(model)))


def call_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method of an object that may have been freed, and is not kept."""
    found = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        return None if (alive := found()) is None else alive(*arguments)

    return call
