"""`record`, and the recording of some forward passes and of their backward passes that it shares with `watch`."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.graph import find_nodes
from persample._internal.memory import keep_freed_memory
from persample._internal.models import Members, combine_models, read_model
from persample._internal.options import make_options, show_options
from persample._internal.tree import find_tensors
from persample.errors import Complain, PerSampleError
from persample.forward import Audit, FollowMode, refuse_mixed_outputs
from persample.gradients import LossGradients, PerSampleGradients, StreamedClip, StreamedNorms
from persample.layouts import Call
from persample.recording.hooks import Calls, refuse_scripted, refuse_unrecorded
from persample.recording.options import ClipOptions, CommonOptions, Model, Options, RecordOptions
from persample.recording.samples import SampleFinder
from persample.recording.verifier import Verifier
from persample.recording.wiring import make_wiring

# ---- backward passes ----


_NAMES = {func: [*inspect.signature(func).parameters] for func in (Tensor.backward, torch.autograd.backward)}


class BackwardCall:
    """A call of `Tensor.backward` or `torch.autograd.backward`.

    Attributes:
        roots: what the pass starts from.
        given: the other arguments by name.
    """

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self.is_of_tensor = func, func is Tensor.backward
        self.given = {**dict(zip(_NAMES[func], args, strict=False)), **kwargs}
        self.roots = self.given.pop("self" if self.is_of_tensor else "tensors")

    def run(self, **changed: Any) -> None:
        """Run the call, with other values of some arguments."""
        self._func(self.roots, **{**self.given, **changed})

    def take_roots(self, is_taken: Callable[[Tensor], bool]) -> list[tuple[Tensor, Tensor | None]]:
        """Remove some roots; returns them, each with the gradient that is given for it."""
        name = "gradient" if self.is_of_tensor else "grad_tensors"
        roots, given = _make_list(self.roots), _make_list(self.given.get(name))
        pairs = list(zip(roots, given or [None] * len(roots), strict=True))
        taken = {id(root) for root in roots if isinstance(root, Tensor) and is_taken(root)}
        if taken:
            self.roots = [root for root in roots if id(root) not in taken]
            self.given[name] = [grad for root, grad in pairs if id(root) not in taken] if given else None
        return [pair for pair in pairs if id(pair[0]) in taken]

    def list_starts(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that the pass starts from, and the gradients of them that are given."""
        given = self.given.get("gradient", self.given.get("grad_tensors"))
        return list(find_tensors([self.roots])), list(find_tensors(given))

    @property
    def is_graph_kept(self) -> bool:
        """Whether the graph is kept for another pass."""
        kept, creates_graph = self.given.get("retain_graph"), self.given.get("create_graph")
        return bool(creates_graph if kept is None else kept)


def _make_list(given: Any) -> list[Any]:
    return [] if given is None else [given] if isinstance(given, Tensor) else [*given]


# ---- recordings ----


_MADE_BY_CALL = "persample: made by a call of a module"

keep_freed_memory()  # a recording allocates again what the one before it has freed


def _do_nothing(*args: Any) -> None:
    pass


def leave_ended_modes() -> None:
    """Leave the modes in this thread whose step has ended. A step that ends in another thread leaves its mode here."""
    for mode in _torch.get_function_modes():
        if isinstance(mode, FollowMode) and mode.has_ended:
            _torch.remove_mode(mode)
    for mode in _torch.get_dispatch_modes():
        if isinstance(mode, Audit) and mode.is_stopped:
            _torch.remove_dispatch_mode(mode)


def is_recording() -> bool:
    """Whether a recording, of any model, is under way in this thread."""
    return any(isinstance(mode, FollowMode) for mode in _torch.get_function_modes())


def is_paused() -> bool:
    """Whether a recording in this thread runs passes of its own, such as those of a verification."""
    return any(isinstance(mode, FollowMode) and mode.is_paused for mode in _torch.get_function_modes())


class Recording:
    """Records the forward passes that it is told of, and the backward passes from their outputs.

    Args:
        model: the model to record.
        options: what to record.
        ended: called when a backward pass has ended.
        failed: called with the error when a backward pass has failed.
        has_hooks: hooks of the caller refuse gradients from uses that were not recorded (`refuse_unrecorded`).
        complain: takes refusals in place of raising them. Then the recording is of no use, but `keep_grad` still adds
            the gradients of all uses to `grad`. Not available under several processes.
        members: the members of the model, if the caller has just read them.

    Attributes:
        grads: what is recorded.
        recorded: the recorded parameters by name.
        needs_hooks: whether the caller must refuse gradients from uses that were not recorded by hooks.
        samples: which samples the calls have.
        verifier: verifies the calls.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        ended: Callable[[], None] = _do_nothing,
        failed: Callable[[BaseException], None] = _do_nothing,
        has_hooks: bool = False,
        complain: Complain | None = None,
        members: Members | None = None,
    ) -> None:
        _refuse_nesting()
        wiring = make_wiring(model, options, ended, has_hooks, complain, members or read_model(model))
        self._model, self.processes, self.grads = wiring.model, wiring.processes, wiring.grads
        self.recorded = wiring.batch.parameters
        self.collector, self.tracker = wiring.collector, wiring.tracker
        # Several processes, and `keep_grad`, write into `p.grad` themselves, so they need hooks.
        self.needs_hooks = not wiring.is_alone or options.keep_grad
        self.verifier = Verifier(wiring)
        self.samples = SampleFinder(wiring, self.verifier)
        self._is_alone, self._delivery, self._failed = wiring.is_alone, wiring.delivery, failed
        self._unrecorded = nullcontext() if has_hooks or self.needs_hooks else wiring.delivery.unrecorded
        self.tracker.connect(self)

    # ---- the forward pass ----

    def start_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], declared_size: int | None = None
    ) -> bool:
        """Follow a call that is about to run; see `Samples.start_call`."""
        if not self.samples.start_call(module, args, kwargs, declared_size):
            return False
        self.tracker.progress.enter_model()
        self.verifier.start_call()
        self.tracker.begin_audit()
        return True

    def start_by_use(self, call: Call) -> bool:
        return self._is_alone and self.samples.start_by_use(call)

    def end_call(self, output: Any) -> None:
        """Note that the call of the model has ended, with None if it has failed, and verify its output."""
        for made in filter(self.tracker.is_weight, find_tensors([output])):
            if (node := _torch.find_node(made)) is not None:
                node.metadata[_MADE_BY_CALL] = True
        for ask in self.tracker.detectors.end_call:
            ask(output is None, self.tracker)
        if output is not None and (mixed_use := self.tracker.path.take_mixed_use()) is not None:
            with _torch.DisableTorchFunction():
                refuse_mixed_outputs(output, mixed_use, self.tracker)
        self.tracker.progress.leave_model()
        self.verifier.end_call(output)

    def prepare_processes(self, keep_grad: bool) -> AbstractContextManager[Any]:
        """Context manager for the recording: torch must not wait for gradients of parameters, which do not arrive."""
        return self.processes.prepare_recording(self.tracker, self.collector.anchor if keep_grad else None)

    # ---- backward passes ----

    def run_backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, collector = BackwardCall(func, args, kwargs), self.collector
        inputs = list(find_tensors(call.given.get("inputs")))
        if any(id(t) in collector.parameters for t in inputs):  # which are not in the graph of the loss
            raise PerSampleError(
                "backward(inputs=...) asks for gradients of parameters inside a recording, which keeps them per sample."
                " Call backward() without inputs, and name the parameters that count in record(parameters=[...])."
            )
        self._delivery.drop_zeroed()
        if self._differentiate_penalties(call):
            return
        collector.retained.read_after_hooks(inputs)
        is_graph_kept = True  # if the pass fails: the user may try again
        try:
            for ask in self.tracker.detectors.before_backward:
                ask(*call.list_starts(), self.tracker)
            self.tracker.end_audit()
            for tensor in find_tensors(call.given):  # the gradient of the output, if it is given
                collector.receiver.note_outside(tensor)
            with (
                self.tracker.progress.differentiate(self.samples.can_have_others and not inputs),
                self._delivery.wait(),
                self._unrecorded,
                self.verifier.compare_row(call.roots, inputs),
            ):
                collector.prepare_backward()
                if call.is_of_tensor:
                    self._delivery.run_backward(call.run, collector.anchor, collector.uses.factor_bytes)
                else:
                    call.run()
                if call.given.get("inputs") is None:  # for all leaves of the graph
                    collector.end_without_tap()
            is_graph_kept = call.is_graph_kept
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            collector.retained.forget_gradients(is_graph_kept)

    def _differentiate_penalties(self, call: BackwardCall) -> bool:
        """Keep the gradients of roots that were computed from weights alone; returns whether there are no others.

        What a call of a module has made is no penalty: its input may be samples.
        """

        def is_penalty(root: Tensor) -> bool:
            return self.tracker.is_weight(root) and not any(_MADE_BY_CALL in node.metadata for node in find_nodes(root))

        is_plain = call.given.get("inputs") is None and not call.given.get("create_graph")
        if not (is_plain and self._is_alone and self.tracker.counted.holds_divisors):
            return False
        penalties = call.take_roots(is_penalty)
        with self.collector.pull_back(), _torch.DisableTorchFunction():
            for root, grad in penalties:
                self.collector.deliver_shared(root, torch.ones_like(root) if grad is None else grad)
        return bool(penalties) and not call.roots

    def undo_forward(self) -> None:
        """Restore the model's buffers and the state of the random number generator."""
        self.tracker.restore_buffers()
        torch.set_rng_state(self.verifier.rng_state)

    @property
    def is_complete(self) -> bool:
        """Whether a backward pass that has ended was the last one."""
        return self._delivery.is_complete

    def close(self) -> None:
        """Break the reference cycles with the tracker and the graph, so that what was recorded is freed at once."""
        for ask in self.tracker.detectors.end:
            ask(self.tracker)
        self.tracker.connect(None)
        self.samples.close()
        self.verifier.close()
        self.collector.retained.release(self.collector)


def _refuse_nesting() -> None:
    leave_ended_modes()
    if not is_recording():
        return
    gc.collect()  # a dropped model with reference cycles is alive, and so is the step that it was called for
    if is_recording():
        raise PerSampleError(
            "Recordings cannot be nested: leave one block before you enter the next. The step of a watched model "
            "ends with rest(), the step of a model in private training with its optimizer's step()."
        )


# ---- the block ----


@overload
def record(
    model: Model,
    *,
    keep: Literal["everything"] = "everything",
    losses: None = None,
    positions: int | None = None,
    **options: Unpack[CommonOptions],
) -> AbstractContextManager[PerSampleGradients]: ...


@overload
def record(
    model: Model,
    *,
    keep: Literal["everything"] = "everything",
    losses: Sequence[str],
    positions: int | None = None,
    **options: Unpack[CommonOptions],
) -> AbstractContextManager[LossGradients]: ...


@overload
def record(
    model: Model, *, keep: Literal["norms"], **options: Unpack[CommonOptions]
) -> AbstractContextManager[StreamedNorms]: ...


@overload
def record(
    model: Model, *, keep: Literal["clip"], max_norm: float | Mapping[str, float], **options: Unpack[ClipOptions]
) -> AbstractContextManager[StreamedClip]: ...


@exclude_from_graph
@show_options(Options, RecordOptions)
def record(model: Model, **options: Any) -> AbstractContextManager[Any]:
    """Record per-sample gradients: call the model inside the block as usual, and `backward()` there or later.

    Everything inside the block that uses the parameters is recorded: calls of the model and of its submodules, methods
    such as `model.encode(x)`, and functions of the parameters themselves.

    Row n of the recorded gradients is the gradient of sample n's own loss. Several forward and backward passes in one
    block add up, as they do in `p.grad`; another batch after a backward pass has rows of its own.

    Under DistributedDataParallel and FSDP2 the rows are those of this process's samples. Sums over samples are over all
    processes, which all have to ask for them.

    Args:
        model: the model; it stays as it is. Or several models, as a list or a dict: the names of their parameters then
            begin with the model's number or name, as in "0.weight" and "actor.weight".
        **options: see `Options`.

    Raises:
        PerSampleError: an option is wrong, or the model cannot be recorded; the message names the place.
        SamplesMixed: samples of the batch were combined, so that no sample has a gradient of its own; or the output of
            a sample alone differs from its output in the batch.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> with record(model) as grads:
    ...     nn.functional.cross_entropy(model(x), y).backward()
    >>> grads.norms().shape, grads.clip(1.0)["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))
    """
    return _record(model, make_options(Options, "record", options, RecordOptions))


@exclude_from_graph
@contextmanager
@skip_compilation(with_callees=False)
def _record(model: Model, options: Options) -> Iterator[Any]:
    model = combine_models(model)
    refuse_scripted(model)
    members = read_model(model)
    recording = Recording(model, options, members=members)

    collector, recorded = recording.collector, recording.recorded
    calls = _BlockCalls(recording)
    calls.add_hooks(model, {*map(id, recorded.values())}, members)
    refusals = []
    if recording.needs_hooks:
        refusals = refuse_unrecorded(recorded, recording.processes, lambda: collector.is_pulling_back)
    try:
        with recording.prepare_processes(options.keep_grad), recording.tracker.mode:
            yield recording.grads
    except PerSampleError:
        recording.undo_forward()
        raise
    finally:
        recording.close()
        calls.remove_hooks()
        for refusal in refusals:
            refusal.remove()


class _BlockCalls(Calls):
    """The calls inside a block."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def start_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._recording.start_call(module, args, kwargs)

    def end_call(self, output: Any) -> None:
        self._recording.end_call(output)

    def interrupt_call(self) -> None:
        self._recording.end_call(None)

    def find_recording(self) -> Recording:
        return self._recording
