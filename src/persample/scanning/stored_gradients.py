"""The projected gradients of a scan, read in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from persample.scanning.errors import ScanError, explain_write_errors
from persample.scanning.folder import write_file
from persample.scanning.store import Array, Store

BLOCK_SIZE = 1024  # rows

# The second moment of more rows than this, or than 8 per entry of a row, is estimated from evenly spaced rows.
ROWS_OF_MOMENT = 32_768


class StoredGradients:
    """The projected gradients of one checkpoint: rows of length 1, and their original `lengths`."""

    def __init__(self, store: Store, checkpoint: int) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._shards = range(store.count_shards(checkpoint))
        self.lengths = torch.from_numpy(self._read_column("length"))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dim(self) -> int:
        """The number of entries in a row."""
        return self._store.read_rows(self._checkpoint, 0).shape[1]

    @cached_property
    def blocks(self) -> Tensor | None:
        """For each entry of a row the number of its parameter, or of a few small ones.

        None if entries mix all parameters, or if whitening has made their scales equal.
        """
        slices = self._store.read_settings()["blocks"] if self._store.exists else None
        if slices is None or self.are_whitened:
            return None
        ends = torch.tensor(sorted({stop for _, _, stop in slices}))  # entries after the last one are zeros
        return torch.bucketize(torch.arange(self.dim), ends, right=True)

    @cached_property
    def are_whitened(self) -> bool:
        """Whether gradients were whitened before they were projected."""
        return self._store.exists and self._store.read_settings().get("precondition") is not None

    def read_losses(self) -> Tensor:
        """The loss of each example."""
        return torch.from_numpy(self._read_column("loss"))

    def iterate_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """`(start, rows)`: all rows in float32, in blocks of whole shards with about `BLOCK_SIZE` rows.

        The next block is read while the caller works on this one. All blocks share their memory, so a block is valid
        until the next one, and the caller may change it: new memory for each block would take most of the time.
        """
        first = self._store.read_rows(self._checkpoint, 0)
        shard_size = max(1, len(first))
        shards_per_block = max(1, BLOCK_SIZE // shard_size)
        buffers = [np.empty((shards_per_block * shard_size, self.dim), first.dtype) for _ in range(2)]
        wide = torch.empty(0) if first.dtype == np.float32 else torch.empty(buffers[0].shape, dtype=torch.float32)
        groups = [self._shards[i : i + shards_per_block] for i in range(0, len(self._shards), shards_per_block)]
        with ThreadPoolExecutor(1) as reader:
            coming, start = reader.submit(self._load_shards, groups[0], buffers[0]), 0
            for i in range(len(groups)):
                block = torch.from_numpy(coming.result())
                if i + 1 < len(groups):
                    coming = reader.submit(self._load_shards, groups[i + 1], buffers[(i + 1) % 2])
                yield start, wide[: len(block)].copy_(block) if wide.numel() else block
                start += len(block)

    def sample_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """The ids of `count` evenly spaced examples (or of all, if there are fewer), and their rows."""
        ids = torch.arange(0, len(self), max(1, -(-len(self) // count)))
        return ids, self[ids]

    def __getitem__(self, ids: Tensor) -> Tensor:
        """The rows of some examples, in float32."""
        rows = torch.empty(len(ids), self.dim, dtype=torch.float32)
        shard_size = len(self._store.read_rows(self._checkpoint, 0))
        for shard in (ids // shard_size).unique().tolist():
            here = (ids // shard_size == shard).nonzero().flatten()
            stored = self._store.read_rows(self._checkpoint, shard)
            rows[here] = torch.from_numpy(np.array(stored[(ids[here] % shard_size).numpy()])).float()
        return rows

    def compute_sum(self, weights: Tensor) -> Tensor:
        """`(dim,)`: the sum of the rows times their weights, in float64."""
        largest = weights.max().clamp(min=torch.finfo(torch.float64).tiny)
        scaled = (weights / largest).float()  # the weights themselves may be too large for float32
        total = torch.zeros(self.dim, dtype=torch.float64)
        for start, block in self.iterate_blocks():
            total += (scaled[start : start + len(block)] @ block).double()
        return total * largest

    def compute_second_moment(self, scale: Tensor | None = None) -> Tensor:
        """`(dim, dim)`: mean of the outer products of rows with themselves, after multiplying each with its `scale`.

        With more than `ROWS_OF_MOMENT` rows and 8 rows per entry, the mean is over evenly spaced rows.
        """
        total = torch.zeros(self.dim, self.dim, dtype=torch.float64)
        count = max(ROWS_OF_MOMENT, 8 * self.dim)
        step = max(1, -(-len(self) // count))
        if step == 1:
            blocks = ((torch.arange(start, start + len(block)), block) for start, block in self.iterate_blocks())
        else:
            blocks = ((ids, self[ids]) for ids in torch.arange(0, len(self), step).split(BLOCK_SIZE))
        seen = 0
        for ids, block in blocks:
            if scale is not None:
                block *= scale[ids, None].float()
            total += (block.T @ block).double()
            seen += len(block)
        return total / seen

    def _read_column(self, name: str) -> Array:
        parts = [self._store.read_columns(self._checkpoint, shard, [name])[name] for shard in self._shards]
        return np.concatenate(parts)

    def _load_shards(self, shards: Sequence[int], buffer: Array) -> Array:
        """Read some shards into a buffer, and return its part that they fill."""
        end = 0
        for shard in shards:
            end += self._store.load_rows(self._checkpoint, shard, buffer[end:])
        return buffer[:end]


def write_rows(stored: StoredGradients, directory: Path, dtype: str) -> Path:
    """Write `rows.npy`, `ids.npy` and `lengths.npy` into a directory, block by block, and return the directory."""
    if dtype not in ("float16", "float32"):
        raise ScanError(f"dtype must be 'float16' or 'float32', got {dtype!r}.")
    with explain_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with write_file(directory / "rows.npy", directory) as file:
        shape = (len(stored), stored.dim)
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _, block in stored.iterate_blocks():
            file.write(block.numpy().astype(dtype).tobytes())
    for name, column in (("ids", np.arange(len(stored))), ("lengths", stored.lengths.numpy())):
        with write_file(directory / f"{name}.npy", directory) as file:
            np.save(file, column)
    return directory
