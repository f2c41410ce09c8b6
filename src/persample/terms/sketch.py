"""Random projections that keep inner products, and that never need more of a weight than its two sides.

A sketch is a linear map from a weight's entries to `size` numbers: entry (o, i), o counting rows and i what is in a
row, is added with the sign s(o, i) to the number b(o, i). For any two vectors the inner product of their sketches has
their own inner product as its mean, over the choice of the map; the spread falls as 1 / sqrt(size).

*Sparse* draws b and s anew for each entry: the smallest spread, but the gradients have to be made dense (in blocks).
*Tensor* draws them for rows and for columns and combines them: b = b(o) + b(i) mod size, s = s(o) s(i). Then the sketch
of an outer product is the circular convolution of the sketches of its two sides, and no gradient is ever made dense.
Its spread is somewhat larger, the more so the fewer outer products a gradient is a sum of.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sketch(Protocol):
    """A linear map of a weight's entries to `size` numbers."""

    @property
    def size(self) -> int: ...

    def of_dense(self, block: Tensor, start: int) -> Tensor:
        """`(batch, size)`: the share of the rows from `start` on, given as `(batch, rows, ...)`."""
        ...


def _generator(seed: int, *names: object) -> torch.Generator:
    """The same for the same seed and names, in every process."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _hash(count: int, size: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """A bucket below `size` and a sign for each of `count` things."""
    buckets = torch.randint(size, (count,), generator=generator)
    signs = torch.randint(2, (count,), generator=generator).mul_(2).sub_(1)
    return buckets.to(device), signs.to(device)


def _added_up(values: Tensor, buckets: Tensor, signs: Tensor, size: int) -> Tensor:
    """`(..., count)` to `(..., size)`: each value added, with its sign, to its bucket."""
    result = values.new_zeros(*values.shape[:-1], size)
    return result.index_add_(-1, buckets, values * signs.to(values.dtype))


@dataclass(frozen=True)
class SparseSketch:
    """A bucket and a sign of its own for each entry of a weight."""

    size: int
    seed: int
    name: str

    def of_dense(self, block: Tensor, start: int) -> Tensor:
        rows = block if block.dim() > 1 else block.unsqueeze(1)
        total = block.new_zeros(len(block), self.size)
        for i, row in enumerate(rows.unbind(1)):
            generator = _generator(self.seed, self.name, start + i)
            entries = row.reshape(len(block), -1)
            total += _added_up(entries, *_hash(entries.shape[1], self.size, generator, block.device), self.size)
        return total


class TensorSketch:
    """Buckets and signs for the rows of a weight and for what is in a row."""

    def __init__(self, size: int, seed: int, name: str, shape: torch.Size, device: torch.device) -> None:
        self._size = size
        rows, columns = (shape[0] if shape else 1), shape[1:].numel()
        self._rows = _hash(rows, size, _generator(seed, name, "rows"), device)
        self._columns = _hash(columns, size, _generator(seed, name, "columns"), device)

    @property
    def size(self) -> int:
        return self._size

    def of_dense(self, block: Tensor, start: int) -> Tensor:
        rows = block.reshape(len(block), -1, self._columns[0].numel())
        return torch.fft.irfft(self.rows_sum(self.columns(rows), start), self.size)

    def columns(self, values: Tensor) -> Tensor:
        """The transform of the sketch of what is in a row: `(..., columns)` to `(..., frequencies)`."""
        return torch.fft.rfft(_added_up(values, *self._columns, self.size))

    def rows(self, values: Tensor, start: int = 0) -> Tensor:
        """The transform of the sketch of rows: `(..., rows)` to `(..., frequencies)`."""
        buckets, signs = (part[start : start + values.shape[-1]] for part in self._rows)
        return torch.fft.rfft(_added_up(values, buckets, signs, self.size))

    def at(self, rows: Tensor, like: Tensor) -> Tensor:
        """The transform of the sketch of a one in each of these rows."""
        buckets, signs = (part[rows].unsqueeze(-1) for part in self._rows)
        turns = buckets * torch.arange(self.size // 2 + 1, device=like.device) % self.size  # exact, in integers
        return signs * torch.exp(-2j * torch.pi / self.size * turns.to(like.real.dtype))

    def rows_sum(self, columns: Tensor, start: int) -> Tensor:
        """The sum over rows `(batch, rows, frequencies)` of what `columns` gave, each put at its row."""
        index = torch.arange(start, start + columns.shape[1], device=columns.device)
        return (columns * self.at(index, columns)).sum(1)
