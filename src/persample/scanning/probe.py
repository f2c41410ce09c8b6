"""The gradients of a test batch, projected like those of a scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from persample.batches import Batch, BatchDim
from persample.gradients import PerSampleGradients
from persample.losses import LossFunction
from persample.recording.options import Options, Selection
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.errors import ScanError
from persample.scanning.influence import TestGradients
from persample.scanning.measure import Gradient, Measurement, Projection, Recorded, prepare_model
from persample.scanning.source import move_to_device

Adam = Optimizer | Mapping[str, Tensor]


@dataclass(frozen=True)
class Probe:
    """What is differentiated for a test batch: a function of model and batch, with some of the scanned parameters.

    `adam` multiplies the gradient by the step sizes that Adam has for each entry.
    """

    measure: LossFunction
    parameters: Selection | None = None
    adam: Adam | None = None

    def project_batch(
        self,
        model: nn.Module,
        checkpoints: Sequence[State | str | Path] | None,
        settings: Mapping[str, Any],
        batch_dim: BatchDim,
        batch: Any,
    ) -> list[TestGradients]:
        """The gradients of a batch with each checkpoint of a scan with these settings."""
        scanned = {name: p for name, p in model.named_parameters() if name in settings["parameters"]}
        chosen = list(Options(parameters=self.parameters).select(dict(scanned)))
        measurement = _ScaledMeasurement(
            model,
            self.measure,
            quantities=["loss", "norm"],
            projection=Projection(settings["project"], settings["seed"], settings["projection"]),
            parameters=chosen,
            batch_dim=batch_dim,
            loss_reduction=settings["loss_reduction"],
        )
        if self.adam is not None:
            measurement.factors = get_step_sizes(self.adam, {name: scanned[name] for name in chosen})
        states = Checkpoints(model, checkpoints, settings["learning_rates"])
        if states.compute_digests() != settings["checkpoints"]:
            raise ScanError(
                "The weights of the model differ from the scanned ones. Load the scanned weights, or pass the "
                "checkpoints to Scan(...)."
            )
        batch = move_to_device(batch, measurement.device)
        size = Batch(batch, batch_dim, None, pair=measurement.takes_pairs).size
        found = []
        with prepare_model(measurement, None), states.load_each() as loaded:
            for checkpoint in loaded:
                columns = measurement.measure_batch(range(size), batch, None)
                rate = states.learning_rates[checkpoint]
                found.append(TestGradients(columns["projection"], columns["loss"].double(), rate))
        return found


class _ScaledMeasurement(Measurement):
    """Measures gradients whose entries are multiplied by `factors`, if there are any."""

    factors: Gradient | None = None

    def _record(self, ids: Sequence[int], batch: Any) -> Recorded:
        recorded = super()._record(ids, batch)
        if self.factors is not None and isinstance(recorded.grads, PerSampleGradients):
            return replace(recorded, grads=recorded.grads.scale(self.factors))
        return recorded


def get_step_sizes(adam: Adam, parameters: Mapping[str, Tensor]) -> Gradient:
    """`1 / (sqrt(v) + eps)` for each parameter, by name: Adam's step for a gradient, without its learning rate.

    `adam` is an optimizer with the state of Adam, or `v` itself by the name of the parameter (eps is then 1e-8).
    """
    if not isinstance(adam, Optimizer):
        if missing := [name for name in parameters if name not in adam]:
            raise ScanError(f"adam has no second moment for the parameter '{missing[0]}'.")
        return {name: 1 / (adam[name].to(p).sqrt() + 1e-8) for name, p in parameters.items()}
    options = {id(p): group for group in adam.param_groups for p in group["params"]}
    factors = {}
    for name, p in parameters.items():
        state = adam.state.get(p, {})
        if "exp_avg_sq" not in state or "betas" not in options[id(p)]:
            raise ScanError(
                f"The optimizer has no second moment for the parameter '{name}'. Pass the Adam optimizer that trained "
                "this model, or a dict of second moments by parameter name."
            )
        beta, step = options[id(p)]["betas"][1], float(state["step"])
        second_moment = state["exp_avg_sq"] / (1 - beta**step)
        factors[name] = 1 / (second_moment.sqrt() + options[id(p)]["eps"])
    return factors
