"""Shared implementation of `record` and `watch`: the recording of some forward passes and of their backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample.backward.collector import Collector
from persample.batches import Arguments
from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.forward.tracker import Tracker
from persample.gradients import PerSampleGradients, StreamedClip, StreamedNorms
from persample.gradients.streamed import run_backward_twice
from persample.recording.options import Options, get_trainable
from persample.terms import Term, add_terms

Gradients = PerSampleGradients | StreamedNorms | StreamedClip


def _do_nothing(*args: Any) -> None:
    pass


class Recording:
    """Records the forward passes that it is told of, and the backward passes from their outputs.

    Args:
        model: the model to record.
        options: what to record.
        ended: called when a backward pass has ended.
        failed: called with the error when a backward pass has failed.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        ended: Callable[[], None] = _do_nothing,
        failed: Callable[[BaseException], None] = _do_nothing,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PerSampleError(f"Only an nn.Module can be recorded, got {type(model).__name__}.")
        if any(isinstance(mode, Tracker) and not mode.is_resting for mode in _torch.get_function_modes()):
            raise PerSampleError(
                "Recordings cannot be nested: leave one block before you enter the next. The step of a watched model "
                "ends with rest(), the step of a model in private training with its optimizer's step()."
            )
        self.model, self.options = model, options
        self.processes = find_processes(model)
        self.recorded = options.select(model)
        self.grads = grads = self._make_gradients()
        self._failed = failed

        def finish() -> None:
            grads.finish()
            ended()

        used = map(self.processes.get_used, get_trainable(model).values())
        deliver = partial(_deliver, grads, self.processes, options.keep_grad)
        self.collector = Collector(used, deliver, finish, early=options.keep != "everything")
        self.tracker = Tracker(
            self.collector,
            model,
            loss_reduction=options.loss_reduction,
            processes=self.processes,
            run_backward=self._run_backward,
        )
        self._rng_state = torch.get_rng_state()

    def _make_gradients(self) -> Gradients:
        options = self.options
        common = (self.recorded, options.loss_reduction, self.processes)
        if options.bound is not None:
            return StreamedClip(*common, options.bound)
        return StreamedNorms(*common) if options.keep == "norms" else PerSampleGradients(*common)

    # ---- the forward pass ----

    def start_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the tracker where the samples lie in the arguments of a call of the model that is about to run."""
        with _torch.DisableTorchFunction():
            self.processes.start_forward()
            arguments = self._make_arguments(args, kwargs)
            arguments.check_batch_dim()
            self.tracker.batch = self.grads.start(self._find_batch_size(arguments))
            arguments.add_to(self.tracker, search=self.options.batch_size is not None)
        self.tracker.is_inside = True

    def end_forward(self) -> None:
        """Note that the call of the model has ended."""
        self.tracker.is_inside = False

    def find_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples in the arguments of a call of the model."""
        with _torch.DisableTorchFunction():
            return self._find_batch_size(self._make_arguments(args, kwargs))

    def _make_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return Arguments(self.processes.get_called_module(self.model).forward, args, kwargs, self.options.batch_dim)

    def _find_batch_size(self, arguments: Arguments) -> int:
        given = self.options.batch_size
        return arguments.find_batch_size() if given is None else given

    def undo_forward(self) -> None:
        """Restore the model's buffers and the state of the random number generator."""
        self.tracker.restore_buffers()
        torch.set_rng_state(self._rng_state)

    # ---- the backward pass ----

    def _run_backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if isinstance(self.grads, StreamedClip) and self.grads.choose_passes(self.collector.factor_bytes) == 2:
                return run_backward_twice(self.tracker.anchor, func, args, kwargs)
            return func(*args, **kwargs)
        except BaseException as error:
            self._failed(error)
            raise

    def close(self) -> None:
        """Break the reference cycle with the tracker, so that what was recorded is freed at once."""
        self.tracker.run_backward = None


def _deliver(grads: Gradients, processes: Processes, keep_grad: bool, parameter: Tensor, terms: Sequence[Term]) -> None:
    """Pass what was found for a parameter to the gradients. The collector must not refer to the recording itself."""
    term = add_terms(terms)
    grads.receive(parameter, term)
    if keep_grad and not (isinstance(grads, StreamedClip) and grads.is_first_of_two):
        total = term.sum(torch.ones(grads.batch_size, device=parameter.device)).to(parameter.dtype)
        processes.add_to_grad(parameter, total)


def refuse_unrecorded(
    recorded: Mapping[str, Tensor], processes: Processes, is_pulling_back: Callable[[], bool]
) -> list[RemovableHandle]:
    """Hooks that refuse ordinary gradients of parameters: they come from a use that was not recorded.

    While a recording pulls gradients back to its parameters, such gradients are the recording's own.
    """

    def make_hook(name: str) -> Callable[[Tensor | None], None]:
        def refuse(grad: Tensor | None) -> None:
            if grad is not None and not is_pulling_back():
                raise PerSampleError(
                    f"'{name}' receives a gradient from a use that was not recorded: a submodule or forward() called "
                    "directly, a penalty on the weights, or a use inside torch.func.vmap. Call the model itself, and "
                    "keep penalties out of the block."
                )

        return refuse

    hooks = []
    for name, p in recorded.items():
        tensors = {id(tensor): tensor for tensor in (p, processes.get_used(p))}
        hooks += [tensor.register_hook(make_hook(name)) for tensor in tensors.values()]
    return hooks
