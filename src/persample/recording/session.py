"""Shared implementation of `record` and `watch`: the recording of some forward passes and of their backward passes."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.memory import keep_freed_memory
from persample._internal.tree import find_tensors
from persample.errors import Complain, PerSampleError
from persample.forward import Audit, Isolation, TensorMap, Tracker, refuse_mixed_outputs
from persample.recording.options import Options
from persample.recording.samples import SampleFinder
from persample.recording.verifier import Verifier
from persample.recording.wiring import Wiring, make_wiring

# ---- backward passes ----


_SIGNATURES = {func: inspect.signature(func) for func in (Tensor.backward, torch.autograd.backward)}


class BackwardCall:
    """A call of `Tensor.backward` or `torch.autograd.backward`.

    Attributes:
        roots: what the pass starts from.
        given: the other arguments by name.
    """

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self.is_of_tensor = func, func is Tensor.backward
        self.given = dict(_SIGNATURES[func].bind(*args, **kwargs).arguments)
        self.roots = self.given.pop("self" if self.is_of_tensor else "tensors")

    def run(self, **changed: Any) -> None:
        """Run the call, with other values of some arguments."""
        self._func(self.roots, **{**self.given, **changed})

    @property
    def is_for_all(self) -> bool:
        """Whether the pass is for all leaves of the graph."""
        return self.given.get("inputs") is None

    @property
    def is_graph_kept(self) -> bool:
        """Whether the graph is kept for another pass."""
        kept, creates_graph = self.given.get("retain_graph"), self.given.get("create_graph")
        return bool(creates_graph if kept is None else kept)


class BackwardPasses:
    """Runs the backward passes of a recording.

    Args:
        failed: called with the error when a pass has failed.
        has_hooks: hooks of parameters refuse gradients from uses that were not recorded.
    """

    def __init__(
        self, wiring: Wiring, verifier: Verifier, failed: Callable[[BaseException], None], has_hooks: bool
    ) -> None:
        self._tracker, self._collector, self._intake = wiring.tracker, wiring.collector, wiring.intake
        self._delivery, self._verifier, self._failed = wiring.delivery, verifier, failed
        self._unrecorded = nullcontext() if has_hooks else wiring.delivery.unrecorded

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a call of `backward`."""
        call, collector = BackwardCall(func, args, kwargs), self._collector
        inputs = list(find_tensors(call.given.get("inputs")))
        if any(id(t) in collector.parameters for t in inputs):  # which are not in the graph of the loss
            raise PerSampleError(
                "backward(inputs=...) asks for gradients of parameters inside a recording, which keeps them per sample."
                " Call backward() without inputs, and name the parameters that count in record(parameters=[...])."
            )
        is_graph_kept = True  # if the pass fails: the user may try again
        try:
            self._check_gradients(call)
            self._tracker.end_audit()
            for tensor in find_tensors(call.given):  # the gradient of the output, if it is given
                self._tracker.note_outside(tensor)
            progress = self._tracker.progress
            with (
                progress.differentiate(),
                self._delivery.wait(),
                self._unrecorded,
                self._verifier.compare_row(call.roots, inputs),
            ):
                collector.prepare_backward()
                if call.is_of_tensor:
                    self._intake.run_backward(call.run, collector.anchor, collector.factor_bytes)
                else:
                    call.run()
                if call.is_for_all:
                    collector.end_without_tap()
            is_graph_kept = call.is_graph_kept
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            collector.forget_gradients(is_graph_kept)

    def _check_gradients(self, call: BackwardCall) -> None:
        """In private training: check what the code around the model has done, and the gradients that it passes on."""
        if self._tracker.isolation is not None:
            given = call.given.get("gradient", call.given.get("grad_tensors"))
            self._tracker.check_backward(list(find_tensors([call.roots])), list(find_tensors(given)))


# ---- recordings ----


keep_freed_memory()  # a recording allocates again what the one before it has freed


def _do_nothing(*args: Any) -> None:
    pass


def leave_ended_modes() -> None:
    """Leave the modes in this thread whose step has ended. A step that ends in another thread leaves its mode here."""
    for mode in _torch.get_function_modes():
        if isinstance(mode, Tracker) and mode.has_ended:
            _torch.remove_mode(mode)
    for mode in _torch.get_dispatch_modes():
        if isinstance(mode, Audit) and mode.is_stopped:
            _torch.remove_dispatch_mode(mode)


def is_recording() -> bool:
    """Whether a recording, of any model, is under way in this thread."""
    return any(isinstance(mode, Tracker) for mode in _torch.get_function_modes())


def is_paused() -> bool:
    """Whether a recording in this thread runs passes of its own, such as those of a verification."""
    return any(isinstance(mode, Tracker) and mode.progress.is_paused for mode in _torch.get_function_modes())


class Recording:
    """Records the forward passes that it is told of, and the backward passes from their outputs.

    Args:
        model: the model to record.
        options: what to record.
        ended: called when a backward pass has ended.
        failed: called with the error when a backward pass has failed.
        has_hooks: hooks of the caller refuse gradients from uses that were not recorded (`refuse_unrecorded`).
        isolation: what private training refuses besides.
        complain: takes refusals in place of raising them. Then the recording is of no use, but `keep_grad` still adds
            the gradients of all uses to `grad`. Not available under several processes.

    Attributes:
        grads: what is recorded; `intake` is the part that the recording fills.
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
        isolation: Isolation | None = None,
        complain: Complain | None = None,
    ) -> None:
        _refuse_nesting()
        wiring = make_wiring(model, options, ended, has_hooks, isolation, complain)
        self._model, self.processes, self.recorded = wiring.model, wiring.processes, wiring.recorded
        self.intake, self.grads = wiring.intake, wiring.grads
        self.collector, self.tracker = wiring.collector, wiring.tracker
        # Several processes, and `keep_grad`, write into `p.grad` themselves, so they need hooks.
        self.needs_hooks = not wiring.is_alone or options.keep_grad
        self.verifier = Verifier(wiring)
        self.samples = SampleFinder(wiring, self.verifier)
        passes = BackwardPasses(wiring, self.verifier, failed, has_hooks or self.needs_hooks)
        self.tracker.connect(passes.run, self.samples.start_by_use if wiring.is_alone else None)

    # ---- the forward pass ----

    def start_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], declared_size: int | None = None
    ) -> bool:
        """Follow a call that is about to run; see `Samples.start_call`."""
        if not self.samples.start_call(module, args, kwargs, declared_size):
            return False
        model = self._model()
        if self.tracker.isolation is not None and model is not None:
            self.tracker.isolation.start_forward(model)
        self.tracker.progress.enter_model()
        self.verifier.start_call()
        self.tracker.begin_audit()
        return True

    def hide_earlier_data(self) -> None:
        """In private training: the model, which is about to run, must not use data of earlier steps."""
        if self.tracker.isolation is not None:
            with _torch.DisableTorchFunction():
                self.tracker.isolation.hide_data(self.tracker)

    def end_call(self, output: Any) -> None:
        """Note that the call of the model has ended, with None if it has failed, and verify its output."""
        if output is not None:
            self.tracker.check_state()
            if (mixed_use := self.tracker.take_mixed_use()) is not None:
                with _torch.DisableTorchFunction():
                    refuse_mixed_outputs(output, mixed_use, self.tracker)
        if self.tracker.isolation is not None:
            self.tracker.isolation.show_data(self.tracker)
        self.tracker.progress.leave_model()
        self.verifier.end_call(output)

    def add_samples(self, declared: TensorMap[int]) -> None:
        """Declare tensors of the data, with their batch dimensions."""
        with _torch.DisableTorchFunction():
            for tensor, dim in declared.items():
                self.tracker.add_samples(tensor, dim)

    def undo_forward(self) -> None:
        """Restore the model's buffers and the state of the random number generator."""
        self.tracker.restore_buffers()
        torch.set_rng_state(self.verifier.rng_state)

    def close(self) -> None:
        """Break the reference cycles with the tracker and the graph, so that what was recorded is freed at once."""
        if self.tracker.isolation is not None:
            with _torch.DisableTorchFunction():
                self.tracker.isolation.end_step(self.tracker)
        self.tracker.connect(None, None)
        self.samples.close()
        self.verifier.close()
        self.collector.release()


def _refuse_nesting() -> None:
    leave_ended_modes()
    if is_recording():
        gc.collect()  # a dropped model with reference cycles is alive, and so is the step that it was called for
    if is_recording():
        raise PerSampleError(
            "Recordings cannot be nested: leave one block before you enter the next. The step of a watched model "
            "ends with rest(), the step of a model in private training with its optimizer's step()."
        )
