"""`watch`: the per-sample gradients of each step of a model that is trained elsewhere, without a block around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.models import SeveralModels, combine_models
from persample._internal.options import make_options, show_options
from persample.distributed import Processes, find_processes
from persample.errors import Complain, PerSampleError, raise_or_complain
from persample.recording.declared import DeclaredBatches
from persample.recording.hooks import Calls, refuse_scripted, refuse_unrecorded
from persample.recording.options import Model, Options, RecordOptions, get_trainable
from persample.recording.step import WatchedStep

# Called with the gradients of each step: of the class that the option `keep` selects.
Receive = Callable[[Any], None]

# The options of `record` as a mapping, or a function that returns those of the next step.
StepOptions = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


_WATCHES: WeakKeyDictionary[nn.Module, ref[Watch]] = WeakKeyDictionary()  # the last one of each model


@show_options(Options, RecordOptions)
def watch(
    model: Model, receive: Receive, options: StepOptions | None = None, **keywords: Unpack[RecordOptions]
) -> Watch:
    """Record each step of a model from now on, and call `receive(grads)` when its backward pass has ended.

    A step is a call of the model with gradients enabled, the computation of a loss from its outputs, and the backward
    pass. Calls whose outputs go into one loss are one step, and must have the same samples. Except under DDP and FSDP,
    a submodule may be called in place of the model, as in `model.head(model.encoder(x))`.

    The samples are followed until the backward pass has ended. A step without a backward pass ends with the next call
    of the model, or with `rest()`. While the model is watched, an ordinary gradient of a recorded parameter is refused:
    it comes from a use that was not recorded.

    Args:
        model: the model; it stays as it is. Or several models, as for `record`.
        receive: called with the gradients of each step.
        options: instead of the keywords, a mapping of them, or a function that returns those of the next step. It is
            called when the step begins.
        **keywords: see `Options`.

    The samples are followed from the call of the model on. A call with other `units` than before begins a new step.

    Raises:
        PerSampleError: an option is wrong, or given both as a keyword and in `options`; or, in a step, the model cannot
            be recorded.

    >>> import torch
    >>> model, found = nn.Linear(3, 2), []
    >>> watched = watch(model, lambda grads: found.append(grads.norms()), keep="norms")
    >>> for _ in range(2):
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> watched.stop()
    >>> [norms.shape for norms in found]
    [torch.Size([5]), torch.Size([5])]
    """
    given = make_options(Options, "watch", keywords, RecordOptions).list_changed()
    if options is not None and given:
        raise PerSampleError(f"watch() got options and the keywords {', '.join(given)}. Pass one of both.")
    return Watch(combine_models(model), receive, given if options is None else options)


class Watch(Calls):
    """The result of `watch`. `stop()`, or the end of a `with` block, ends it; `rest()` ends one step.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> with watch(model, lambda grads: print(grads.norms().shape), keep="norms"):
    ...     model(torch.randn(5, 3)).square().mean().backward()
    torch.Size([5])
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        options: StepOptions,
        note_failure: Callable[[BaseException | None], None] | None = None,
        complain: Complain | None = None,
    ) -> None:
        super().__init__()
        self._model = ref(model)
        self._several = model if isinstance(model, SeveralModels) else None  # which nothing else keeps
        self._receive = receive
        self._complain = complain  # called with the error if a step is refused, in place of raising it
        self._listeners: list[tuple[Receive, Complain]] = []
        self._note_failure = note_failure  # called with the error if a call of the model or a backward pass fails
        self._get_options = options if callable(options) else lambda: options
        self.declared = DeclaredBatches()
        self._step: WatchedStep | None = None
        self.steps = 0  # that have begun
        self.is_retired = False  # whether no further step is recorded
        self.is_private = False  # whether the last step that has begun is one of private training
        self._refusals: list[RemovableHandle] = []
        refuse_scripted(model)
        made = self._make_options()
        if made.guard is not None:
            self.declared = made.guard.batches
        recorded = made.select(get_trainable(model))
        self.names = list(recorded)  # of the parameters that are recorded
        link, processes = _Link(self), find_processes(model)
        give_up = link.give_up if self.is_lenient and type(processes) is Processes else None
        self._refusals = refuse_unrecorded(recorded, processes, link.is_pulling_back, give_up)
        self.add_hooks(model, {id(p) for p in recorded.values()})
        _WATCHES[model] = ref(self)

    def _make_options(self) -> Options:
        return make_options(Options, "watch", self._get_options())

    def stop(self) -> None:
        """End the watch; the model is as it was before."""
        self.declared.stop()
        self.rest()
        self.retire()

    def retire(self) -> None:
        """Record no further step, and accept ordinary gradients of the parameters. `stop` is still to be called.

        In contrast to `stop`, it may be called when a step is received.
        """
        self.remove_hooks()
        for refusal in self._refusals:
            refusal.remove()
        if self._step is not None:
            self._step.processes.restore_settings()
        self.is_retired = True

    def listen(self, receive: Receive, complain: Complain) -> Callable[[], None]:
        """Call `receive` with the gradients of each step, too, and `complain` if it is refused.

        Returns a function that ends it.
        """
        listener = (receive, complain)
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # The model's hooks and the graph of its outputs keep the watch. Without both, its mode has to go.
        if not is_finalizing():  # at the end of the interpreter, the names of this module are None
            self.stop()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the call of the model, or of a part, that is about to run. For a hook that starts the watch itself."""
        report = self.before_model if module is self._model() else self.before_part
        report(module, args, kwargs)

    def rest(self) -> None:
        """End the current step. A backward pass from its outputs raises from now on."""
        step, self._step = self._step, None
        self.leave()
        if step is not None:
            step.end()

    @property
    def is_lenient(self) -> bool:
        """Whether steps that are refused are given up, in place of raising an error."""
        return self._complain is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block nothing is followed: it is not part of a step, as the loading of further data."""
        with (
            nullcontext() if self._step is None else self._step.tracker.pause(),
            self.declared.pause(),
        ):
            yield

    def add_samples(self, batch: Any, batch_dim: int = 0) -> None:
        """Declare the tensors of a batch of data, such as targets and masks, before the model is called with it.

        A tensor of `batch` with the batch's size in dimension `batch_dim`, or else in dimension 0, has one row per
        sample, in all steps. It is not kept alive. Several batches may be declared in advance; the last 16 count.
        Without this, a tensor that is not an argument of the model is a constant inside the model, and is judged by its
        size in the code around it.

        >>> import torch
        >>> model, found = nn.Linear(3, 1), []
        >>> x, y = torch.randn(5, 3), torch.randn(2, 5)             # two targets for each sample, time first
        >>> with watch(model, found.append) as watched:
        ...     watched.add_samples(y, batch_dim=1)
        ...     (model(x).squeeze(1) - y).square().sum(0).mean().backward()
        >>> found[0].loss_reduction
        'mean'
        """
        declared = self.declared.add(batch, batch_dim)
        if self.is_inside and self._step is not None:
            self._step.add_samples(declared)

    # ---- the forward pass ----

    def find_recording(self) -> WatchedStep | None:
        """The recording of the current step."""
        return self._step

    def interrupt_call(self) -> None:
        """End the step of a call that an interrupt has ended."""
        self.rest()

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def start_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin or continue a step with a call of the model, or of a part; returns whether the call is recorded."""
        model = self._model()
        if model is None:
            return False
        try:
            step = self._step
            self.declared.start_call(args, kwargs)
            if step is None or not (
                step.continues(args, kwargs) if module is model else step.continues_with_part(module, args, kwargs)
            ):
                self.declared.start_step()
                step = self._begin(model, module)
            if step.begin_call(module, args, kwargs):
                return True
        except BaseException as error:
            if isinstance(error, PerSampleError) and module is not model and self.is_lenient:
                self.give_up(error)
                return False
            self.rest()
            raise
        self.rest()
        return False

    def _begin(self, model: nn.Module, first: nn.Module) -> WatchedStep:
        self.rest()
        self.steps += 1
        # torch's stack of modes keeps the recording, which must not keep the watch or the model.
        link = _Link(self)
        options = self._make_options()
        self.is_private = options.is_isolated
        complain = link.give_up if self.is_lenient else None
        told = link.end_backward, link.fail
        self._step = step = WatchedStep(model, first, self.declared, link, options, *told, True, complain)
        step.open(options.keep_grad)
        return step

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def end_call(self, output: Any) -> None:
        """Verify the output of a call, or end the step if the call has failed."""
        step = self._step
        if step is None:
            return
        if self.is_lenient and step.tracker.has_ended:
            self._end_refused_step()
            return
        if output is None:  # the call has failed, or there is nothing to back-propagate
            self.fail(sys.exc_info()[1])
            self.rest()
            return
        try:
            step.end_call(output)
        except BaseException as error:
            if isinstance(error, PerSampleError) and step.tracker.complain is not None:
                self.leave()
                step.tracker.complain(error)
                return
            self.fail(error)
            self.rest()
            raise
        step.note_output(output)

    # ---- the backward pass ----

    def fail(self, error: BaseException | None) -> None:
        """End a failed step; if it was refused, restore the model."""
        if self._note_failure is not None:
            self._note_failure(error)
        if (step := self._step) is not None:
            step.tracker.progress.end()
            if isinstance(error, PerSampleError):
                step.undo_forward()

    def give_up(self, error: PerSampleError) -> None:
        """End a step that was refused. Its uses of weights still add to `grad`, as other uses do from now on."""
        if (step := self._step) is not None:
            step.tracker.progress.give_up()
            if _torch.get_backward_pass() < 0:  # else the gradients of the uses are on their way
                step.close()
        if self.is_inside:  # the modes have to stay: compiled code around the model restores its state of modes
            for hook in self._refusals:
                hook.remove()
        else:
            self._end_refused_step()
        for complain in [self._complain, *(complain for _, complain in self._listeners)]:
            if complain is not None:
                complain(error)

    def _end_refused_step(self) -> None:
        self.retire()
        self.leave()
        if self._step is not None:
            self._step.tracker.end_audit()

    def end_backward(self, link: _Link) -> None:
        """Deliver the gradients of a step whose backward pass has ended."""
        step = self._step
        if step is None or step.link is not link:
            raise_or_complain(_make_error_of_other_step(), self.give_up if self.is_lenient else None)
            return
        grads = step.grads
        if step.is_complete:
            step.tracker.progress.end()
            self.declared.resume()
            self._receive(grads)
            for receive, _ in self._listeners:
                receive(grads)


def find_watch(model: nn.Module) -> Watch | None:
    """What records the steps of a model at present, None if nothing does."""
    found = _WATCHES.get(model)
    watched = None if found is None else found()
    return None if watched is None or watched.is_retired else watched


class _Link:
    """Passes on to a watch what happens in the backward passes of a step, which it identifies. It does not keep it."""

    def __init__(self, watched: Watch) -> None:
        self._watch = ref(watched)
        self._is_lenient = watched.is_lenient

    def end_backward(self) -> None:
        watched = self._watch()
        if watched is not None:
            watched.end_backward(self)
        elif not self._is_lenient:
            raise _make_error_of_other_step()

    def fail(self, error: BaseException) -> None:
        if (watched := self._watch()) is not None:
            watched.fail(error)

    def give_up(self, error: PerSampleError) -> None:
        if (watched := self._watch()) is not None:
            watched.give_up(error)

    def is_pulling_back(self) -> bool:
        """Whether gradients of the current step are being pulled back to the parameters."""
        watched = self._watch()
        step = None if watched is None else watched.find_recording()
        return step is not None and step.collector.is_pulling_back


def _make_error_of_other_step() -> PerSampleError:
    return PerSampleError(
        "A backward pass reached a call of the model that does not belong to the current step: it was made before the "
        "last rest(), or a later call had another batch size. Compute a loss from one batch only."
    )
