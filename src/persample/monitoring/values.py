"""`value`: what each example of a training step does to a validation loss, summed up by example over the run.

A step of an optimizer changes the weights by -M g - r (`optimizers.py`), where g is the mean of the examples' gradients
g_i. For a validation loss L with the gradient v and the Hessian H, example i lowers L by

    first order       ⟨g_i, M v⟩ / B
    second order      ⟨g_i, M (v - H u / 2)⟩ / B        u = M g, the part of the step that comes from this batch

These are the Shapley values of the examples of the step for the Taylor expansion of L (Wang et al., 2024, "Data Shapley
in one training run"). The inner products come from the structure of the gradients, without a row of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from persample import _torch
from persample._internal.text import describe_value
from persample.batches import BatchDim
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, RecordedGradients
from persample.monitoring.attempt import Attempt
from persample.monitoring.measurement import ExampleId
from persample.monitoring.optimizers import Update
from persample.monitoring.steps import MeasuredSteps, check_ids
from persample.recording import Constants, Model, Selection, Verify, get_trainable

# Computes the loss of a validation batch, a scalar, with the model that it is given.
Validation = Callable[[Any], Tensor]


def value(
    model: Model,
    *,
    validation: Validation,
    optimizer: Any = None,
    order: Literal[1, 2] = 1,
    refresh: int = 1,
    every: int = 1,
    parameters: Selection | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    constants: Constants = (),
    verify: Verify = None,
) -> Values:
    """Measure by how much each example of each training step lowers a validation loss.

    The loop, the model and `p.grad` stay as they are. Steps are those of `persample.monitor`, and those that cannot be
    measured are skipped in the same way. Set `values.ids` before each call of the model to sum up by example.

    Args:
        model: the model that is trained.
        validation: a function of the model that returns the loss of a validation batch; it may take another batch each
            time. It runs at the end of a measured backward pass, with the model in `eval()`.
        optimizer: the optimizer, or several in a list: SGD, Adam, AdamW or Muon of torch.optim. A value is then the
            decrease of the loss by the step. Without one it is the inner product of the two gradients.
        order: 2 adds the term with the Hessian of the validation loss, which costs another backward pass of it.
        refresh: how many measured steps use one gradient of the validation loss.
        every: how many calls of the model go by until the next one is measured.

    `parameters`, `batch_dim`, `loss_reduction`, `constants` and `verify` are as in `record`. Fewer parameters cost
    less; the values are then parts of the whole, as of a model of which these parameters alone are trained.

    Raises:
        PerSampleError: an option is wrong, or the update of the optimizer is not known.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
    >>> with value(model, validation=lambda m: (m(x) - y).square().mean(), optimizer=optimizer) as values:
    ...     for ids in torch.arange(20).split(5):
    ...         values.ids = ids
    ...         optimizer.zero_grad()
    ...         (model(x[ids]) - y[ids]).square().mean().backward()
    ...         optimizer.step()
    >>> len(values.totals()), values.latest.step
    (20, 3)
    """
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    options = {
        "parameters": parameters,
        "batch_dim": batch_dim,
        "loss_reduction": loss_reduction,
        "constants": constants,
        "verify": verify,
    }
    return Values(model, validation, Update(optimizers), order, refresh, every, options)


@dataclass(frozen=True)
class StepValues:
    """The values of the examples of one step.

    Attributes:
        step: the number of the step.
        ids: the ids of the examples, None if they were not given.
        values: `(batch,)`, in float64: by how much each example lowers the validation loss.
        validation_loss: the validation loss before the step, or when its gradient was computed last.
    """

    step: int
    ids: Sequence[ExampleId] | None
    values: Tensor
    validation_loss: float


class Values(MeasuredSteps[StepValues]):
    """The result of `value`. `stop()`, or the end of a `with` block, ends it.

    Attributes:
        ids: the ids of the samples of the next call of the model; set it before the call.
        step: the number of calls of the model in training mode so far. It can be set, to the step of a trainer.

    >>> model, x = torch.nn.Linear(3, 1), torch.randn(4, 3)
    >>> with value(model, validation=lambda m: m(x).square().mean()) as values:
    ...     values.ids = ["a", "b", "c", "d"]
    ...     model(x).square().mean().backward()
    >>> sorted(values.totals()), values.latest.values.shape
    (['a', 'b', 'c', 'd'], torch.Size([4]))
    """

    def __init__(
        self,
        model: Model,
        validation: Validation,
        update: Update,
        order: int,
        refresh: int,
        every: int,
        options: dict[str, Any],
    ) -> None:
        if order not in (1, 2) or refresh < 1 or (order == 2 and refresh > 1):
            raise PerSampleError(
                f"order must be 1 or 2, and refresh at least 1 (with order=2: 1), got {order} and {refresh}."
            )
        super().__init__(model, every, {**options, "keep": "everything", "nonfinite": "zero"})
        trained = self._model()
        if trained is not None and any(hasattr(p, "to_local") for p in trained.parameters()):
            self.stop()
            raise PerSampleError(
                "value() is not available under FSDP2: the model would run within a backward pass. Use "
                "DistributedDataParallel."
            )
        self._validation, self._update, self._order, self._refresh = validation, update, order, refresh
        self._age = 0  # measured steps since the gradient was computed
        self._gradient: ValidationGradient | None = None
        self._processes = Processes()  # of the last measured step
        self._latest: StepValues | None = None
        self._totals: dict[ExampleId, tuple[float, int]] = {}  # sum of the values and number of steps

    # ---- answers ----

    @property
    def latest(self) -> StepValues | None:
        """The last measured step, None before the first."""
        self.keep_result()
        return self._latest

    def totals(self, over_processes: bool = False) -> dict[ExampleId, float]:
        """The sum of the values of each example over the steps so far, by id.

        Args:
            over_processes: add up what all processes have found. All of them must ask for it.
        """
        return {i: total for i, (total, _) in self._add_up(over_processes).items()}

    def counts(self, over_processes: bool = False) -> dict[ExampleId, int]:
        """In how many measured steps each example was, by id."""
        return {i: count for i, (_, count) in self._add_up(over_processes).items()}

    def ranked(self, k: int | None = None) -> list[tuple[ExampleId, float]]:
        """The `k` examples (default: all) with the smallest totals, which harm most, smallest first."""
        return sorted(self.totals().items(), key=lambda item: item[1])[:k]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: the totals of this process and the number of steps."""
        self.keep_result()
        return {"step": self.step, "totals": dict(self._totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.step, self._totals = state["step"], {i: (total, count) for i, (total, count) in state["totals"].items()}

    def __repr__(self) -> str:
        self.keep_result()
        return f"Values({len(self._totals)} examples, {self.step} steps)"

    def _add_up(self, over_processes: bool) -> dict[ExampleId, tuple[float, int]]:
        self.keep_result()
        if not over_processes:
            return dict(self._totals)
        found: dict[ExampleId, tuple[float, int]] = {}
        for _, totals in self._processes.gather_objects(self._totals):
            for i, (total, count) in totals.items():
                before = found.get(i, (0.0, 0))
                found[i] = before[0] + total, before[1] + count
        return found

    # ---- measuring ----

    def measure(self, grads: RecordedGradients, attempt: Attempt[StepValues]) -> StepValues | None:
        """Compute the values of the examples of a step."""
        model = self._model()
        if model is None:
            return None
        if not isinstance(grads, PerSampleGradients) or not {*attempt.names} <= {*grads.names}:
            raise PerSampleError("The step was recorded by something else, such as private training, without its rows.")
        self._processes = grads.processes
        loss, direction = self._find_direction(model, grads, attempt.names)
        found = grads.dot(direction).double().cpu() / _count_mean(grads)
        return StepValues(attempt.step, check_ids(attempt.ids, grads.row_count), found, loss)

    def keep(self, found: StepValues, attempt: Attempt[StepValues]) -> None:
        """Add the values of a step to the totals."""
        self._latest = found
        for i, one in zip(found.ids or (), found.values.tolist(), strict=found.ids is not None):
            total, count = self._totals.get(i, (0.0, 0))
            self._totals[i] = total + one, count + 1

    def _find_direction(
        self, model: nn.Module, grads: PerSampleGradients, names: Sequence[str]
    ) -> tuple[float, dict[str, Tensor]]:
        """The validation loss, and the direction whose inner product with g_i / B is the value of example i."""
        trainable = get_trainable(model)
        parameters = {name: trainable[name] for name in names}
        of_step: dict[str, Tensor] = {}
        if self._order == 2 or (self._update.needs_grads and type(grads.processes) is not Processes):
            of_step = {name: total / _count_mean(grads) for name, total in grads.sum().items()}
        so_far = of_step  # several processes add up `p.grad` later
        if self._update.needs_grads and type(grads.processes) is Processes:
            so_far = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if self._gradient is None or self._age >= self._refresh:
            self._gradient, self._age = None, 0
            self._gradient = ValidationGradient(model, self._validation, parameters, grads.processes, self._order)
        self._age += 1
        found = self._gradient.parts
        if self._order == 2:
            curved = self._gradient.multiply_hessian(self._update.map(of_step, parameters, so_far))
            found = {name: part - curved[name] / 2 for name, part in found.items()}
        return self._gradient.loss, self._update.map(found, parameters, so_far)


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
        validation: Validation,
        parameters: dict[str, Tensor],
        processes: Processes,
        order: int = 1,
    ) -> None:
        self._parameters, self._processes = parameters, processes
        called = processes.get_called_module(model)
        # Kernels of attention other than the plain one have no second derivatives.
        backends = [SDPBackend.MATH] if order == 2 else list(SDPBackend.__members__.values())
        with _evaluating(called), _torch.DisableTorchFunction(), torch.enable_grad(), sdpa_kernel(backends):
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


def _count_mean(grads: PerSampleGradients) -> int:
    """The number by which the rows of a step are divided in the gradient of the step."""
    own = max(1, grads.batch_size) if grads.loss_reduction.startswith("mean") else 1
    return own * grads.processes.count(1)
