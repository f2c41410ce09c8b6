"""Random projections that preserve inner products.

A sketch is a random linear map from the entries of a weight to `size` numbers. Let o be the row of an entry and i its
index within the row. The map adds entry (o, i), with a random sign s(o, i), to the number b(o, i), its bucket. For any
two vectors, the inner product of their sketches is an unbiased estimate of their inner product; its standard deviation
falls as 1 / sqrt(size).

A *sparse* sketch draws b and s for each entry. It has the smallest variance, but needs the dense gradients, in blocks.
A *tensor* sketch draws them for rows and for columns, and combines them: b = b(o) + b(i) mod size, s = s(o) s(i). The
sketch of an outer product then is the circular convolution of the sketches of its two sides, so no gradient has to be
dense. Its variance is somewhat larger, most of all for gradients that are sums of few outer products.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sketch(Protocol):
    """A linear map from the entries of a weight to `size` numbers."""

    @property
    def size(self) -> int: ...

    def project_dense(self, block: Tensor, start: int) -> Tensor:
        """`(batch, size)`: the contribution of the rows from `start` on, given as `(batch, rows, ...)`."""
        ...


def make_generator(seed: int, *names: object) -> torch.Generator:
    """A generator that depends on the seed and the names only: all processes draw the same numbers."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _draw_hash(count: int, size: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """`count` buckets below `size`, and `count` signs."""
    buckets = torch.randint(size, (count,), generator=generator)
    signs = torch.randint(2, (count,), generator=generator).mul_(2).sub_(1)
    return buckets.to(device), signs.to(device)


def _add_to_buckets(values: Tensor, buckets: Tensor, signs: Tensor, size: int) -> Tensor:
    """`(..., count)` to `(..., size)`: each value is added, with its sign, to its bucket."""
    # Transposed, so that index_add_ adds whole rows in place of single numbers.
    transposed = (values * signs.to(values.dtype)).flatten(0, -2).mT.contiguous()
    result = values.new_zeros(size, transposed.shape[1]).index_add_(0, buckets, transposed)
    return result.mT.reshape(*values.shape[:-1], size)


@dataclass(frozen=True)
class SparseSketch:
    """A sketch with an independent bucket and sign for each entry of a weight."""

    size: int
    seed: int
    name: str

    def project_dense(self, block: Tensor, start: int) -> Tensor:
        rows = block if block.dim() > 1 else block.unsqueeze(1)
        total = block.new_zeros(len(block), self.size)
        for i, row in enumerate(rows.unbind(1)):
            generator = make_generator(self.seed, self.name, start + i)
            entries = row.reshape(len(block), -1)
            total += _add_to_buckets(
                entries, *_draw_hash(entries.shape[1], self.size, generator, block.device), self.size
            )
        return total


class TensorSketch:
    """A sketch with a bucket and a sign for each row of a weight, and for each column."""

    def __init__(self, size: int, seed: int, name: str, shape: torch.Size, device: torch.device) -> None:
        self._size = size
        rows, columns = (shape[0] if shape else 1), shape[1:].numel()
        self._rows = _draw_hash(rows, size, make_generator(seed, name, "rows"), device)
        self._columns = _draw_hash(columns, size, make_generator(seed, name, "columns"), device)

    @property
    def size(self) -> int:
        return self._size

    def project_dense(self, block: Tensor, start: int) -> Tensor:
        count = block.shape[1:].numel() // max(1, self._columns[0].numel())
        (rows, row_signs), (columns, signs) = (t[start : start + count, None] for t in self._rows), self._columns
        buckets, signs = (rows + columns) % self.size, row_signs * signs
        return _add_to_buckets(
            block.reshape(len(block), buckets.numel()), buckets.flatten(), signs.flatten(), self.size
        )

    def project_rows(self, ids: Tensor, values: Tensor) -> Tensor:
        """`(batch, size)`: the sketch of the rows `values`, `(batch, t, columns)`, at the row numbers `ids`."""
        (rows, row_signs), (columns, signs) = (t[ids].unsqueeze(-1) for t in self._rows), self._columns
        buckets, values = (rows + columns) % self.size, values * (row_signs * signs).to(values.dtype)
        return values.new_zeros(len(ids), self.size).scatter_add_(1, buckets.flatten(1), values.flatten(1))

    def transform_columns(self, values: Tensor) -> Tensor:
        """Fourier transform of the sketch of column vectors: `(..., columns)` to `(..., frequencies)`."""
        return torch.fft.rfft(_add_to_buckets(values, *self._columns, self.size))

    def transform_rows(self, values: Tensor) -> Tensor:
        """Fourier transform of the sketch of row vectors: `(..., rows)` to `(..., frequencies)`."""
        return torch.fft.rfft(_add_to_buckets(values, *self._rows, self.size))
