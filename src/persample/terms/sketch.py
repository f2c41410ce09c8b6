"""Random projections that keep inner products.

A sketch is a linear map from a weight's entries to `size` numbers: entry (o, i), o counting rows and i what is in a
row, is added with the sign s(o, i) to the number b(o, i). For any two vectors the inner product of their sketches has
their own inner product as its mean, over the choice of the map; the spread falls as 1 / sqrt(size).

*Sparse* draws b and s anew for each entry: the smallest spread, but the gradients have to be made dense (in blocks).
*Tensor* draws them for rows and for columns and combines them: b = b(o) + b(i) mod size, s = s(o) s(i). Then the sketch
of an outer product is the circular convolution of the sketches of its two sides, and no gradient has to be made dense.
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
    # The other way round: then whole rows are added, not single numbers.
    turned = (values * signs.to(values.dtype)).flatten(0, -2).mT.contiguous()
    result = values.new_zeros(size, turned.shape[1]).index_add_(0, buckets, turned)
    return result.mT.reshape(*values.shape[:-1], size)


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
        count = block.shape[1:].numel() // max(1, self._columns[0].numel())
        (rows, row_signs), (columns, signs) = (t[start : start + count, None] for t in self._rows), self._columns
        buckets, signs = (rows + columns) % self.size, row_signs * signs
        return _added_up(block.reshape(len(block), buckets.numel()), buckets.flatten(), signs.flatten(), self.size)

    def of_rows(self, ids: Tensor, values: Tensor) -> Tensor:
        """`(batch, size)`: the sketch of `(batch, t, columns)`, each put at its row."""
        (rows, row_signs), (columns, signs) = (t[ids].unsqueeze(-1) for t in self._rows), self._columns
        buckets, values = (rows + columns) % self.size, values * (row_signs * signs).to(values.dtype)
        return values.new_zeros(len(ids), self.size).scatter_add_(1, buckets.flatten(1), values.flatten(1))

    def columns(self, values: Tensor) -> Tensor:
        """The transform of the sketch of what is in a row: `(..., columns)` to `(..., frequencies)`."""
        return torch.fft.rfft(_added_up(values, *self._columns, self.size))

    def rows(self, values: Tensor) -> Tensor:
        """The transform of the sketch of rows: `(..., rows)` to `(..., frequencies)`."""
        return torch.fft.rfft(_added_up(values, *self._rows, self.size))
