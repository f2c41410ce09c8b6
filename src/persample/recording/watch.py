"""`watch`: the per-sample gradients of each step of a model that is trained elsewhere, without a block around it."""

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
from persample.batches import iterate_tensors
from persample.distributed import find_processes
from persample.errors import PerSampleError
from persample.gradients import StreamedClip
from persample.recording.options import Options
from persample.recording.session import Recording, refuse_unrecorded

# Called with the gradients of each step: of the class that the option `keep` selects.
Receive = Callable[[Any], None]

# The options of `record` as a mapping, or a function that returns those of the next step.
StepOptions = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def watch(model: nn.Module, receive: Receive, options: StepOptions) -> Watch:
    """Record each step of a model from now on, and call `receive(grads)` when its backward pass has ended.

    A step is a call of the model with gradients enabled, the computation of a loss from its outputs, and the backward
    pass. Calls whose outputs go into one loss are one step, and must have the same samples.

    The samples are followed until the backward pass has ended. A step without a backward pass ends with the next call
    of the model, or with `rest()`. While the model is watched, an ordinary gradient of a recorded parameter is refused:
    it comes from a use that was not recorded.

    Args:
        model: the model; it stays as it is.
        receive: called with the gradients of each step.
        options: the options of `record`, or a function that returns those of the next step.

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
    """The result of `watch`. `stop()`, or the end of a `with` block, ends it; `rest()` ends one step."""

    def __init__(self, model: nn.Module, receive: Receive, options: StepOptions) -> None:
        self._model = model
        self._receive = receive
        self._get_options = options if callable(options) else lambda: options
        self._recording: Recording | None = None
        self._step = object()
        self._opened = ExitStack()
        self._outputs: list[ref[Tensor]] = []
        self._is_inside = False  # whether a call of the model is running
        self._empty_passes: set[int] = set()
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
            *self._refuse_unrecorded(),
        ]

    def stop(self) -> None:
        """End the watch; the model is as it was before."""
        self.rest()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def rest(self) -> None:
        """End the current step. A backward pass from its outputs raises from now on."""
        recording, self._recording = self._recording, None
        self._is_inside = False
        self._opened.close()
        if recording is not None:
            recording.close()

    # ---- the forward pass ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_recomputation = _torch.get_backward_pass() >= 0
        if is_recomputation or self._is_inside or not torch.is_grad_enabled():
            return
        try:
            if not self._continues_step(args, kwargs):
                self._begin()
            assert self._recording is not None
            self._recording.start_forward(args, kwargs)
        except BaseException:
            self.rest()
            raise
        self._is_inside = True

    def _continues_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call belongs to the current step: an earlier output is alive, and the batch size is equal."""
        recording, is_alive = self._recording, any(output() is not None for output in self._outputs)
        if recording is None or recording.tracker.is_resting or not is_alive:
            return False
        return recording.find_batch_size(args, kwargs) == recording.grads.batch_size

    def _begin(self) -> None:
        self.rest()
        self._outputs = []
        self._step = step = object()  # identifies the step: its graph must not keep the recording alive
        options = Options(**self._get_options())
        self._recording = recording = Recording(self._model, options, lambda: self._end_backward(step), self._fail)
        tracker = recording.tracker
        self._opened.enter_context(recording.processes.prepare_recording(tracker, options.keep_grad))
        tracker.start()
        self._opened.callback(tracker.stop)
        _torch.insert_outermost_mode(tracker)
        self._opened.callback(_torch.remove_mode, tracker)
        # In an empty batch no term arrives, but the node of the anchor is part of every backward pass.
        tracker.anchor_node.register_prehook(lambda grads: self._note_empty_pass(step))

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_inside:
            return
        self._is_inside = False
        if output is None:  # the call has failed, or there is nothing to back-propagate
            self._fail(sys.exc_info()[1])
            self.rest()
        elif self._recording is not None:
            self._recording.end_forward()
            self._outputs += [ref(t) for t in iterate_tensors(output) if t.requires_grad]

    # ---- the backward pass ----

    def _fail(self, error: BaseException | None) -> None:
        """End a failed step; if it was refused, restore the model."""
        if self._recording is not None:
            self._recording.tracker.is_resting = True
            if isinstance(error, PerSampleError):
                self._recording.undo_forward()

    def _note_empty_pass(self, step: object) -> None:
        recording, backward_pass = self._recording, _torch.get_backward_pass()
        if recording is None or step is not self._step or recording.grads.batch_size:
            return
        if backward_pass not in self._empty_passes:
            self._empty_passes.add(backward_pass)
            _torch.call_after_backward(recording.collector.finished)

    def _end_backward(self, step: object) -> None:
        self._empty_passes.clear()
        recording = self._recording
        if recording is None or step is not self._step:
            raise PerSampleError(
                "A backward pass reached a call of the model that does not belong to the current step: it was made "
                "before the last rest(), or a later call had another batch size. Compute a loss from one batch only."
            )
        grads = recording.grads
        if not isinstance(grads, StreamedClip) or grads.is_complete:
            recording.tracker.is_resting = True
            self._receive(grads)

    def _refuse_unrecorded(self) -> list[RemovableHandle]:
        options = Options(**self._get_options())
        return refuse_unrecorded(
            options.select(self._model),
            find_processes(self._model),
            lambda: self._recording is not None and self._recording.collector.is_pulling_back,
        )
