"""The function mode of a recording: which calls of torch functions are followed, and what becomes of refused ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.dynamo import disable_compilation, exclude_from_graph, skip_compilation
from persample._internal.facts import all_with
from persample._internal.functions import find_dropped
from persample._internal.graph import preserve_grads, put_grads_aside
from persample._internal.models import Members, read_model
from persample._internal.tree import find_tensors
from persample.errors import ROWS_ADVICE, PerSampleError
from persample.forward.fastpath import LAYERS, WholeModules
from persample.forward.path import Stage
from persample.forward.repeats import run_call
from persample.forward.unseen import name_parameters
from persample.forward.written import Written
from persample.layouts import SizesRead

if TYPE_CHECKING:
    from persample.forward.tracker import FrontEnd, Tracker


_NOTHING_READ = SizesRead()

_DIFFERENTIATING = all_with("differentiates")

# Functions that need not be followed.
_WITHOUT_TENSORS = all_with("reads_metadata")


class FollowMode(TorchFunctionMode):
    """While it is entered, a tracker follows the calls of torch functions. It does not keep the tracker.

    Args:
        members: the members of the tracker's model, if the caller has just read them.
    """

    def __init__(self, tracker: Tracker, members: Members | None) -> None:
        super().__init__()
        self._tracker = ref(tracker)
        self._depth = 0
        if members is None and tracker.model is not None:
            members = read_model(tracker.model)
        modules = [] if members is None else members.modules
        # References: a mode must not keep the model.
        self._hooked = [*map(ref, _torch.find_modules_with_backward_hooks(modules))]
        self._layers = [ref(module) for module in modules if isinstance(module, LAYERS)]
        self._whole_modules: WholeModules | None = None
        self._sizes_read = SizesRead()  # right before the next call, by the code around the model

    @property
    def has_ended(self) -> bool:
        """Whether nothing is followed any more."""
        tracker = self._tracker()
        return tracker is None or tracker.has_ended

    @property
    def is_paused(self) -> bool:
        """Whether passes run that are not part of the recording."""
        tracker = self._tracker()
        return tracker is not None and tracker.progress.is_paused

    # ---- entering and leaving ----

    def start(self) -> None:
        """Prepare the model and torch for a recording."""
        if self._depth == 0:
            self._uncompiled = disable_compilation()
            self._uncompiled.__enter__()
            if self._layers and (tracker := self._tracker()) is not None:
                layers = [layer for reference in self._layers if (layer := reference()) is not None]
                self._whole_modules = WholeModules(tracker, layers)
        self._depth += 1

    def stop(self) -> None:
        """Undo `start`."""
        self._depth -= 1
        if self._depth == 0:
            if (tracker := self._tracker()) is not None:
                tracker.end_audit()
            if self._whole_modules is not None:
                self._whole_modules.remove()
                self._whole_modules = None
            self._uncompiled.__exit__(None, None, None)

    def __enter__(self) -> Any:
        self.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.stop()

    def find_hooked_modules(self) -> list[nn.Module]:
        """The modules of the model that have hooks on gradients."""
        return [module for reference in self._hooked if (module := reference()) is not None]

    # ---- each op ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        tracker = self._tracker()
        if tracker is None:
            return func(*args, **kwargs, **find_dropped(func))
        if tracker.progress.is_in_model and tracker.detectors.outer is None:  # the hot path
            if func in _WITHOUT_TENSORS:
                return func(*args, **kwargs)
            if tracker.collector.receiver.complain is None and func not in _DIFFERENTIATING:
                tracker.counted.read_last, self._sizes_read = self._sizes_read, _NOTHING_READ
                return run_call(func, args, kwargs, tracker)
        return self._run(func, args, kwargs, tracker)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker) -> Any:
        """Run a call of which more may have to be noted than where the samples lie in its result."""
        progress = tracker.progress
        if func in _WITHOUT_TENSORS:
            result = func(*args, **kwargs)
            if not progress.is_in_model and tracker.outside is not None:
                self._sizes_read = tracker.outside.note_size(func, args, result, tracker.known)
            if tracker.detectors.outer is not None and not progress.has_ended:
                return tracker.detectors.outer.read_attribute(func, args, result, tracker)
            return result
        tracker.counted.read_last, self._sizes_read = self._sizes_read, _NOTHING_READ
        if not progress.is_following:
            if func is torch.autograd.grad and tracker.complain is not None and not progress.is_paused:
                return _run_autograd_grad(args, kwargs, tracker)
            return func(*args, **kwargs, **find_dropped(func))
        is_loss_code = progress.stage not in (Stage.INSIDE, Stage.BACKWARD)
        outer = tracker.detectors.outer
        try:
            if outer is None or not is_loss_code or func in _DIFFERENTIATING:
                if tracker.collector.receiver.complain is None and func not in _DIFFERENTIATING:
                    return run_call(func, args, kwargs, tracker)
                return _run_or_give_up(func, args, kwargs, tracker)
            return outer.run_outside(func, args, kwargs, tracker, _run_or_give_up)
        except Exception as error:
            if outer is not None:
                outer.note_error(error, func, args, kwargs, tracker)
            raise


def _run_or_give_up(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker) -> Any:
    """Run a call. If it is refused, and a monitor takes refusals, give up the recording."""
    before = None if tracker.complain is None else Written(func, args, kwargs)
    try:
        if func in _DIFFERENTIATING:
            if func is torch.autograd.grad:
                return _run_autograd_grad(args, kwargs, tracker)
            if tracker.front is not None:
                return tracker.front.run_backward(func, args, kwargs)
        return run_call(func, args, kwargs, tracker)
    except PerSampleError as error:
        if before is None:
            raise
        return _give_up(error, before, func, args, kwargs, tracker)


def _give_up(
    error: PerSampleError,
    before: Written,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
) -> Any:
    """Give up the recording because of a call that was refused; the call gets its ordinary result."""
    assert tracker.complain is not None
    tracker.complain(error)
    if func in _DIFFERENTIATING:  # the weights are not in the graph, and another run would not find them
        raise error
    if before.has_changed():  # it has run, and must not run again
        if any(map(tracker.is_weight, find_tensors((args[1:], kwargs)))):  # with its weights detached
            raise error
        return None if func is Tensor.__setitem__ else before.tensor
    before.restore_statistics()
    return func(*args, **kwargs, **find_dropped(func))


def _run_autograd_grad(args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker) -> Any:
    """`autograd.grad` of something else than parameters; it leaves no per-sample gradients."""
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    collector = tracker.collector
    if any(id(t) in collector.parameters for t in find_tensors(inputs)):
        if tracker.complain is not None:
            front = None if tracker.has_ended else tracker.front
            found = _compute_parameter_gradients(front, collector.parameters, args, kwargs)
            if found is not None:
                return found
        raise _make_refusal(name_parameters(inputs, tracker), args, kwargs)
    collector.retained.read_after_hooks(find_tensors(inputs))
    if tracker.has_ended:
        return torch.autograd.grad(*args, **kwargs)
    try:
        result = run_call(torch.autograd.grad, args, kwargs, tracker)
        if args[4] if len(args) > 4 else kwargs.get("create_graph"):
            collector.retained.refuse_second_derivatives(collector)
        return result
    finally:
        collector.retained.forget_gradients(is_graph_kept=True)


# ---- `autograd.grad` for parameters, whose weights are not in the graph of the loss ----


_SIGNATURE = inspect.signature(torch.autograd.grad)


def _make_refusal(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerSampleError:
    """The error for a call of `autograd.grad` that asks for these parameters inside a block."""
    options = _SIGNATURE.bind(*args, **kwargs).arguments
    others = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    message = (
        f"torch.autograd.grad asks for the gradient of '{names[0]}'{others} inside a recording, which keeps gradients "
        "of parameters per sample. Call backward() on the outputs instead: afterwards grads.sum(), or grads.mean() for "
        "a mean loss, has the same gradients by name, and grads.dense() has their rows. keep_grad=True also adds them "
        "to p.grad. Gradients of other tensors, such as the model's inputs, may be asked for in a call of their own."
    )
    if options.get("create_graph"):
        message += f" For gradients of these gradients (create_graph=True): {ROWS_ADVICE}"
    return PerSampleError(message)


def _compute_parameter_gradients(
    front: FrontEnd | None,
    parameters: Mapping[int, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor | None, ...] | None:
    """The result of `autograd.grad` for parameters, from what a backward pass with `keep_grad` adds to their `grad`.

    None, without running anything, if that is not possible: with `create_graph` or `is_grads_batched`, or if some
    inputs are other tensors.
    """
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    inputs = list(find_tensors(options["inputs"]))
    if options["create_graph"] or options["is_grads_batched"] or isinstance(options["inputs"], dict):
        return None
    if not all(id(t) in parameters for t in inputs):
        return None
    with ExitStack() as stack:
        for output in find_tensors(options["outputs"]):
            stack.enter_context(preserve_grads(output))
        stack.enter_context(put_grads_aside(parameters.values()))
        start = options["outputs"], options["grad_outputs"], options["retain_graph"]
        if front is None:
            torch.autograd.backward(*start)
        else:
            front.run_backward(torch.autograd.backward, start, {})
        with _torch.DisableTorchFunction():
            found = [t.grad for t in inputs]
    if options["materialize_grads"]:
        return tuple(torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True))
    if not options["allow_unused"] and any(grad is None for grad in found):
        raise RuntimeError("A tensor that autograd.grad is asked for was not used. Pass allow_unused=True.")
    return tuple(found)
