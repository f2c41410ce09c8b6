"""The gradients of a test batch, projected like those of a scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.graph import preserve_grads
from persample._internal.rng import seed_all
from persample._internal.text import describe_value
from persample.batches import Batch, BatchDim
from persample.gradients import PerSampleGradients
from persample.losses import LossFunction, check_inputs_and_targets, compute_sample_losses, get_name, takes_outputs
from persample.recording import Options, Selection, record
from persample.scanning.checkpoints import State, check_weights
from persample.scanning.errors import ScanError
from persample.scanning.factors import make_projection_of
from persample.scanning.influence import TestGradients
from persample.scanning.measure import Measurement, prepare_model
from persample.scanning.reduced import ReducedRows
from persample.scanning.source import move_to_device
from persample.scanning.step_sizes import Adam, get_step_sizes
from persample.scanning.store import Store


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
        store: Store,
        batch_dim: BatchDim,
        batch: Any,
    ) -> list[TestGradients]:
        """The gradients of a batch with each checkpoint of a scan."""
        settings = store.read_settings()
        projection = make_projection_of(store)
        shapes = tuple((name, torch.Size(shape)) for name, shape in settings["parameters"].items())
        scanned = {name: p for name, p in model.named_parameters() if name in settings["parameters"]}
        chosen = list(Options(parameters=self.parameters).select(dict(scanned)))
        factors = get_step_sizes(self.adam, {name: scanned[name] for name in chosen}) if self.adam is not None else None
        measurement = Measurement(model, self.measure, quantities=["loss", "norm"], parameters=list(scanned))
        states = check_weights(settings, model, checkpoints)
        if measurement.losses.takes_pairs:
            check_inputs_and_targets(self.measure, batch)
        batch = move_to_device(batch, measurement.device)
        found = []
        with prepare_model(measurement, None), states.load_each() as loaded:
            for checkpoint in loaded:
                values, grads = self._record(model, list(scanned), batch, batch_dim, settings["loss_reduction"])
                grads = grads if len(chosen) == len(scanned) else grads.select(chosen)
                grads = grads if factors is None else grads.scale(factors)
                rows = ReducedRows(
                    len(values), measurement.device, projection.make(checkpoint, shapes, measurement.device)
                )
                grads.pass_terms_to(rows.receive)
                rate = states.learning_rates[checkpoint]
                found.append(TestGradients(rows.project().detach().cpu(), values.detach().double().cpu(), rate))
        return found

    def _record(
        self, model: nn.Module, names: list[str], batch: Any, batch_dim: BatchDim, loss_reduction: str
    ) -> tuple[Tensor, PerSampleGradients]:
        """The values of a batch and their gradients. A single value, of the whole batch, is repeated."""
        size = Batch(batch, batch_dim, None, pair=takes_outputs(self.measure)).size
        seed_all(0)
        with record(
            model, batch_dim=batch_dim, batch_size=size, parameters=names, loss_reduction="sum", nonfinite="keep"
        ) as grads:
            values = compute_sample_losses(model, batch, self.measure, batch_dim if isinstance(batch_dim, int) else 0)
            if not isinstance(values, Tensor) or (values.shape != (size,) and values.numel() != 1):
                raise ScanError(
                    f"{get_name(self.measure)} returned {describe_value(values)} for {size} samples; it must return "
                    "one number per sample, or a single number."
                )
            is_mean = values.shape != (size,) and loss_reduction == "mean"
            with preserve_grads(values):
                (values.sum() * (size if is_mean else 1)).backward()
        return values.reshape(-1).expand(size), grads
