"""The mean of the projected gradients, and the cosine of each with it: an estimate of that of the gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from persample.scanning.store import Array, Store
from persample.scanning.stored_gradients import StoredGradients

FILE, COLUMN = "alignment.npz", "estimated_alignment"


def average_rows(store: Store) -> Tensor | None:
    """The mean of the projected gradients with the last checkpoint, in float64; None if there are no shards.

    The projection is linear, so this is the projection of the mean gradient. Examples with a loss or norm that is not
    finite are left out.
    """
    checkpoint = get_last_checkpoint(store)
    if not store.count_shards(checkpoint):  # the summary raises an error
        return None
    stored = StoredGradients(store, checkpoint)
    is_finite = torch.from_numpy(_find_finite(store, checkpoint))
    return stored.compute_sum(torch.where(is_finite, stored.lengths, 0.0)) / max(1, int(is_finite.sum()))


def write_alignment(store: Store, mean: Tensor) -> None:
    """Store the cosines of the projected gradients with their mean, which `average_rows` has returned."""
    checkpoint = get_last_checkpoint(store)
    direction = mean / mean.norm().clamp(min=torch.finfo(torch.float64).tiny)
    blocks = StoredGradients(store, checkpoint).iterate_blocks()
    cosines = torch.cat([block @ direction.float() for _, block in blocks]).clamp(-1, 1).double().numpy()
    store.write_arrays(FILE, {COLUMN: np.where(_find_finite(store, checkpoint), cosines, np.nan)})


def read_alignment(store: Store, start: int, stop: int) -> Array:
    """The estimates for the examples `start` to `stop`."""
    return (store.read_arrays(FILE) or {COLUMN: np.zeros(0)})[COLUMN][start:stop]


def get_last_checkpoint(store: Store) -> int:
    """The number of the last checkpoint, which the columns describe."""
    return len(store.read_settings()["checkpoints"]) - 1


def _find_finite(store: Store, checkpoint: int) -> Array:
    """Whether the loss and the norm of each example are finite."""
    parts = [store.read_columns(checkpoint, s, ["loss", "norm"]) for s in range(store.count_shards(checkpoint))]
    return np.concatenate([np.isfinite(part["loss"]) & np.isfinite(part["norm"]) for part in parts])
