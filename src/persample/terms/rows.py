"""The term of an embedding: rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from persample._internal import host, tracing
from persample._internal.precision import promote, to_double, widen
from persample.terms.base import BLOCK_SIZE, Term, sum_squares
from persample.terms.kronecker import Sides
from persample.terms.outer import Outer
from persample.terms.products import multiply_stacks
from persample.terms.rounding import add_up_products, find_floor_of_sums
from persample.terms.sketch import Sketch, TensorSketch

# Rows that are added up one after the other in float32. The relative error of a sum of equal rows grows with their
# number: measured, 1e-5 for 600 rows and 1e-3 for 100,000.
_MAX_ADDED = 512
if TYPE_CHECKING:
    from persample.terms.groups import Groups


@dataclass(frozen=True)
class Rows(Term):
    """`g_n[ids[n, t]] += grad[n, t]`: the gradient of each row that was looked up in a table of `count` rows.

    `ids` is `(batch, t)`, `grad` is `(batch, t, width)`. No answer needs more memory than the rows that were looked up
    or one copy of the table.
    """

    ids: Tensor
    grad: Tensor
    count: int

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

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

    def write_exact_rows(self, out: Tensor) -> None:
        batch, width = self.batch, self.grad.shape[2]
        first = torch.arange(0, batch * self.count, self.count, device=self.ids.device).unsqueeze(1)
        rows = torch.zeros((batch * self.count, width), dtype=out.dtype, device=out.device)
        rows.index_add_(0, (self.ids + first).flatten(), self.grad.flatten(0, 1).to(out.dtype))
        out.copy_(rows.reshape(out.shape))

    def some(self, start: int, stop: int) -> Rows:
        return Rows(self.ids[start:stop], self.grad[start:stop], self.count)

    def part(self, start: int, stop: int) -> Rows:
        inside = (self.ids >= start) & (self.ids < stop)
        ids = torch.where(inside, self.ids - start, 0)
        return Rows(ids, self.grad.masked_fill(~inside.unsqueeze(-1), 0), stop - start)

    def merge_samples(self, groups: Groups) -> Rows:
        return Rows(groups.gather(self.ids), groups.gather_weighted(self.grad), self.count)

    def _number_lookups(self) -> Tensor:
        """`(batch, t)`: numbers below batch * t, equal only for lookups of the same row by the same sample."""
        batch, positions = self.ids.shape
        first = torch.arange(0, batch * positions, max(1, positions), device=self.ids.device).view(batch, 1)
        if self._are_ids_shared:
            return first + Rows(self.ids[:1], self.grad[:1], self.count)._number_lookups()
        ordered, order = self.ids.sort(1)
        is_new = ordered[:, 1:] != ordered[:, :-1]
        numbers = torch.cat([first, first + is_new.cumsum(1)], 1)[:, :positions]
        return torch.empty_like(order).scatter_(1, order, numbers)

    def _add_squared_counts(self) -> Tensor:
        """`(batch,)` or `(1,)`: the sum over the rows of the squared number of lookups by each sample."""
        ordered = (self.ids[:1] if self._are_ids_shared else self.ids).sort(1).values
        positions = ordered.shape[1]
        # Each of c equal lookups has the index of the first one: 2 (t - first) + 1, summed over them, is c².
        first = torch.searchsorted(ordered, ordered, out_int32=positions < 2**31)
        return positions**2 - 2 * first.sum(1)

    def _sum_equal_lookups(self, numbers: Tensor) -> Tensor:
        """`(batch * t, width)`: for each number, the sum of the gradients of the lookups with that number."""
        grad = widen(self.grad)
        return _add_rows(numbers.numel(), numbers.flatten(), grad.flatten(0, 1), most=numbers.shape[1])

    @property
    def _are_ids_shared(self) -> bool:
        """Whether all samples look up the same rows, such as embeddings of positions."""
        return self.batch > 1 and self.ids.stride(0) == 0

    @property
    def _is_constant(self) -> bool:
        """Whether all positions of a sample share one gradient, as after a mean over the positions."""
        return self.batch > 0 and self.grad.shape[1] > 1 and self.grad.stride(1) == 0

    def _scale_samples(self, weights: Tensor) -> Tensor:
        """`weights[n] grad[n]`."""
        grad, weights = promote(widen(self.grad), weights)
        if self._is_constant:
            return (grad[:, :1] * weights[:, None, None]).expand_as(grad)
        return grad * weights[:, None, None]

    def squared_norms(self) -> Tensor:
        if self._is_constant:  # |g_n|² is |grad|² times the sum of the squared lookup counts
            squares = sum_squares(widen(self.grad)[:, :1])
            return squares * self._add_squared_counts().to(squares.dtype)
        return sum_squares(self._sum_equal_lookups(self._number_lookups()).view(self.batch, *self.grad.shape[1:]))

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        squares, _, _ = super().measure(compact, summed)
        positions = self.grad.shape[1]
        if positions <= 1 or self._is_constant or not summed:  # equal gradients cannot cancel
            return squares, None, self
        return squares, find_floor_of_sums(sum_squares(widen(self.grad)) * positions), self

    def sum(self, weights: Tensor) -> Tensor:
        if self._are_ids_shared:
            grad, weights = promote(widen(self.grad), weights)
            rows = torch.tensordot(weights, grad, 1)
            return _add_rows(self.count, self.ids[0], rows, most=len(rows))
        rows = self._scale_samples(weights).flatten(0, 1)
        return _add_rows(self.count, self.ids.flatten(), rows, most=len(rows))

    def dot(self, direction: Tensor) -> Tensor:
        grad, direction = promote(widen(self.grad), widen(direction))
        return (grad.conj() * direction[self.ids]).real.sum((1, 2))

    def inner(self, other: Term) -> Tensor:
        if isinstance(other, Outer):  # an embedding tied to a head
            return self._multiply_positions(other).real.sum((1, 2))
        return super().inner(other)

    def inner_and_size(self, other: Term) -> tuple[Tensor, Tensor]:
        if isinstance(other, Outer):
            return add_up_products(self._multiply_positions(other))
        return super().inner_and_size(other)

    def _multiply_positions(self, other: Outer) -> Tensor:
        """`(batch, s, t)`: the inner products of what the lookups t and the positions s of the other contribute."""
        a, h, g = promote(*map(widen, (other.input, other.grad, self.grad)))
        looked_up = h.gather(2, self.ids.unsqueeze(1).expand(-1, h.shape[1], -1))
        return multiply_stacks(a, g.mT) * looked_up.conj()

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        if isinstance(other, Rows):  # restrict both to the rows that were looked up: all other rows are zero
            ids, count = _number_used(torch.cat([self.ids.flatten(), other.ids.flatten()]), self.count)
            own_ids, other_ids = ids.split([self.ids.numel(), other.ids.numel()])
            own = Rows(own_ids.view_as(self.ids), self.grad, count)
            return super(Rows, own).gram(Rows(other_ids.view_as(other.ids), other.grad, count), block_size)
        return super().gram(other, block_size)

    def square_sum(self, block_size: int = BLOCK_SIZE) -> Tensor:
        numbers = self._number_lookups()
        squares = self._sum_equal_lookups(numbers).abs().square()
        ids = numbers.new_zeros(numbers.numel()).scatter_(0, numbers.flatten(), self.ids.flatten())
        return squares.new_zeros(self.shape).index_add_(0, ids, squares)

    def project(self, sketch: Sketch) -> Tensor:
        if not isinstance(sketch, TensorSketch):
            return super().project(sketch)
        return sketch.project_rows(self.ids, widen(self.grad))

    def multiply_sides(self, sides: Sides) -> Tensor:
        if sides.left is None or sides.rows != self.count:
            return super().multiply_sides(sides)
        left, right = promote(sides.left[self.ids], sides.multiply_right(widen(self.grad)))
        return left.mT @ right


def _number_used(ids: Tensor, count: int) -> tuple[Tensor, int]:
    """Numbers in place of ids, equal for equal ids, and a bound of them, which is small if few ids occur."""
    if not host.decides_late(ids.device):
        used, numbers = ids.unique(return_inverse=True)
        return numbers, len(used)
    if len(ids) >= count:
        return ids, count
    ordered, order = ids.sort()
    numbers = (ordered.diff() != 0).cumsum(0)
    return torch.empty_like(order).scatter_(0, order, torch.cat([numbers.new_zeros(1), numbers])), len(ids)


def _add_rows(count: int, ids: Tensor, rows: Tensor, most: int) -> Tensor:
    """A table of `count` rows: for each id, the sum of the rows that have it. No id occurs more than `most` times."""
    total = rows.new_zeros(count, rows.shape[1]).index_add_(0, ids, rows)
    if most <= _MAX_ADDED or tracing.get_trace() is not None:
        return total
    if host.decides_late(ids.device):
        return to_double(rows).new_zeros(count, rows.shape[1]).index_add_(0, ids, to_double(rows)).to(rows.dtype)
    counts = ids.bincount(minlength=count)
    if counts.numel() and max(host.read_numbers(counts.amax())) > _MAX_ADDED:
        often = (counts > _MAX_ADDED).nonzero().squeeze(1)
        places = ids.new_full((count,), -1).index_copy_(0, often, torch.arange(len(often), device=ids.device))
        exact = to_double(total.new_zeros(len(often), rows.shape[1]))
        step = max(1, BLOCK_SIZE // max(1, rows.shape[1]))
        for some_ids, some in zip(places[ids].split(step), rows.split(step), strict=True):
            is_often = some_ids >= 0
            exact.index_add_(0, some_ids[is_often], to_double(some[is_often]))
        total[often] = exact.to(total.dtype)
    return total
