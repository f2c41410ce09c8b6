"""`watch`: the per-sample gradients of each step of a model that is trained elsewhere, without a block around it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import get_ident
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample.batches import iterate_tensors
from persample.distributed import find_processes
from persample.errors import PerSampleError
from persample.forward.isolation import Isolation
from persample.forward.known_tensors import TensorMap
from persample.gradients import LossGradients, StreamedClip
from persample.recording.hooks import ModuleHook, refuse_unrecorded
from persample.recording.options import Options, get_trainable
from persample.recording.session import Recording, leave_ended_modes

# Called with the gradients of each step: of the class that the option `keep` selects.
Receive = Callable[[Any], None]

# The options of `record` as a mapping, or a function that returns those of the next step.
StepOptions = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


_MAX_BATCHES = 16  # that are declared as samples before they are used


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
        options: the options of `record`, or a function that returns those of the next step. The samples are followed
            from the call of the model on: what is computed before it is not seen.

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

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        options: StepOptions,
        note_failure: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self._model = ref(model)
        self._receive = receive
        self._note_failure = note_failure  # called with the error if a call of the model or a backward pass fails
        self._get_options = options if callable(options) else lambda: options
        self._recording: Recording | None = None
        # Tensors that were declared, and their batch dimensions: of the last batches, as loaders work in advance.
        self._samples: deque[TensorMap[int]] = deque(maxlen=_MAX_BATCHES)
        self._step: _Step | None = None
        self._opened = ExitStack()
        self._outputs: list[ref[Tensor]] = []
        self._is_inside = False  # whether a call of the model is running
        self._thread = 0  # in which the current step began
        self._empty_passes: set[int] = set()
        self._isolation = Isolation()
        self._hooks: list[RemovableHandle] = []
        self._hooks += self._refuse_unrecorded(model)
        self._hooks += [
            model.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModuleHook(self._after), always_call=True),
        ]

    def stop(self) -> None:
        """End the watch; the model is as it was before."""
        self.rest()
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        # The model's hooks and the graph of its outputs keep the watch. Without both, its mode has to go.
        if not sys.is_finalizing():
            self.stop()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def rest(self) -> None:
        """End the current step. A backward pass from its outputs raises from now on."""
        recording, self._recording = self._recording, None
        self._is_inside = False
        if recording is not None:
            recording.tracker.has_ended = True  # in the modes of another thread it stays until leave_ended_modes()
        self._opened.close()
        leave_ended_modes()
        if recording is not None:
            recording.close()

    def add_samples(self, batch: Any, batch_dim: int = 0) -> None:
        """Declare the tensors of a batch of data, such as targets and masks, before the model is called with it.

        A tensor of `batch` with the batch's size in dimension `batch_dim`, or else in dimension 0, has one row per
        sample, in all steps. It is not kept alive. Several batches may be declared in advance; the last 16 count.
        Without this, a tensor that is not an argument of the model is a constant inside the model, and is judged by its
        size in the code around it.

        >>> model, found = nn.Linear(3, 1), []
        >>> x, y = torch.randn(5, 3), torch.randn(2, 5)             # two targets for each sample, time first
        >>> with watch(model, found.append, {}) as watched:
        ...     watched.add_samples(y, batch_dim=1)
        ...     (model(x).squeeze(1) - y).square().sum(0).mean().backward()
        >>> found[0].loss_reduction
        'mean'
        """
        declared: TensorMap[int] = TensorMap()
        for tensor in iterate_tensors(batch):
            declared[tensor] = batch_dim
        self._samples.append(declared)
        if self._is_inside and self._recording is not None:
            self._recording.add_samples(declared)

    # ---- the forward pass ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._recording is not None and self._recording.is_verifying:  # an extra pass, not a step
            return
        is_recomputation = _torch.get_backward_pass() >= 0
        if is_recomputation or not torch.is_grad_enabled():
            return
        if self._is_inside:
            if _torch.is_running(module):  # a model that calls itself
                if self._recording is not None:
                    self._recording.note_nested_call()
                return
            self.rest()  # an interrupt has ended the last call, and torch calls no hook then
        try:
            if not self._continues_step(args, kwargs):
                self._begin(module)
            assert self._recording is not None
            self._recording.start_forward(args, kwargs)
            for declared in self._samples:
                self._recording.add_samples(declared)
            self._recording.hide_earlier_data()
        except BaseException:
            self.rest()
            raise
        self._is_inside = True

    def _continues_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call belongs to the current step: an earlier output is alive, and the batch size is equal."""
        recording, is_alive = self._recording, any(output() is not None for output in self._outputs)
        if recording is None or recording.tracker.has_ended or not is_alive or self._thread != get_ident():
            return False
        return recording.find_batch_size(args, kwargs) == recording.grads.batch_size

    def _begin(self, model: nn.Module) -> None:
        self.rest()
        self._outputs = []
        self._thread = get_ident()
        # torch's stack of modes keeps the recording, which must not keep the watch or the model.
        step = _Step(self)
        self._step = step
        options = Options(**self._get_options())
        isolation = self._isolation if options.isolate else None
        self._recording = recording = Recording(
            model, options, step.end_backward, step.fail, has_hooks=True, isolation=isolation
        )
        tracker = recording.tracker
        self._opened.enter_context(recording.processes.prepare_recording(tracker, options.keep_grad))
        tracker.start()
        self._opened.callback(tracker.stop)
        _torch.insert_outermost_mode(tracker)
        self._opened.callback(_torch.remove_mode, tracker)
        # In an empty batch no term arrives, but the node of the anchor is part of every backward pass.
        recording.collector.anchor_node.register_prehook(lambda grads: step.note_empty_pass())

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_inside or (self._recording is not None and self._recording.is_verifying):
            return
        if output is not None and self._recording is not None:
            try:
                self._recording.end_forward(output)
            except BaseException as error:
                self.fail(error)
                self.rest()
                raise
        self._is_inside = False
        if output is None:  # the call has failed, or there is nothing to back-propagate
            self.fail(sys.exc_info()[1])
            self.rest()
        elif self._recording is not None:
            self._outputs += [ref(t) for t in iterate_tensors(output) if t.requires_grad]

    # ---- the backward pass ----

    def fail(self, error: BaseException | None) -> None:
        """End a failed step; if it was refused, restore the model."""
        if self._note_failure is not None:
            self._note_failure(error)
        if self._recording is not None:
            self._recording.tracker.has_ended = True
            if isinstance(error, PerSampleError):
                self._recording.undo_forward()

    def note_empty_pass(self, step: _Step) -> None:
        """Note that a backward pass is running, in which no term arrives if the batch is empty."""
        recording, backward_pass = self._recording, _torch.get_backward_pass()
        if recording is None or step is not self._step or recording.grads.batch_size:
            return
        if backward_pass not in self._empty_passes:
            self._empty_passes.add(backward_pass)
            _torch.call_after_backward(recording.collector.finished)

    def end_backward(self, step: _Step) -> None:
        """Deliver the gradients of a step whose backward pass has ended."""
        self._empty_passes.clear()
        recording = self._recording
        if recording is None or step is not self._step:
            _refuse_other_step()
        grads = recording.grads
        if not isinstance(grads, (StreamedClip, LossGradients)) or grads.is_complete:
            recording.tracker.has_ended = True
            self._receive(grads)

    @property
    def is_pulling_back(self) -> bool:
        """Whether gradients of the current step are being pulled back to the parameters."""
        return self._recording is not None and self._recording.collector.is_pulling_back

    def _refuse_unrecorded(self, model: nn.Module) -> list[RemovableHandle]:
        options, watched = Options(**self._get_options()), ref(self)

        def is_pulling_back() -> bool:
            own = watched()
            return own is not None and own.is_pulling_back

        return refuse_unrecorded(options.select(get_trainable(model)), find_processes(model), is_pulling_back)


class _Step:
    """Identifies a step of a watch, and passes on what happens in its backward passes. It does not keep the watch."""

    def __init__(self, watched: Watch) -> None:
        self._watch = ref(watched)

    def end_backward(self) -> None:
        watched = self._watch()
        if watched is None:
            _refuse_other_step()
        watched.end_backward(self)

    def fail(self, error: BaseException) -> None:
        if (watched := self._watch()) is not None:
            watched.fail(error)

    def note_empty_pass(self) -> None:
        if (watched := self._watch()) is not None:
            watched.note_empty_pass(self)


def _refuse_other_step() -> NoReturn:
    raise PerSampleError(
        "A backward pass reached a call of the model that does not belong to the current step: it was made before the "
        "last rest(), or a later call had another batch size. Compute a loss from one batch only."
    )
