"""What the values of a step are computed from: the gradient of the validation loss, and the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample import _torch
from persample._internal.text import describe_value
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients
from persample.monitoring.inner_products import add_rows, make_dense_if_cheap, multiply_with_sum
from persample.monitoring.optimizers import Map, Update
from persample.recording import get_trainable
from persample.terms import Term

# Computes the loss of a validation batch, a scalar, with the model that it is given.
Validation = Callable[[Any], Tensor]


class Valuation:
    """Values the rows of a step: by parameter when the terms arrive, or all at the end of the backward pass.

    Args:
        validation: as in `value`.
        update: what the optimizers do with a gradient.
        order: as in `value`.
        refresh: as in `value`.

    Attributes:
        held_out: how many of the last samples of each batch are of validation.
        gradient: of the validation loss; None if the samples of validation are part of the batch.
        age: the number of measured steps that have used the gradient.
    """

    def __init__(self, validation: Validation | int, update: Update, order: int, refresh: int) -> None:
        self.held_out = validation if isinstance(validation, int) else 0
        self._validation, self.update, self._order, self._refresh = validation, update, order, refresh
        self.gradient: ValidationGradient | None = None
        self.age = 0
        self._parameters: dict[str, Tensor] = {}
        self._map: Map = update.find_maps()
        self._failure: PerSampleError | None = None  # of the validation of this step

    def start_step(self, model: nn.Module) -> None:
        """Compute the gradient of the validation loss, before anything of the step is recorded."""
        self._read(model)
        self._failure = None
        try:
            if not self.held_out:
                self._find_gradient(model, Processes())
        except PerSampleError as error:
            self._failure = error

    def reduce(self, name: str, term: Term) -> tuple[Tensor, Tensor]:
        """A parameter's part of the values, and the sum of its rows without those of validation."""
        if self._failure is not None:
            raise self._failure
        p, count = self._parameters[name], term.batch - self.held_out
        if count < 0:
            raise PerSampleError(
                f"The batch has {term.batch} examples, of which {self.held_out} should be of validation."
            )
        rows = make_dense_if_cheap(term.some(0, count) if self.held_out else term)
        total = add_rows(rows)
        if self.gradient is not None:
            direction = self.gradient.parts[name]
        else:
            held_out = term.some(count, term.batch)
            if not self.update.needs_grads:  # M is a factor
                return self._map(p, multiply_with_sum(rows, held_out), total), total
            direction = add_rows(held_out)
        so_far = total if p.grad is None else p.grad + total
        return rows.dot(self._map(p, direction, so_far)), total

    def compute(self, model: nn.Module, grads: PerSampleGradients, names: Sequence[str]) -> Tensor:
        """`(batch,)`: the values of the rows, from all terms."""
        self._read(model)
        parameters = {name: self._parameters[name] for name in names}
        gradient, count = self._find_gradient(model, grads.processes), _count_mean(grads)
        is_alone = type(grads.processes) is Processes
        of_step: dict[str, Tensor] = {}
        if self._order == 2 or (self.update.needs_grads and not is_alone):
            of_step = {name: total / count for name, total in grads.sum().items()}
        # Several processes add up `p.grad` later.
        so_far = {name: p.grad for name, p in parameters.items() if p.grad is not None} if is_alone else of_step

        def map_all(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: self._map(p, directions[name], so_far.get(name, directions[name]))
                for name, p in parameters.items()
            }

        found = gradient.parts
        if self._order == 2:
            curved = gradient.multiply_hessian(map_all(of_step))
            found = {name: part - curved[name] / 2 for name, part in found.items()}
        return grads.dot(map_all(found)) / count

    def _read(self, model: nn.Module) -> None:
        self._parameters, self._map = get_trainable(model), self.update.find_maps()

    def _find_gradient(self, model: nn.Module, processes: Processes) -> ValidationGradient:
        """The gradient of the validation loss, which serves `refresh` steps."""
        if self.gradient is None or self.age >= self._refresh:
            self.gradient, self.age = None, 0
            self.gradient = ValidationGradient(model, self._validation, self._parameters, processes, self._order)
        self.age += 1
        return self.gradient


class ValidationGradient:
    """The loss of a validation batch and its gradient, averaged over the processes.

    Args:
        model: the model that is trained.
        validation: computes the loss.
        parameters: the parameters by name.
        processes: those that train the model.
        order: 2 if `multiply_hessian` is called later.
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Any,
        parameters: dict[str, Tensor],
        processes: Processes,
        order: int = 1,
    ) -> None:
        self._parameters, self._processes = parameters, processes
        called = processes.get_called_module(model)
        # Kernels of attention other than the plain one have no second derivatives.
        device = next((p.device.type for p in parameters.values()), "cpu")
        backends = [SDPBackend.MATH] if order == 2 else list(SDPBackend.__members__.values())
        with _evaluating(called), _plain(device), sdpa_kernel(backends):
            loss = validation(called)
            if not isinstance(loss, Tensor) or loss.dim():
                raise PerSampleError(f"validation must return a loss without dimensions, got {describe_value(loss)}.")
            self._own = self._differentiate([loss], None, create_graph=order == 2)
        self.loss = float(loss.detach())
        self.parts = self._average(self._own)

    def multiply_hessian(self, direction: dict[str, Tensor]) -> dict[str, Tensor]:
        """`{name: H d}`; it may be called once."""
        used = [(own, direction[name]) for name, own in self._own.items() if own.requires_grad]
        if not used:  # the loss is linear
            return {name: torch.zeros_like(own) for name, own in self._own.items()}
        with _torch.DisableTorchFunction():
            parts, directions = zip(*used, strict=True)
            return self._average(self._differentiate(parts, directions))

    def _differentiate(self, outputs: Any, directions: Any, create_graph: bool = False) -> dict[str, Tensor]:
        inputs = list(self._parameters.values())
        found = torch.autograd.grad(outputs, inputs, directions, create_graph=create_graph, materialize_grads=True)
        return dict(zip(self._parameters, found, strict=True))

    def _average(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        if type(self._processes) is Processes:
            return {name: part.detach() for name, part in parts.items()}
        count = self._processes.count(1)
        return {name: self._processes.add_tensors(part.detach()) / count for name, part in parts.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block, a model is in `eval()`."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextmanager
def _plain(device: str) -> Iterator[None]:
    """Inside the block, functions run as outside of the call of a model: with gradients, and without autocast."""
    with _torch.DisableTorchFunction(), torch.enable_grad(), torch.autocast(device, enabled=False):
        yield
    torch.clear_autocast_cache()  # whose copies of weights have been made outside of the recording


def _count_mean(grads: PerSampleGradients) -> int:
    """The number by which the rows of a step are divided in the gradient of the step."""
    own = max(1, grads.batch_size) if grads.loss_reduction.startswith("mean") else 1
    return own * grads.processes.count(1)
