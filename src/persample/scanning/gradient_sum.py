"""The sum of the gradients of a scan, which is saved while it grows."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from persample._internal.host import copy_to_host
from persample.scanning.store import Store

# Saving the sum takes at most this share of the time. Its file has the size of the model in float64.
SHARE_OF_SAVES = 0.02

# Keys of the file beside the names of parameters, which contain no spaces.
_COUNT, _SHARDS = "number of examples", "number of shards"


class GradientSum:
    """The sum of gradients of one process in float64; continued from its file if there is one.

    `count` is the number of examples in the sum, and `shards` the first shard that is not in it. Gradients are added in
    the order of the shards, so that a sum that is continued has the same bits as one that is not.
    """

    def __init__(self, store: Store, file: str, shapes: Mapping[str, torch.Size]) -> None:
        self._store, self._file = store, file
        saved = store.read_arrays(file) or {_COUNT: np.zeros(()), _SHARDS: np.zeros((), dtype=np.int64)}
        self.count, self.shards = int(saved[_COUNT]), int(saved[_SHARDS])
        self.gradient: dict[str, Tensor] = {
            name: torch.from_numpy(saved[name]) if name in saved else torch.zeros(shape, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        self._next_save = time.monotonic()

    def add(self, gradient: Mapping[str, Tensor], count: int) -> None:
        """Add the sum of the gradients of `count` examples."""
        self.count += count
        for name, part in gradient.items():
            self.gradient[name].add_(copy_to_host(part))

    def end_shard(self, shard: int) -> None:
        """Note that all examples up to the end of a shard were added. Saves the sum if that is due."""
        self.shards = shard + 1
        start = time.monotonic()
        if start >= self._next_save:
            contents = {name: part.numpy() for name, part in self.gradient.items()}
            counts = {_COUNT: np.array(float(self.count)), _SHARDS: np.array(self.shards)}
            self._store.write_arrays(self._file, {**counts, **contents})
            end = time.monotonic()
            self._next_save = end + (end - start) / SHARE_OF_SAVES


def get_mean_file(checkpoint: int) -> str:
    """The file in the directory of a scan with the mean gradient of a checkpoint."""
    return f"mean-{checkpoint}.npz"
