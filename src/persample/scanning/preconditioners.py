"""Approximations of the second moment of one parameter's gradients, and their damped inverses.

A gradient is read as a matrix, as in `persample.terms.kronecker`: the first dimension of the weight by all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from persample.gradients import find_sides
from persample.scanning.damping import LEAST_PART
from persample.terms import Dense, Outer, Sides, Term, iterate_samples, split_shape, widen_factors

# A side with more entries, such as a vocabulary, is not rotated: its eigenvectors are taken to be the unit vectors.
LARGEST_SIDE = 4096

BLOCK_SIZE = 2**24  # entries of gradients that are rotated at once

# The rank of `Block`, which is exact for parameters with no more entries; and the most entries of its vectors.
LARGEST_RANK, LARGEST_BASIS = 1024, 2**26


class Preconditioner(ABC):
    """An approximation of the second moment `M` of the gradients of one parameter.

    For each of `passes` passes over the data, call `fit` with the term of each batch, and `end_pass`. Then `apply`
    multiplies gradients by `(M + D)⁻¹`, where `D` is `damping` times the mean eigenvalue of `M`.

    >>> found = Diagonal(torch.Size([2]))
    >>> found.fit(Dense(torch.tensor([[1.0, 2.0], [1.0, 4.0]])))
    >>> found.end_pass()  # M has the diagonal 1, 10
    >>> found.apply(Dense(torch.ones(1, 2)), damping=1.0).dense()
    tensor([[0.1538, 0.0645]])
    """

    passes = 1

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self._sums: list[Tensor] = []
        self._count = 0.0
        self.mean = torch.zeros((), dtype=torch.float64)  # of the eigenvalues
        self.least_mean = 0.0  # what the mean counts as at least

    def fit(self, term: Term) -> None:
        """Add the gradients of some samples."""
        self.add(self.measure(term), term.batch)

    @abstractmethod
    def measure(self, term: Term) -> Sequence[Tensor]:
        """What this pass needs of some samples, summed over them."""

    def add(self, sums: Sequence[Tensor], count: int, weight: float = 1.0) -> None:
        """Add what `measure` returned for `count` samples of this weight; nothing for samples without a gradient."""
        parts = [weight * part for part in sums]
        if parts:
            self._sums = [own + part for own, part in zip(self._sums, parts, strict=True)] if self._sums else parts
        self._count += weight * count

    def end_pass(self) -> None:
        """Read the means over all samples of the pass."""
        self.read_means([part.double() / (self._count or 1.0) for part in self._sums])
        self._sums, self._count = [], 0.0

    def damp(self, eigenvalues: Tensor, damping: float) -> Tensor:
        """The eigenvalues plus `damping` times their mean; never zero."""
        return eigenvalues + self.find_added(damping)

    def find_added(self, damping: float) -> Tensor:
        """What is added to each eigenvalue."""
        return (damping * self.mean.clamp(min=self.least_mean)).clamp(min=_TINY)

    @abstractmethod
    def read_means(self, means: Sequence[Tensor]) -> None:
        """Read the means over the samples of what `measure` returned."""

    def apply(self, term: Term, damping: float) -> Dense:
        """Gradients times `(M + D)⁻¹`."""
        rows = widen_factors(term).dense()
        return Dense(self.solve(rows.double(), damping).to(rows))

    @abstractmethod
    def solve(self, rows: Tensor, damping: float) -> Tensor:
        """`(count, *shape)`: dense gradients in float64 times `(M + D)⁻¹`."""

    def compute_squares(self, term: Term, damping: float) -> Tensor:
        """`(batch,)`: `g (M + D)⁻¹ g` for the gradient `g` of each sample."""
        step = max(1, BLOCK_SIZE // max(1, self.shape.numel()))
        parts = [term.some(start, min(start + step, term.batch)) for start in range(0, term.batch, step)]
        return torch.cat([self.apply(part, damping).inner(part) for part in parts])

    def compute_query_squares(self, term: Term, damping: float) -> Tensor:
        """`(batch,)`: the squared length of what the rows of `compute_squares` are multiplied with."""
        return self.compute_squares(term, damping)


class Identity(Preconditioner):
    """`M + D` is the identity."""

    passes = 0

    def measure(self, term: Term) -> Sequence[Tensor]:
        return []

    def read_means(self, means: Sequence[Tensor]) -> None:
        pass

    def solve(self, rows: Tensor, damping: float) -> Tensor:
        return rows

    def compute_squares(self, term: Term, damping: float) -> Tensor:
        return term.squared_norms()


class Diagonal(Preconditioner):
    """The diagonal of `M`."""

    def measure(self, term: Term) -> Sequence[Tensor]:
        return [term.square_sum()]

    def read_means(self, means: Sequence[Tensor]) -> None:
        (self._eigenvalues,) = means
        self.mean = self._eigenvalues.mean()

    def solve(self, rows: Tensor, damping: float) -> Tensor:
        return rows / self.damp(self._eigenvalues, damping)


class StepSizes(Preconditioner):
    """`(M + D)⁻¹` are step sizes that were given, such as those of Adam: the rows are steps, the queries gradients."""

    passes = 0

    def __init__(self, sizes: Tensor) -> None:
        super().__init__(sizes.shape)
        self._sizes = sizes.double()

    def measure(self, term: Term) -> Sequence[Tensor]:
        return []

    def read_means(self, means: Sequence[Tensor]) -> None:
        pass

    def solve(self, rows: Tensor, damping: float) -> Tensor:
        return rows * self._sizes

    def compute_squares(self, term: Term, damping: float) -> Tensor:
        return torch.cat([(block * self._sizes).flatten(1).square().sum(1) for _, (block,) in iterate_samples(term)])

    def compute_query_squares(self, term: Term, damping: float) -> Tensor:
        return term.squared_norms()


class Block(Preconditioner):
    """`M` itself for up to `LARGEST_RANK` entries, and for more its approximation of that rank.

    With random vectors as the columns of `V`, the approximation is `M V (Vᵀ M V)⁺ Vᵀ M` (Nyström): exact if the rank of
    `M` is no larger. All directions outside of it have the damping alone.
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(shape)
        size = shape.numel()
        self._drawn: Tensor | None = None
        if size > LARGEST_RANK:
            rank = max(1, min(LARGEST_RANK, LARGEST_BASIS // size))
            self._drawn = torch.randn(rank, size, generator=torch.Generator().manual_seed(0))

    def measure(self, term: Term) -> Sequence[Tensor]:
        products, trace = torch.zeros(()), torch.zeros(())
        for _, (block,) in iterate_samples(term):
            rows = block.reshape(len(block), self.shape.numel())
            drawn = rows if self._drawn is None else rows @ self._drawn.to(rows).mT
            products, trace = products + drawn.mT @ rows, trace + rows.square().sum()
        return [products, trace]

    def read_means(self, means: Sequence[Tensor]) -> None:
        products, trace = means
        self.mean = trace / max(1, self.shape.numel())
        inner = products if self._drawn is None else products @ self._drawn.to(products).mT
        root = _find_inverse_roots(inner) @ products  # M is approximately rootᵀ root
        self._vectors = _find_inverse_roots(root @ root.mT) @ root
        self._eigenvalues = (self._vectors @ root.mT).square().sum(1)

    def solve(self, rows: Tensor, damping: float) -> Tensor:
        flat, added = rows.reshape(len(rows), self.shape.numel()), self.find_added(damping)
        inside = flat @ self._vectors.mT
        outside = flat - inside @ self._vectors
        return (inside / (self._eigenvalues + added) @ self._vectors + outside / added).reshape(rows.shape)


class KFAC(Preconditioner):
    """`M` is the Kronecker product of one second moment for each side of the gradients (Martens and Grosse, 2015).

    Where a layer has inputs `a` and gradients `g` of its outputs, the sides are `g` and `a` at all positions. All other
    parameters, such as biases, norms, embeddings and weights of several layers, have the sides of their gradients. For
    a vector that is the full second moment. The product is scaled to the trace of `M`.
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(shape)
        self._rows, self._columns = split_shape(shape)
        self._vectors: list[Tensor | None] = [None, None]
        self._spectra: list[Tensor] = []

    def measure(self, term: Term) -> Sequence[Tensor]:
        totals: list[Tensor] = []
        for left, right in find_sides(term, self._rows, self._columns):
            parts = [multiply_own(left), multiply_own(right)]
            totals = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
        return [*totals, term.squared_norms().sum()]

    def read_means(self, means: Sequence[Tensor]) -> None:
        spectra: list[Tensor] = []
        *moments, trace = means
        for side, moment in enumerate(moments):
            if moment.dim() == 1:
                spectra.append(moment)
            else:
                values, self._vectors[side] = torch.linalg.eigh(moment)
                spectra.append(values.clamp(min=0))
        self._spectra = spectra
        rows, columns = spectra
        self._eigenvalues = rows[:, None] * columns * (trace / (rows.sum() * columns.sum()).clamp(min=_TINY))
        self.mean = self._eigenvalues.mean()

    def solve(self, rows: Tensor, damping: float) -> Tensor:
        left, right = self._vectors
        values = rows.reshape(len(rows), self._rows, self._columns)
        values = values if left is None else left.T @ values
        values = values if right is None else values @ right
        values = values / self.damp(self._eigenvalues, damping)
        values = values if left is None else left @ values
        values = values if right is None else values @ right.T
        return values.reshape(rows.shape)

    def whiten(self, sides: Sides, damping: float) -> Sides:
        """Sides that first multiply gradients by `(M + D)^(-1/2)`, with a part of `D` for each side of the product.

        The product is `m (R + r I) ⊗ (C + c I)` for the sides `R` and `C` of `M`, scaled to mean eigenvalues of 1. `r`
        and `c` are the root of the damping. A side with one entry has no part, so that the other has all of it.
        A left side with more than `LARGEST_SIDE` entries that is not projected stays as it is.
        """
        wide = [self._rows > 1 or self._columns == 1, self._columns > 1]
        parts = [damping ** (1 / max(1, sum(wide))) * is_wide for is_wide in wide]
        scales = [torch.ones(()), self.mean.clamp(min=self.least_mean).clamp(min=_TINY).rsqrt()]
        found: list[Tensor | None] = []
        for side, (drawn, count) in enumerate(((sides.left, sides.rows), (sides.right, sides.columns))):
            if drawn is None and count > LARGEST_SIDE and side == 0:
                found.append(None)
                continue
            spectrum, vectors = self._spectra[side], self._vectors[side]
            roots = scales[side] * (spectrum / spectrum.mean().clamp(min=_TINY) + parts[side]).clamp(min=_TINY).rsqrt()
            matrix = torch.eye(count, dtype=torch.float64) if drawn is None else drawn.to(roots)
            rotated = roots[:, None] * (matrix if vectors is None else vectors.T @ matrix)
            found.append((rotated if vectors is None else vectors @ rotated).float())
        return Sides(found[0], found[1], sides.rows, sides.columns)


class EKFAC(KFAC):
    """The eigenvectors of `KFAC`, with the second moments of the gradients along them (George et al., 2018)."""

    passes = 2

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(shape)
        self._sides: Sides | None = None

    def measure(self, term: Term) -> Sequence[Tensor]:
        if self._sides is None:
            return super().measure(term)
        step = max(1, BLOCK_SIZE // max(1, self.shape.numel()))
        parts = (term.some(start, min(start + step, term.batch)) for start in range(0, term.batch, step))
        total = torch.zeros(())
        for part in parts:
            total = total + part.multiply_sides(self._sides).square().sum(0)
        return [total]

    def read_means(self, means: Sequence[Tensor]) -> None:
        if self._sides is not None:
            (self._eigenvalues,) = means
            self.mean = self._eigenvalues.mean()
            return
        super().read_means(means)
        left, right = (side if side is None else side.to(means[0]) for side in self._vectors)
        self._sides = Sides(left, right, self._rows, self._columns)


Name = Literal["ekfac", "kfac", "block", "diagonal", "identity"]
PRECONDITIONERS: Mapping[Name, type[Preconditioner]] = {
    "ekfac": EKFAC,
    "kfac": KFAC,
    "block": Block,
    "diagonal": Diagonal,
    "identity": Identity,
}


def end_pass(fitted: Mapping[str, Preconditioner]) -> None:
    """End the pass of the preconditioners of all parameters.

    The gradient of a parameter may be zero but for rounding, such as that of the bias of keys in attention. Its mean
    eigenvalue counts as at least `LEAST_PART` of the mean of all, so that rounding errors stay small.
    """
    for own in fitted.values():
        own.end_pass()
    entries = sum(own.shape.numel() for own in fitted.values())
    total = sum((float(own.mean) * own.shape.numel() for own in fitted.values()), 0.0)
    for own in fitted.values():
        own.least_mean = LEAST_PART * total / max(1, entries)


def multiply_own(vectors: Tensor) -> Tensor:
    """The sum of the outer products of vectors `(..., n)` with themselves; its diagonal if `n` is large."""
    flat = vectors.flatten(0, -2)
    return flat.square().sum(0) if flat.shape[1] > LARGEST_SIDE else flat.mT @ flat


def compress(term: Dense, rank: int) -> Term:
    """The gradients as matrices of this rank; those that would not become smaller stay as they are.

    Three steps of subspace iteration give nearly the best approximation.

    >>> compress(Dense(torch.ones(1, 8, 8)), 2).dense().allclose(torch.ones(1, 8, 8), atol=1e-5)
    True
    """
    rows, columns = split_shape(term.shape)
    if rank * (rows + columns) >= rows * columns or rows != term.shape[0]:
        return term
    matrices = term.values.reshape(-1, rows, columns)
    right = torch.randn(columns, rank, generator=torch.Generator().manual_seed(0)).to(matrices)
    for _ in range(3):
        left = torch.linalg.qr(matrices @ right)[0]
        right = matrices.mT @ left
    return Outer(right.mT, left.mT)


def _find_inverse_roots(matrix: Tensor) -> Tensor:
    """`λ^(-1/2) vᵀ` for each eigenvalue and eigenvector of a positive matrix that is no rounding error."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > _ROUNDING * values[-1]
    return (vectors[:, kept] / values[kept].sqrt()).mT


_ROUNDING = 1e-10
_TINY = torch.finfo(torch.float64).tiny ** 0.5
