"""The cosine of each gradient with the mean gradient, estimated from projected gradients."""

from __future__ import annotations

import numpy as np

from persample.scanning.store import Array, Store

FILE, COLUMN = "alignment.npz", "estimated_alignment"


def write_alignment(store: Store) -> None:
    """Compute the estimates for the last checkpoint, in two passes over its stored rows, and store them.

    The projection is linear, so the mean of the projected gradients is the projection of the mean gradient.
    """
    checkpoint = len(store.read_settings()["checkpoints"]) - 1
    shards = range(store.count_shards(checkpoint))
    if not shards:  # the summary raises an error
        return
    total: Array = np.zeros(())
    for shard in shards:
        lengths = store.read_columns(checkpoint, shard, ["length"])["length"]
        weights = np.where(_find_finite(store, checkpoint, shard), lengths, 0.0)
        total = total + weights @ store.read_rows(checkpoint, shard).astype(np.float64)
    direction = total / max(float(np.linalg.norm(total)), np.finfo(np.float64).tiny)
    parts = []
    for shard in shards:
        cosines = store.read_rows(checkpoint, shard).astype(np.float64) @ direction
        parts.append(np.where(_find_finite(store, checkpoint, shard), cosines.clip(-1, 1), np.nan))
    store.write_arrays(FILE, {COLUMN: np.concatenate(parts)})


def read_alignment(store: Store, start: int, stop: int) -> Array:
    """The estimates for the examples `start` to `stop`."""
    return (store.read_arrays(FILE) or {COLUMN: np.zeros(0)})[COLUMN][start:stop]


def _find_finite(store: Store, checkpoint: int, shard: int) -> Array:
    columns = store.read_columns(checkpoint, shard, ["loss", "norm"])
    return np.isfinite(columns["loss"]) & np.isfinite(columns["norm"])
