"""The backward passes of a recording: what a call of `backward` asks for, and what happens around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from persample._internal.tree import find_tensors
from persample.errors import PerSampleError
from persample.recording.verifier import Verifier
from persample.recording.wiring import Wiring

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
        self._tracker, self._collector, self._grads = wiring.tracker, wiring.collector, wiring.grads
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
                    self._grads.run_backward(call.run, collector.anchor, collector.factor_bytes)
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
