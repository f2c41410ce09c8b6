"""`value`: what each example of a training step does to a validation loss, summed up by example over the run.

A step of an optimizer changes the weights by -M g - r (`optimizers.py`), where g is the mean of the examples' gradients
g_i. For a validation loss L with the gradient v and the Hessian H, example i lowers L by

    first order       ⟨g_i, M v⟩ / B
    second order      ⟨g_i, M (v - H u / 2)⟩ / B        u = M g, the part of the step that comes from this batch

These are the Shapley values of the examples of the step for the Taylor expansion of L (Wang et al., 2024, "Data Shapley
in one training run"). The inner products come from the structure of the gradients, without a row of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from persample._internal.options import show_options
from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, RecordedGradients, ReducedTerms
from persample.monitoring.attempt import Attempt
from persample.monitoring.measurement import ExampleId
from persample.monitoring.optimizers import Update
from persample.monitoring.steps import MeasuredSteps, StepOptions, check_ids
from persample.monitoring.valuation import Validation, Valuation
from persample.recording import Model, Options


@show_options(Options, StepOptions)
def value(
    model: Model,
    *,
    validation: Validation | int,
    optimizer: Any = None,
    order: Literal[1, 2] = 1,
    refresh: int = 1,
    every: int = 1,
    **options: Unpack[StepOptions],
) -> Values:
    """Measure by how much each example of each training step lowers a validation loss.

    The loop, the model and `p.grad` stay as they are. Steps are those of `persample.monitor`, and those that cannot be
    measured are skipped in the same way. Set `values.ids` before each call of the model to sum up by example.

    With a number as `validation`, the examples of validation go through the model together with those of training, as
    the last ones of each batch, and the loss is a sum of both losses. The step then needs no pass of its own for them.
    Their gradient is left out of `p.grad`; so a step that cannot be measured is an error.

    Args:
        model: the model that is trained.
        validation: a function of the model that returns the loss of a validation batch; it may take another batch each
            time. It runs before the model is called in a measured step, with the model in `eval()`. Or the number of
            examples at the end of each batch that are of validation.
        optimizer: the optimizer, or several in a list: SGD, Adam, AdamW or Muon of torch.optim. A value is then the
            decrease of the loss by the step. Without one it is the inner product of the two gradients.
        order: 2 adds the term with the Hessian of the validation loss, which costs another backward pass of it.
        refresh: how many measured steps use one gradient of the validation loss.
        every: how many calls of the model go by until the next one is measured.
        **options: as in `record`.

    Fewer `parameters` cost less; the values are then parts of the whole, as of a model of which these parameters alone
    are trained.

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
    return Values(model, validation, Update(optimizers), order, refresh, every, options)


@dataclass(frozen=True)
class StepValues:
    """The values of the examples of one step.

    Attributes:
        step: the number of the step.
        ids: the ids of the examples, None if they were not given.
        values: `(batch,)`, in float64: by how much each example lowers the validation loss.
        validation_loss: the validation loss before the step, or when its gradient was computed last; NaN if the
            examples of validation are part of the batch.
        age: how many steps before this one the gradient of the validation loss was computed.
    """

    step: int
    ids: Sequence[ExampleId] | None
    values: Tensor
    validation_loss: float
    age: int = 0


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
        validation: Validation | int,
        update: Update,
        order: int,
        refresh: int,
        every: int,
        options: StepOptions,
    ) -> None:
        if order not in (1, 2) or refresh < 1 or (order == 2 and refresh > 1):
            raise PerSampleError(
                f"order must be 1 or 2, and refresh at least 1 (with order=2: 1), got {order} and {refresh}."
            )
        self._valuation = Valuation(validation, update, order, refresh)
        self.is_strict = isinstance(validation, int)
        is_plain = (order, refresh, every) == (1, 1, 1) and options.get("parameters") is None
        if self.is_strict and not (self._valuation.held_out > 0 and is_plain):
            raise PerSampleError(
                "With a number of examples as validation, it must be positive, and order, refresh, every and "
                "parameters must be left out."
            )
        super().__init__(model, every, {**options, "keep": "everything", "nonfinite": "keep"})
        trained = self._model()
        if trained is not None and any(hasattr(p, "to_local") for p in trained.parameters()):
            self.stop()
            raise PerSampleError(
                "value() is not available under FSDP2: the model would run within a backward pass. Use "
                "DistributedDataParallel."
            )
        self._processes = Processes()  # of the last measured step
        self._keeps_terms = order == 2  # and not only their inner products
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

    def prepare(self, model: nn.Module) -> Mapping[str, Any]:
        """Compute the inner products when the terms arrive, with the gradient of the validation loss as it is now."""
        is_alone = type(find_processes(model)) is Processes
        if self.is_strict and not is_alone:
            raise PerSampleError("A number of examples as validation is not available under several processes.")
        if self._keeps_terms or not is_alone:
            return {}
        self._valuation.start_step(model)
        return {"reduce": self._valuation.reduce}

    def keep_result(self) -> None:
        if self._attempt is not None and self._attempt.refusal is not None:
            self._keeps_terms = True  # terms are complete at the end of the pass alone, as in reentrant checkpoints
        super().keep_result()

    def measure(self, grads: RecordedGradients, attempt: Attempt[StepValues]) -> StepValues | None:
        """Compute the values of the examples of a step."""
        model = self._model()
        if model is None:
            return None
        valuation = self._valuation
        if isinstance(grads, ReducedTerms):
            if grads.has_shared and valuation.update.needs_grads:
                raise PerSampleError(
                    "The loss has a part that belongs to no sample, such as a penalty, which arrives after the values "
                    "that need it. Use the weight decay of the optimizer, or a function as validation, with which the "
                    "next steps are measured."
                )
            parts, count = list(grads.found.values()), grads.row_count - valuation.held_out
            found = torch.stack(parts).sum(0, dtype=torch.float64) if parts else torch.zeros(count).double()
        elif self.is_strict or not isinstance(grads, PerSampleGradients) or not {*attempt.names} <= {*grads.names}:
            raise PerSampleError("The step was recorded by something else, such as private training, without its rows.")
        else:
            self._processes = grads.processes
            found = valuation.compute(model, grads, attempt.names).double()
        found = found.cpu().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # an example without a finite gradient
        gradient = valuation.gradient
        loss, age = (math.nan, 0) if gradient is None else (gradient.loss, valuation.age - 1)
        return StepValues(attempt.step, check_ids(attempt.ids, len(found)), found, loss, age)

    def keep(self, found: StepValues, attempt: Attempt[StepValues]) -> None:
        """Add the values of a step to the totals."""
        self._latest = found
        for i, one in zip(found.ids or (), found.values.tolist(), strict=found.ids is not None):
            total, count = self._totals.get(i, (0.0, 0))
            self._totals[i] = total + one, count + 1
