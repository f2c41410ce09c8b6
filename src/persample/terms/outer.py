"""The term of matrix products: sums of outer products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from persample._internal.precision import promote, to_double, widen
from persample.terms.base import BLOCK_SIZE, Term, sum_squares
from persample.terms.cost import choose_norm_algorithm, choose_sketch_algorithm
from persample.terms.dense import make_dense
from persample.terms.kronecker import Sides
from persample.terms.products import multiply, multiply_rows, multiply_stacks
from persample.terms.rounding import (
    add_lost_squares,
    add_up_products,
    find_floor_of_products,
    find_floor_of_sums,
    find_lost_squares,
)
from persample.terms.sketch import Sketch, TensorSketch

if TYPE_CHECKING:
    from persample.terms.groups import Groups


class SharedProducts:
    """The inner products of the positions of one gradient, for two terms that have it: computed by the first to ask.

    They are kept until the second asks. A term whose factors were changed or replaced has another gradient, and gets
    its own products.
    """

    def __init__(self, grad: Tensor) -> None:
        self._grad = grad
        self._kept: tuple[Tensor, int] | None = None  # with the version of the gradient

    def multiply(self, grad: Tensor) -> Tensor:
        """`(batch, t, t)`: the inner products of `grad`. The result must not be changed in place."""
        kept, self._kept = self._kept, None
        if grad is self._grad and kept is not None and kept[1] == grad._version:
            return kept[0]
        products = multiply_rows(grad).conj()
        if grad is self._grad:
            self._kept = products, grad._version
        return products


@dataclass(frozen=True)
class Outer(Term):
    """`g_n = sum_t grad[n, t] ⊗ conj(input[n, t])`, a matrix `(out, in)` for each sample.

    `input` is `(batch, t, in)`, the input of the product at each position t. `grad` is `(batch, t, out)`, the gradient
    of its output there. Terms with the same `grad` can share its inner products.
    """

    input: Tensor
    grad: Tensor
    shared: SharedProducts | None = None

    @property
    def batch(self) -> int:
        return self.grad.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.grad.shape[2], self.input.shape[2]])

    @property
    def positions(self) -> int:
        return self.grad.shape[1]

    def _widen_factors(self, *others: Tensor) -> tuple[Tensor, ...]:
        """`input`, `grad` and the others in one dtype that sums can be accumulated in."""
        return promote(*map(widen, (self.input, self.grad, *others)))

    def dense(self) -> Tensor:
        input, grad = promote(self.input, self.grad)
        return multiply_stacks(grad.mT, input.conj())

    def compute_exact_rows(self) -> Tensor:
        return torch.bmm(*promote(to_double(self.grad).mT, to_double(self.input).conj()))

    def write_exact_rows(self, out: Tensor) -> None:
        if self.positions != 1:
            return super().write_exact_rows(out)
        # One product for each entry, so nothing can cancel.
        out.copy_(torch.mul(self.grad.mT, self.input.conj()).reshape(out.shape))

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        if not self.input.dtype == self.grad.dtype == out.dtype or out.is_complex():
            return super().write(out, scale)
        grad = self.grad if scale == 1 else self.grad * scale
        if self.positions == 1:  # nothing to sum: the time goes into writing the result
            torch.mul(grad.mT, self.input, out=out)
        else:
            torch.bmm(grad.mT, self.input, out=out)

    def some(self, start: int, stop: int) -> Outer:
        return Outer(self.input[start:stop], self.grad[start:stop])

    def part(self, start: int, stop: int) -> Outer:
        return Outer(self.input, self.grad[..., start:stop])

    def merge_samples(self, groups: Groups) -> Outer:
        return Outer(groups.gather(self.input), groups.gather_weighted(self.grad))

    def compact(self) -> Term:
        return make_dense(self) if self._needs_dense else self

    @property
    def _needs_dense(self) -> bool:
        """Whether the norms are computed from the dense form."""
        return self.positions > 1 and choose_norm_algorithm(self.positions, *self.shape) == "dense"

    def squared_norms(self) -> Tensor:
        if self.positions == 1:
            input, grad = sum_squares(widen(self.input)), sum_squares(widen(self.grad))
            return add_lost_squares(input * grad, input, grad, max(self.shape))
        if self._needs_dense:
            return super().squared_norms()
        products, lost = self._multiply_own_positions()
        return products.real.sum((1, 2)) + lost

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        if self.positions <= 1:  # there is nothing to cancel
            return super().measure(compact, summed)
        if self._needs_dense:
            squares, _, term = super().measure(compact, summed)
            if term is not self or not summed:
                return squares, None, term
            input, grad = self._widen_factors()
            return squares, find_floor_of_sums(sum_squares(input) * sum_squares(grad)), self
        products, lost = self._multiply_own_positions()
        squares, size = add_up_products(products)
        return squares.add_(lost), find_floor_of_products(size, max(self.shape)), self

    def _multiply_own_positions(self) -> tuple[Tensor, Tensor]:
        """`_multiply_positions(self, self)`, and what their sum can lose to underflow."""
        a, g = self._widen_factors()
        inputs = multiply_rows(a)
        grads = multiply_rows(g).conj() if self.shared is None else self.shared.multiply(g)
        squares = [products.diagonal(dim1=1, dim2=2).real.sum(1) * self.positions for products in (inputs, grads)]
        return inputs.mul_(grads), find_lost_squares(squares[0], squares[1], max(self.shape))

    def inner(self, other: Term) -> Tensor:
        if not _can_multiply_positions(other, self):
            return super().inner(other)
        return _multiply_positions(self, other).real.sum((1, 2))

    def inner_and_size(self, other: Term) -> tuple[Tensor, Tensor]:
        if not _can_multiply_positions(other, self):
            return super().inner_and_size(other)
        return add_up_products(_multiply_positions(self, other))

    def sum(self, weights: Tensor) -> Tensor:
        input, grad, weights = self._widen_factors(weights)
        weights = weights[:, None, None]
        if input.stride(0) <= input.stride(1) and grad.stride(0) <= grad.stride(1):  # then `flatten` copies nothing
            input, grad, weights = input.transpose(0, 1), grad.transpose(0, 1), weights.transpose(0, 1)
        if grad.shape[2] <= input.shape[2]:  # scale the smaller factor
            grad = grad * weights
        else:
            input = input * weights
        return multiply(grad.flatten(0, 1).mT, input.flatten(0, 1).conj())

    def sum_each(self, weights: Tensor, count: int) -> Tensor:
        input, grad, weights = self._widen_factors(weights)
        parts = grad.unflatten(0, (count, -1)) * weights[:, None, None]
        return multiply_stacks(parts.flatten(1, 2).mT, input.unflatten(0, (count, -1)).flatten(1, 2).conj())

    def dot(self, direction: Tensor) -> Tensor:
        input, grad, direction = self._widen_factors(direction)
        if input.shape[2] < grad.shape[2]:  # the product with the fewer entries
            mapped = multiply(grad.flatten(0, 1), direction.conj())
            return (mapped.view(input.shape) * input.conj()).real.sum((1, 2))
        return (grad.conj() * multiply(input.flatten(0, 1), direction.mT).view(grad.shape)).real.sum((1, 2))

    def gram(self, other: Term, block_size: int = BLOCK_SIZE) -> Tensor:
        if not isinstance(other, Outer) or not _prefers_positions(self, other):
            return super().gram(other, block_size)
        size = self.positions * other.batch * other.positions
        step = max(1, block_size // max(1, size))
        if step < self.batch:
            starts = range(0, self.batch, step)
            return torch.cat([self.some(i, min(i + step, self.batch)).gram(other, block_size) for i in starts])
        a, g, b, h = (t.flatten(0, 1) for t in self._widen_factors(other.input, other.grad))
        products = (multiply(a, b.mH) * multiply(g.conj(), h.mT)).real
        if self.positions == other.positions == 1:
            return products
        return products.view(self.batch, self.positions, other.batch, other.positions).sum((1, 3))

    def square_sum(self, block_size: int = BLOCK_SIZE) -> Tensor:
        if self.positions != 1:  # the square of a sum over positions is not the sum of the squares
            return super().square_sum(block_size)
        input, grad = self._widen_factors()
        return grad.squeeze(1).abs().square().mT @ input.squeeze(1).abs().square()

    def project(self, sketch: Sketch) -> Tensor:
        if not isinstance(sketch, TensorSketch) or not self.positions:
            return super().project(sketch)
        if choose_sketch_algorithm(self.positions, sketch.size, *self.shape) == "dense":
            return super().project(sketch)
        input, grad = self._widen_factors()
        return torch.fft.irfft((sketch.transform_columns(input) * sketch.transform_rows(grad)).sum(1), sketch.size)

    def multiply_sides(self, sides: Sides) -> Tensor:
        if sides.rows != self.shape[0]:
            return super().multiply_sides(sides)
        input, grad = self._widen_factors()
        return sides.multiply_left(grad).mT @ sides.multiply_right(input)


def _multiply_positions(one: Outer, other: Outer) -> Tensor:
    """`(batch, t, s)`: the inner products of what the positions t of one term and s of the other contribute."""
    a, g, b, h = one._widen_factors(other.input, other.grad)
    return multiply_stacks(a, b.mH).mul_(multiply_stacks(g.conj(), h.mT))


def _can_multiply_positions(other: Term, one: Outer) -> TypeGuard[Outer]:
    return (
        isinstance(other, Outer) and choose_norm_algorithm(max(one.positions, other.positions), *one.shape) != "dense"
    )


def _prefers_positions(one: Outer, other: Outer) -> bool:
    """Whether all products of positions of two terms take fewer operations than the dense forms."""
    own, others = one.batch * one.positions, other.batch * other.positions
    if one.positions == other.positions == 1:
        return True
    dense = (own + others + one.batch * other.batch) * one.shape.numel()
    return own * others * sum(one.shape) < dense
