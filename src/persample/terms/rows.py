"""Rows of a table: what an embedding contributes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample.terms.base import BLOCK, Term, promoted, squares, wide
from persample.terms.outer import Outer
from persample.terms.sketch import Sketch, TensorSketch


@dataclass(frozen=True)
class Rows(Term):
    """`g_n[ids[n, t]] += grad[n, t]`: each looked-up row of a table of `count` rows gets its gradient.

    `ids` is `(batch, t)`, `grad` is `(batch, t, width)`. Its answers need no more memory than the rows that were looked
    up, or the table itself.
    """

    ids: Tensor
    grad: Tensor
    count: int

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.count, self.grad.shape[2]])

    def dense(self) -> Tensor:
        batch, _, width = self.grad.shape
        sample = torch.arange(batch, device=self.ids.device).unsqueeze(1)
        table = self.grad.new_zeros(batch * self.count, width)
        table.index_add_(0, (sample * self.count + self.ids).flatten(), self.grad.flatten(0, 1))
        return table.unflatten(0, (batch, self.count))

    def some(self, start: int, stop: int) -> Rows:
        return Rows(self.ids[start:stop], self.grad[start:stop], self.count)

    def part(self, start: int, stop: int) -> Rows:
        inside = (self.ids >= start) & (self.ids < stop)
        ids = torch.where(inside, self.ids - start, 0)
        return Rows(ids, self.grad.masked_fill(~inside.unsqueeze(-1), 0), stop - start)

    def _looked_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """The different pairs of sample and row, and their gradients added up: (samples, ids, grads)."""
        sample = torch.arange(self.batch, device=self.ids.device).unsqueeze(1)
        pairs, which = (sample * self.count + self.ids).flatten().unique(return_inverse=True)
        grads = wide(self.grad).new_zeros(len(pairs), self.grad.shape[2])
        grads.index_add_(0, which, wide(self.grad).flatten(0, 1))
        return pairs // self.count, pairs % self.count, grads

    def squared_norms(self) -> Tensor:
        samples, _, grads = self._looked_up()
        of_pairs = squares(grads)
        return of_pairs.new_zeros(self.batch).index_add_(0, samples, of_pairs)

    def sum(self, weights: Tensor) -> Tensor:
        grad, weights = promoted(wide(self.grad), weights)
        table = grad.new_zeros(self.shape)
        return table.index_add_(0, self.ids.flatten(), (grad * weights[:, None, None]).flatten(0, 1))

    def dot(self, direction: Tensor) -> Tensor:
        grad, direction = promoted(wide(self.grad), wide(direction))
        return (grad.conj() * direction[self.ids]).real.sum((1, 2))

    def inner(self, other: Term) -> Tensor:
        if isinstance(other, Outer):  # an embedding tied to a head
            a, h, g = promoted(*map(wide, (other.input, other.grad, self.grad)))
            of_the_rows = h.gather(2, self.ids.unsqueeze(1).expand(-1, h.shape[1], -1))  # (batch, s, t)
            return ((a @ g.mT) * of_the_rows.conj()).real.sum((1, 2))
        return super().inner(other)

    def gram(self, other: Term, numbers: int = BLOCK) -> Tensor:
        if isinstance(other, Rows):  # rows that nobody looked up make no difference
            used, ids = torch.cat([self.ids.flatten(), other.ids.flatten()]).unique(return_inverse=True)
            own, others = ids.split([self.ids.numel(), other.ids.numel()])
            mine = Rows(own.view_as(self.ids), self.grad, len(used))
            return super(Rows, mine).gram(Rows(others.view_as(other.ids), other.grad, len(used)), numbers)
        return super().gram(other, numbers)

    def square_sum(self, numbers: int = BLOCK) -> Tensor:
        _, ids, grads = self._looked_up()
        return grads.new_zeros(self.shape).index_add_(0, ids, grads.abs().square())

    def project(self, sketch: Sketch) -> Tensor:
        if not isinstance(sketch, TensorSketch):
            return super().project(sketch)
        columns = sketch.columns(wide(self.grad))
        return torch.fft.irfft((columns * sketch.at(self.ids, columns)).sum(1), sketch.size)
