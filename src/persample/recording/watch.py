"""Recording each step of a model that trains as it always does, where no block can be put around its steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample.batches import tensors_within
from persample.distributed import processes_of
from persample.errors import PerSampleError
from persample.gradients.matrix import PerSampleGradients
from persample.gradients.streamed import StreamedClip
from persample.recording.options import Options, chosen, trainable_of
from persample.recording.session import Recording, refuse_unrecorded

Receive = Callable[[PerSampleGradients], None]


def watch(model: nn.Module, receive: Receive, options: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> Watch:
    """From now on each step of the model is recorded: `receive(grads)` is called when its backward pass has ended.

    A step is a call of the model with gradients enabled, whatever is computed of its outputs, and the backward pass
    behind. The `options` are those of `record`, or a function that gives those of the next step. Calls whose outputs go
    into one loss must be of the same samples, and are one step. An ordinary gradient of a recorded parameter, by a way
    that was not recorded, is refused, as long as the model is watched: until `stop()`.

    What follows the samples stays active until the next call of the model, or `rest()`; from the end of the backward
    pass on it lets everything through.

    >>> model, found = nn.Linear(3, 2), []
    >>> watched = watch(model, lambda grads: found.append(grads.norms()), {"keep": "norms"})
    >>> for _ in range(2):
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> watched.stop()
    >>> [norms.shape for norms in found]
    [torch.Size([5]), torch.Size([5])]
    """
    return Watch(model, receive, options)


class Watch:
    """What `watch` returns: `rest()` between steps is optional; `stop()` ends it, or the end of a `with` block."""

    def __init__(
        self, model: nn.Module, receive: Receive, options: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    ) -> None:
        self._model = model
        self._receive = receive
        self._options = options if callable(options) else lambda: options
        self._recording: Recording | None = None
        self._step = object()
        self._opened = ExitStack()
        self._outputs: list[ref[Tensor]] = []
        self._runs = False  # a call of the model
        self._empty_passes: set[int] = set()
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
            *self._refusals(),
        ]

    def stop(self) -> None:
        """Ends the watch: the model is as it was."""
        self.rest()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def rest(self) -> None:
        """Says that a step has ended; what was not back-propagated of it is not recorded any more."""
        recording, self._recording = self._recording, None
        self._runs = False
        self._opened.close()
        if recording is not None:
            recording.forget()

    # ---- the forward pass ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recomputed = _torch.get_backward_pass() >= 0
        if recomputed or self._runs or not torch.is_grad_enabled():
            return
        try:
            if not self._goes_on(args, kwargs):
                self._begin()
            assert self._recording is not None
            self._recording.before_forward(args, kwargs)
        except BaseException:
            self.rest()
            raise
        self._runs = True

    def _goes_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is part of the step that was begun: a loss of both may follow, and it is of the same samples.

        If no output of the earlier call is left, there will be none.
        """
        recording = self._recording
        if recording is None or recording.tracker.rests or not any(output() is not None for output in self._outputs):
            return False
        return recording.batch_of(args, kwargs) == recording.grads.batch_size

    def _begin(self) -> None:
        self.rest()
        self._outputs = []
        self._step = step = object()  # by which it is known, for what it keeps must not know the recording itself
        self._recording = recording = Recording(self._model, Options(**self._options()), lambda: self._ended(step))
        tracker = recording.tracker
        self._opened.enter_context(recording.over.recording(tracker, recording.options.keep_grad))
        tracker.start()
        self._opened.callback(tracker.stop)
        backward = tracker.on_backward
        tracker.on_backward = lambda *call: self._to_the_end(backward, *call)  # type: ignore[arg-type]
        _torch.insert_outermost_mode(tracker)
        self._opened.callback(_torch.remove_mode, tracker)
        # Where there are no samples no term arrives, but the anchor's node is part of every backward pass.
        tracker.anchor_node.register_prehook(lambda grads: self._passes_by(step))

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._runs:
            return
        self._runs = False
        if output is None:  # it has failed, or there is nothing to be back-propagated
            self._fail(sys.exc_info()[1])
            self.rest()
        elif self._recording is not None:
            self._recording.after_forward()
            self._outputs += [ref(t) for t in tensors_within(output) if t.requires_grad]

    # ---- the backward pass ----

    def _to_the_end(self, backward: Callable[..., Any], *call: Any) -> Any:
        """A backward pass that fails ends its step."""
        try:
            return backward(*call)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException | None) -> None:
        """Ends a step; if it was refused, the model is left as it was before."""
        if self._recording is not None:
            self._recording.tracker.rests = True
            if isinstance(error, PerSampleError):
                self._recording.undo()

    def _passes_by(self, step: object) -> None:
        recording, backward_pass = self._recording, _torch.get_backward_pass()
        if recording is None or step is not self._step or recording.grads.batch_size:
            return
        if backward_pass not in self._empty_passes:
            self._empty_passes.add(backward_pass)
            _torch.call_after_backward(recording.collector.finished)

    def _ended(self, step: object) -> None:
        self._empty_passes.clear()
        recording = self._recording
        if recording is None or step is not self._step:
            raise PerSampleError(
                "A backward pass reached a call of the model that is not part of the step: one from before the last "
                "rest(), or of another number of samples than a later one. One loss can be of one batch only."
            )
        grads = recording.grads
        if not isinstance(grads, StreamedClip) or grads.is_complete:
            recording.tracker.rests = True
            self._receive(grads)

    def _refusals(self) -> list[RemovableHandle]:
        recorded = chosen(trainable_of(self._model), Options(**self._options()).parameters)
        return refuse_unrecorded(
            recorded,
            processes_of(self._model),
            lambda: self._recording is not None and self._recording.collector.pulls_back(),
        )
