"""Kronecker-factored projections: both sides of a gradient are projected before they are multiplied (LoGra).

The gradient of a weight is read as a matrix g of R rows and C columns: the first dimension of the weight by all others.
With random matrices L, `(R, k)`, and M, `(C, m)`, the projection of an outer product is `Lᵀ (a bᵀ) M = (Lᵀ a)(Mᵀ b)ᵀ`.
So the inputs and the output gradients of a layer are projected, and their products have k m entries in place of R C.
The columns of L and M are orthogonal, and scaled such that the means of `L Lᵀ` and `M Mᵀ` over the seeds are the
identity. So the inner product of two projected gradients is an unbiased estimate of their inner product.

The estimate needs wide sides: for gradients of one outer product, its relative error is about sqrt(1/k + 1/m). So the
products are more than the numbers that are kept for a weight; they are then added up in groups, with random signs. That
costs next to nothing, and is unbiased, too.

The numbers of a row are divided among the parameters, see `allocate`. So a part of a row belongs to one parameter, and
layers can be weighed or whitened separately.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.precision import promote
from persample.terms.products import multiply
from persample.terms.sketch import make_generator

# Parameters that would get fewer numbers share theirs: an estimate from few numbers is of little use.
MIN_NUMBERS = 8

# The share of a parameter grows with this power of its size. Small layers may have large gradients: with 1/2, the error
# of cosines for 512 numbers is 0.62 for a bag of words with a table of 20,000 rows, with 1/3 it is 0.09, and no worse
# elsewhere (0.06 to 0.12 in the other workloads of the benchmarks).
_EXPONENT = 1 / 3

# The size of a side after the projection: 32, or 64 for sides of 512 entries or more. Measured on a trained
# CNN with layers of 64 x 288 and 10 x 256 entries, for 512 numbers: if the smaller side of the first has 8, 16 or 32
# numbers, cosines have errors of 0.18, 0.12 or 0.08. Multiples of 16 run fastest: a convolution with 36 filters takes 3
# times as long as one with 32.
_SIDE, _WIDE_SIDE, _WIDE_COUNT, _MULTIPLE = 32, 64, 512, 16

# A weight whose columns would be more has several leading dimensions as rows: experts, for example.
_MAX_COLUMNS = 2**16


@dataclass(frozen=True)
class Sides:
    """The matrices for both sides of a gradient of `rows` rows and `columns` columns. None is the identity."""

    left: Tensor | None
    right: Tensor | None
    rows: int
    columns: int

    def multiply_left(self, vectors: Tensor) -> Tensor:
        """`(..., rows)` to `(..., k)`."""
        return _multiply_last(vectors, self.left)

    def multiply_right(self, vectors: Tensor) -> Tensor:
        """`(..., columns)` to `(..., m)`."""
        return _multiply_last(vectors, self.right)

    def multiply_dense(self, values: Tensor) -> Tensor:
        """`(batch, k, m)`: the projection of dense gradients, `(batch, *weight.shape)`."""
        product = self.multiply_right(values.reshape(len(values), self.rows, self.columns))
        # One product of two matrices takes less time than one product for each sample.
        return product if self.left is None else self.multiply_left(product.mT).mT

    def select_rows(self, start: int, stop: int) -> Sides:
        """The sides for the gradient of some rows. The left side must not be the identity."""
        if self.left is None:
            raise ValueError("The identity cannot be restricted to some rows.")
        return Sides(self.left[start:stop], self.right, stop - start, self.columns)


class KroneckerSketch:
    """The projection of the gradients of one weight to `size` numbers: exact if the weight has no more entries.

    `fold(term.multiply_sides(sides))` projects a term.
    """

    def __init__(self, size: int, seed: int, name: str, shape: torch.Size, device: torch.device) -> None:
        self.size = size
        rows, columns = split_shape(shape)
        k, m = _choose_sizes(rows, columns, size)
        left = _draw_side(rows, k, make_generator(seed, name, "rows"), device)
        right = _draw_side(columns, m, make_generator(seed, name, "columns"), device)
        self.sides = Sides(left, right, rows, columns)
        self._groups = _draw_groups(k * m, size, make_generator(seed, name, "groups"), device) if k * m > size else None

    def replace_sides(self, sides: Sides) -> KroneckerSketch:
        """The same projection with other matrices for both sides, of the same sizes."""
        other = copy.copy(self)
        other.sides = sides
        return other

    def fold(self, products: Tensor) -> Tensor:
        """`(batch, k, m)` to `(batch, size)`: entries are added up in groups, with signs. Missing entries are zeros."""
        entries = products.flatten(1)
        if self._groups is None:
            return F.pad(entries, (0, self.size - entries.shape[1]))
        order, signs = self._groups
        return (entries.index_select(1, order) * signs.to(entries.dtype)).view(len(entries), -1, self.size).sum(1)


def split_shape(shape: torch.Size) -> tuple[int, int]:
    """The numbers of rows and columns of the matrix that a weight is read as.

    >>> split_shape(torch.Size([64, 32, 3, 3])), split_shape(torch.Size([8, 512, 2048])), split_shape(torch.Size([7]))
    ((64, 288), (4096, 2048), (7, 1))
    """
    dims = 1
    while dims < len(shape) - 1 and shape[dims:].numel() > _MAX_COLUMNS:
        dims += 1
    return shape[:dims].numel(), shape[dims:].numel()


def allocate(size: int, shapes: Mapping[str, torch.Size]) -> dict[str, slice]:
    """Divide the `size` numbers of a projected row among parameters: the slice of each.

    Shares are in proportion to the cube roots of the numbers of entries. A parameter with no more entries than its
    share is exact: it gets as many numbers as it has entries, and the others share the rest. Parameters with shares
    below `MIN_NUMBERS` have one slice together, in which their projections are added up.

    >>> shapes = {"weight": torch.Size([64, 64]), "bias": torch.Size([4]), "head": torch.Size([10, 64])}
    >>> allocate(100, shapes)
    {'weight': slice(0, 62, None), 'bias': slice(62, 66, None), 'head': slice(66, 100, None)}
    """
    counts = {name: shape.numel() for name, shape in shapes.items() if shape.numel()}
    exact: dict[str, int] = {}
    while True:
        left = [name for name in counts if name not in exact]
        unit = (size - sum(exact.values())) / max(1e-9, sum(counts[name] ** _EXPONENT for name in left))
        shares = {name: unit * counts[name] ** _EXPONENT for name in left}
        fitting = {name: counts[name] for name in left if counts[name] <= shares[name]}
        if not fitting:
            break
        exact |= fitting
    owners = {name: name if name in exact or shares[name] >= MIN_NUMBERS else "" for name in counts}
    wanted: dict[str, float] = {}
    for name, owner in owners.items():
        wanted[owner] = wanted.get(owner, 0.0) + (exact[name] if name in exact else shares[name])
    sizes = _round_sizes(wanted, min(size, sum(counts.values())))
    slices, start = {}, 0
    for owner, count in sizes.items():
        slices[owner] = slice(start, start + count)
        start += count
    return {name: slices[owners[name]] for name in counts}


def _round_sizes(wanted: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers close to the wanted ones, of which each is at least 1 and whose sum is `total`."""
    sizes = {name: max(1, math.floor(value + 1e-6)) for name, value in wanted.items()}
    by_rest = sorted(wanted, key=lambda name: sizes[name] - wanted[name])
    for name in by_rest[: max(0, total - sum(sizes.values()))]:
        sizes[name] += 1
    sizes[max(sizes, key=lambda name: sizes[name])] -= max(0, sum(sizes.values()) - total)
    return sizes


def _choose_sizes(rows: int, columns: int, size: int) -> tuple[int, int]:
    """The sizes of both sides of a gradient after the projection: with at least `size` products if possible."""
    if size >= rows * columns:
        return rows, columns
    if 1 in (rows, columns):
        return min(rows, size), min(columns, size)
    factor = 1.0
    while True:
        k, m = (_choose_side(count, factor) for count in (rows, columns))
        if k * m >= size:
            return k, m
        factor *= 1.25


def _choose_side(count: int, factor: float) -> int:
    least = _WIDE_SIDE if count >= _WIDE_COUNT else _SIDE
    return min(count, math.ceil(least * factor / _MULTIPLE) * _MULTIPLE)


def _draw_side(count: int, size: int, generator: torch.Generator, device: torch.device) -> Tensor | None:
    """A random matrix `(count, size)` with orthogonal columns; None, which is the identity, if it would be square."""
    if size >= count:
        return None
    normal = torch.randn(count, size, generator=generator, dtype=torch.float64)
    orthogonal, upper = torch.linalg.qr(normal)
    # The signs make the result unique, also if another library computes it.
    return (orthogonal * upper.diagonal().sign() * math.sqrt(count / size)).to(device, torch.float32)


def _draw_groups(count: int, size: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random division of `count` entries into `size` groups: the entry at each place of a group, and its sign.

    Place j belongs to group j % size. Places without an entry have the sign 0.
    """
    places = -(-count // size) * size
    order, signs = torch.zeros(places, dtype=torch.long), torch.zeros(places)
    order[:count] = torch.randperm(count, generator=generator)
    signs[:count] = torch.randint(2, (count,), generator=generator).mul(2).sub(1)
    return order.to(device), signs.to(device)


def _multiply_last(vectors: Tensor, matrix: Tensor | None) -> Tensor:
    """`(..., n)` to `(..., m)` with a matrix `(n, m)`; None is the identity."""
    if matrix is None:
        return vectors
    vectors, matrix = promote(vectors, matrix)
    return multiply(vectors.reshape(-1, len(matrix)), matrix).view(*vectors.shape[:-1], matrix.shape[1])
