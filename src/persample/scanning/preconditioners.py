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
from persample.terms import Sides, Term, split_shape

# A side with more entries, such as a vocabulary, is not rotated: its eigenvectors are taken to be the unit vectors.
LARGEST_SIDE = 4096

BLOCK_SIZE = 2**24  # entries of gradients that are rotated at once


class Preconditioner(ABC):
    """An approximation of the second moment `M` of the gradients of one parameter.

    For each of `passes` passes over the data, call `fit` with the term of each batch, and `end_pass`. Then `apply`
    multiplies gradients by `(M + D)⁻¹`, where `D` is `damping` times the mean eigenvalue of `M`.
    """

    passes = 1

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self._sums: list[Tensor] = []
        self._count = 0

    def fit(self, term: Term) -> None:
        """Add the gradients of some samples."""
        self.add(self.measure(term), term.batch)

    @abstractmethod
    def measure(self, term: Term) -> Sequence[Tensor]:
        """What this pass needs of some samples, summed over them."""

    def add(self, sums: Sequence[Tensor], count: int) -> None:
        """Add what `measure` returned for `count` samples; nothing for samples without a gradient."""
        if sums:
            self._sums = [own + part for own, part in zip(self._sums, sums, strict=True)] if self._sums else list(sums)
        self._count += count

    def end_pass(self) -> None:
        """Read the means over all samples of the pass."""
        self.read_means([part.double() / max(1, self._count) for part in self._sums])
        self._sums, self._count = [], 0

    @abstractmethod
    def read_means(self, means: Sequence[Tensor]) -> None:
        """Read the means over the samples of what `measure` returned."""

    @abstractmethod
    def apply(self, rows: Tensor, damping: float) -> Tensor:
        """`(count, *shape)`: gradients times `(M + D)⁻¹`."""


class Identity(Preconditioner):
    """`M + D` is the identity."""

    passes = 0

    def measure(self, term: Term) -> Sequence[Tensor]:
        return []

    def read_means(self, means: Sequence[Tensor]) -> None:
        pass

    def apply(self, rows: Tensor, damping: float) -> Tensor:
        return rows


class Diagonal(Preconditioner):
    """The diagonal of `M`."""

    def measure(self, term: Term) -> Sequence[Tensor]:
        return [term.square_sum()]

    def read_means(self, means: Sequence[Tensor]) -> None:
        (self._eigenvalues,) = means

    def apply(self, rows: Tensor, damping: float) -> Tensor:
        return rows / damp(self._eigenvalues, damping).to(rows)


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

    def measure(self, term: Term) -> Sequence[Tensor]:
        totals: list[Tensor] = []
        for left, right in find_sides(term, self._rows, self._columns):
            parts = [multiply_own(left), multiply_own(right)]
            totals = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
        return [*totals, term.squared_norms().sum()]

    def read_means(self, means: Sequence[Tensor]) -> None:
        spectra = []
        *moments, trace = means
        for side, moment in enumerate(moments):
            if moment.dim() == 1:
                spectra.append(moment)
            else:
                values, self._vectors[side] = torch.linalg.eigh(moment)
                spectra.append(values.clamp(min=0))
        rows, columns = spectra
        self._eigenvalues = rows[:, None] * columns * (trace / (rows.sum() * columns.sum()).clamp(min=_TINY))

    def apply(self, rows: Tensor, damping: float) -> Tensor:
        left, right = self._vectors
        values = rows.double().reshape(len(rows), self._rows, self._columns)
        values = values if left is None else left.T @ values
        values = values if right is None else values @ right
        values = values / damp(self._eigenvalues, damping)
        values = values if left is None else left @ values
        values = values if right is None else values @ right.T
        return values.reshape(rows.shape).to(rows)


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
            return
        super().read_means(means)
        left, right = (side if side is None else side.to(means[0]) for side in self._vectors)
        self._sides = Sides(left, right, self._rows, self._columns)


Name = Literal["ekfac", "kfac", "diagonal", "dot"]
PRECONDITIONERS: Mapping[Name, type[Preconditioner]] = {
    "ekfac": EKFAC,
    "kfac": KFAC,
    "diagonal": Diagonal,
    "dot": Identity,
}


def damp(eigenvalues: Tensor, damping: float) -> Tensor:
    """The eigenvalues plus `damping` times their mean; never zero."""
    return eigenvalues + (damping * eigenvalues.mean()).clamp(min=_TINY)


def multiply_own(vectors: Tensor) -> Tensor:
    """The sum of the outer products of vectors `(..., n)` with themselves; its diagonal if `n` is large."""
    flat = vectors.flatten(0, -2)
    return flat.square().sum(0) if flat.shape[1] > LARGEST_SIDE else flat.mT @ flat


_TINY = torch.finfo(torch.float64).tiny ** 0.5
