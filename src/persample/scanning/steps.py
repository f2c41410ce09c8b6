"""The steps of the training between the scanned checkpoints, projected as the gradients are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from persample.scanning.checkpoints import Checkpoints
from persample.scanning.measure import Gradient, Measurement
from persample.scanning.store import Store
from persample.terms import Dense

FILE = "steps.npz"


def write_steps(store: Store, measurement: Measurement, checkpoints: Checkpoints) -> None:
    """Store what the training subtracted from the weights between each checkpoint and the next one, projected.

    Checkpoints may be of different trainings: `damping.choose_damping` notices that by the gradients.
    """
    projected = measurement.projection
    if projected is None or projected.whitening is not None or len(checkpoints.learning_rates) < 2:
        return
    steps = []
    for checkpoint, step in enumerate(_iterate_steps(measurement, checkpoints)):
        projection = projected.make(checkpoint, measurement.shapes, torch.device("cpu"))
        terms = {name: Dense(part[None]) for name, part in step.items() if part.numel()}
        steps.append(projection.project(terms, 1)[0])
    store.write_arrays(FILE, {"steps": torch.stack(steps).numpy()})


def read_steps(store: Store) -> list[Tensor | None]:
    """The step after each checkpoint; None after the last one, and if the scan has no steps."""
    count = len(store.read_settings()["checkpoints"])
    found = store.read_arrays(FILE)
    steps: list[Tensor | None] = [] if found is None else list(torch.from_numpy(found["steps"]))
    return steps + [None] * (count - len(steps))


def _iterate_steps(measurement: Measurement, checkpoints: Checkpoints) -> Iterator[Gradient]:
    before: Gradient | None = None
    with checkpoints.load_each() as loaded:
        for _ in loaded:
            weights = {name: p.detach().cpu().clone() for name, p in measurement.parameters.items()}
            if before is not None:
                yield {name: before[name] - weight for name, weight in weights.items()}
            before = weights
