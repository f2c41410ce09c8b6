"""Rows of a table: what an embedding contributes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal.dtypes import promote, widen
from persample.terms.base import BLOCK, Term, squares
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
        result = self.grad.new_empty(self.batch, *self.shape)
        self.write(result)
        return result

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        sample = torch.arange(self.batch, device=self.ids.device).unsqueeze(1)
        rows = self.grad if scale == 1 else self.grad * scale
        out.zero_().flatten(0, 1).index_add_(0, (sample * self.count + self.ids).flatten(), rows.flatten(0, 1).to(out))

    def some(self, start: int, stop: int) -> Rows:
        return Rows(self.ids[start:stop], self.grad[start:stop], self.count)

    def part(self, start: int, stop: int) -> Rows:
        inside = (self.ids >= start) & (self.ids < stop)
        ids = torch.where(inside, self.ids - start, 0)
        return Rows(ids, self.grad.masked_fill(~inside.unsqueeze(-1), 0), stop - start)

    def _places(self) -> Tensor:
        """For each position a number below batch * t, the same for equal rows of a sample and for none else."""
        batch, positions = self.ids.shape
        ordered, order = self.ids.sort(1)
        first = torch.arange(0, batch * positions, max(1, positions), device=self.ids.device).view(batch, 1)
        is_new = ordered[:, 1:] != ordered[:, :-1]
        numbers = torch.cat([first, first + is_new.cumsum(1)], 1)[:, :positions]
        return torch.empty_like(order).scatter_(1, order, numbers)

    def _added_up(self, places: Tensor) -> Tensor:
        """`(batch * t, width)`: the gradients of equal rows of a sample added up, at their places."""
        grad = widen(self.grad)
        return grad.new_zeros(places.numel(), grad.shape[2]).index_add_(0, places.flatten(), grad.flatten(0, 1))

    @property
    def _is_spread(self) -> bool:
        """Whether all positions of a sample have the same gradient, as a mean over them gives."""
        return self.batch > 0 and self.grad.shape[1] > 1 and self.grad.stride(1) == 0

    def _times(self, weights: Tensor) -> Tensor:
        """The gradients, those of each sample times its weight."""
        grad, weights = promote(widen(self.grad), weights)
        if self._is_spread:
            return (grad[:, :1] * weights[:, None, None]).expand_as(grad)
        return grad * weights[:, None, None]

    def squared_norms(self) -> Tensor:
        if self._is_spread:  # then how often each row was looked up is all there is to add up
            ones = Rows(self.ids, torch.ones_like(widen(self.grad).real[..., :1].contiguous()), self.count)
            return ones.squared_norms() * squares(widen(self.grad)[:, :1])
        return squares(self._added_up(self._places()).view(self.batch, *self.grad.shape[1:]))

    def sum(self, weights: Tensor) -> Tensor:
        rows = self._times(weights)
        return rows.new_zeros(self.shape).index_add_(0, self.ids.flatten(), rows.flatten(0, 1))

    def dot(self, direction: Tensor) -> Tensor:
        grad, direction = promote(widen(self.grad), widen(direction))
        return (grad.conj() * direction[self.ids]).real.sum((1, 2))

    def inner(self, other: Term) -> Tensor:
        if isinstance(other, Outer):  # an embedding tied to a head
            a, h, g = promote(*map(widen, (other.input, other.grad, self.grad)))
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
        places = self._places()
        added_up = self._added_up(places).abs().square()
        ids = places.new_zeros(places.numel()).scatter_(0, places.flatten(), self.ids.flatten())
        return added_up.new_zeros(self.shape).index_add_(0, ids, added_up)

    def project(self, sketch: Sketch) -> Tensor:
        if not isinstance(sketch, TensorSketch):
            return super().project(sketch)
        return sketch.of_rows(self.ids, widen(self.grad))
