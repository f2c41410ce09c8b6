"""What `record` and `watch` have in common: the recording of some forward passes, and of the backward passes behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample.backward.collector import Collector
from persample.batches import Inputs
from persample.distributed import Processes, processes_of
from persample.errors import PerSampleError
from persample.expanded_weights.delivery import legacy_use
from persample.forward.tracker import Tracker
from persample.gradients.matrix import PerSampleGradients
from persample.gradients.streamed import StreamedClip, StreamedNorms, backward_twice
from persample.recording.options import Options, chosen, trainable_of
from persample.terms import Term, add_terms


class Recording:
    """The gradients of the forward passes that it is told of; `ended()` is called when a backward pass has ended."""

    def __init__(self, model: nn.Module, options: Options, ended: Callable[[], None] = lambda: None) -> None:
        if not isinstance(model, nn.Module):
            raise PerSampleError(f"Per-sample gradients are those of an nn.Module, got {type(model).__name__}")
        if any(isinstance(mode, Tracker) and not mode.rests for mode in _torch.get_function_modes()):
            raise PerSampleError(
                "Recordings cannot be nested: leave the one block before the next. The step of a model that is watched "
                "ends with rest(), that of one that is trained privately with its optimizer's step()."
            )
        trainable = trainable_of(model)
        self.model, self.options = model, options
        self.over = processes_of(model)
        self.recorded = chosen(trainable, options.parameters)
        self.grads = grads = self._gradients()

        def finished() -> None:
            grads.finish()
            ended()

        used = map(self.over.used, trainable.values())
        deliver = partial(_deliver, grads, self.over, options.keep_grad)
        self.collector = Collector(used, deliver, finished, early=options.keep != "everything")
        self.tracker = Tracker(0, self.collector, model, legacy_use(options.loss_reduction))
        self.tracker.over = self.over
        self.tracker.inside = False
        self.tracker.on_backward = self._backward
        self._rng_state = torch.get_rng_state()

    def _gradients(self) -> PerSampleGradients:
        options = self.options
        if options.max_norm is not None:
            return StreamedClip(self.recorded, options, self.over)
        if options.keep == "norms":
            return StreamedNorms(self.recorded, options.loss_reduction, self.over)
        return PerSampleGradients(self.recorded, options.loss_reduction, self.over)

    # ---- the forward pass ----

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tells the tracker where the samples lie in the arguments of a call of the model."""
        with _torch.DisableTorchFunction():
            self.over.forward_starts()
            inputs = self._inputs(args, kwargs)
            inputs.check_dims()
            self.tracker.batch = self.grads.start(self._batch_of(inputs))
            inputs.tell(self.tracker, told=self.options.batch_size is not None)
        self.tracker.inside = True

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples in the arguments of a call of the model."""
        with _torch.DisableTorchFunction():
            return self._batch_of(self._inputs(args, kwargs))

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return Inputs(self.over.called(self.model).forward, args, kwargs, self.options.batch_dim)

    def _batch_of(self, inputs: Inputs) -> int:
        given = self.options.batch_size
        return inputs.batch_size("record") if given is None else given

    def after_forward(self) -> None:
        """Says that the call has ended."""
        self.tracker.inside = False

    def undo(self) -> None:
        """Gives the model's buffers, and the random numbers, the state that they had before."""
        self.tracker.restore()
        torch.set_rng_state(self._rng_state)

    # ---- the backward pass ----

    def _backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.grads, StreamedClip) and self.grads.choose(self.collector.factor_bytes) == 2:
            return backward_twice(self.tracker.anchor, func, args, kwargs)
        return func(*args, **kwargs)

    def forget(self) -> None:
        """Lets go of what knows the tracker, and with it all that was recorded."""
        self.tracker.on_backward = None


def _deliver(
    grads: PerSampleGradients, over: Processes, keep_grad: bool, parameter: Tensor, terms: Sequence[Term]
) -> None:
    """Gives what was found for a parameter to the gradients; a function, for the collector must not know its owner."""
    term = add_terms(terms)
    grads.receive(parameter, term)
    if keep_grad and not (isinstance(grads, StreamedClip) and grads.first_of_two):
        total = term.sum(torch.ones(grads.batch_size, device=parameter.device)).to(parameter.dtype)
        over.add_to_grad(parameter, total)


def refuse_unrecorded(
    recorded: Mapping[str, Tensor], over: Processes, pulls_back: Callable[[], bool]
) -> list[RemovableHandle]:
    """Hooks that refuse ordinary gradients of parameters: they come by a way that was not recorded.

    While a recording pulls gradients back to its parameters, these are its own.
    """

    def refusal(name: str) -> Callable[[Tensor | None], None]:
        def refuse(grad: Tensor | None) -> None:
            if grad is not None and not pulls_back():
                raise PerSampleError(
                    f"'{name}' receives a gradient from a use that was not recorded: a submodule or forward() called "
                    "directly, a penalty on the weights, or a use inside of torch.func.vmap. Call the model itself, "
                    "and keep penalties out of the block."
                )

        return refuse

    hooks = []
    for name, p in recorded.items():
        forms = {id(form): form for form in (p, over.used(p))}
        hooks += [form.register_hook(refusal(name)) for form in forms.values()]
    return hooks
