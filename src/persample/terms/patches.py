"""The term of a convolution: patches of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.precision import promote, widen
from persample.terms.base import BLOCK_SIZE, Term, add_tensors, sum_squares
from persample.terms.cost import Algorithm, choose_patch_dense_algorithm, choose_patch_norm_algorithm
from persample.terms.dense import Dense, make_dense
from persample.terms.kronecker import Sides
from persample.terms.patch_algorithms import (
    compute_by_correlation,
    compute_by_gemm,
    compute_by_groups,
    compute_weight_gradient,
    convolve,
    has_many_positions,
    multiply_columns,
    multiply_patches_by_pixels,
    pad,
    prepare_input,
    split_groups,
    split_groups_last,
    split_positions,
    write_products,
)
from persample.terms.rounding import add_up_products, find_floor_of_products, find_floor_of_sums, find_lost_squares

if TYPE_CHECKING:
    from persample.terms.groups import Groups


@dataclass(frozen=True)
class Patches(Term):
    """`g_n = sum_p grad[n, :, p] ⊗ conj(patch[n, :, p])`, where p runs over the positions of the kernel.

    `input` is `(batch, images, in, *size)`, `grad` is `(batch, images, out, *positions)`. `padding` has the widths
    before and after each spatial dimension; a negative width crops. The channels are divided into `groups`, as in a
    convolution.
    """

    input: Tensor
    grad: Tensor
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[tuple[int, int]]
    dilation: Sequence[int]
    groups: int

    @property
    def batch(self) -> int:
        return self.grad.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.grad.shape[2], self.input.shape[2] // self.groups, *self.kernel])

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of positions, input channels, kernel offsets and outputs of one sample in one group."""
        outputs, channels, *kernel = self.shape
        positions = self.grad.shape[1] * self.grad.shape[3:].numel()
        return positions, channels, math.prod(kernel), outputs // self.groups

    def some(self, start: int, stop: int) -> Patches:
        return replace(self, input=self.input[start:stop], grad=self.grad[start:stop])

    def part(self, start: int, stop: int) -> Term:
        if self.groups == 1:
            return replace(self, grad=self.grad[:, :, start:stop])
        outputs, inputs = self.shape[0] // self.groups, self.input.shape[2] // self.groups
        first, last = start // outputs, -(-stop // outputs)  # the groups that contain these rows
        term = replace(
            self,
            input=self.input[:, :, first * inputs : last * inputs],
            grad=self.grad[:, :, first * outputs : last * outputs],
            groups=last - first,
        )
        whole_groups = start == first * outputs and stop == last * outputs
        return term if whole_groups else RowSlice(term, start - first * outputs, stop - first * outputs)

    def merge_samples(self, groups: Groups) -> Patches:
        return replace(self, input=groups.gather(self.input), grad=groups.gather_weighted(self.grad))

    # ---- dense gradients ----

    def dense(self) -> Tensor:
        algorithms = {"gemm": compute_by_gemm, "groups": compute_by_groups, "correlation": compute_by_correlation}
        return algorithms[self._choose_dense_algorithm()](self)

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        if self._choose_dense_algorithm() != "gemm" or out.dtype != self.dtype:
            return Dense(self.dense()).write(out, scale)
        return write_products(self if scale == 1 else replace(self, grad=self.grad * scale), out)

    def write_exact_rows(self, out: Tensor) -> None:
        is_symmetric = all(before == after >= 0 for before, after in self.padding)
        is_simple = self.groups == self.grad.shape[1] == 1 and len(self.kernel) == 2 and is_symmetric
        if not is_simple or self.input.is_complex() or self.grad.is_complex():
            return super().write_exact_rows(out)
        # For small tensors one call of the library is faster than views of windows.
        kernel, gaps, steps = tuple(self.kernel), tuple(self.dilation), tuple(self.stride)
        widths = tuple([before for before, _ in self.padding])
        patches = F.unfold(self.input.squeeze(1).double(), kernel, gaps, widths, steps)
        rows = torch.bmm(self.grad.squeeze(1).flatten(2).double(), patches.mT)
        out.copy_(rows.reshape(out.shape))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.input.dtype, self.grad.dtype)

    def _choose_dense_algorithm(self) -> Algorithm:
        return choose_patch_dense_algorithm(*self.sizes, self.dtype, self.grad.device) if self.batch else "gemm"

    def extract_patches(self) -> Tensor:
        """The input under the kernel at each position: `(batch, group, in * kernel, images * positions)`."""
        positions, channels, offsets, _ = self.sizes
        windows = pad(self.input, self.padding)
        for i, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(3 + i, gap * (size - 1) + 1, step)[..., ::gap]
        # A view (batch, images, in, *positions, *kernel); move the kernel in front of the positions.
        dims = len(self.kernel)
        windows = windows.permute(0, 2, *range(3 + dims, 3 + 2 * dims), 1, *range(3, 3 + dims))
        return windows.reshape(self.batch, self.groups, channels * offsets, positions)

    # ---- answers ----

    def compact(self) -> Term:  # times=2: computing the dense form again for a sum costs more than the memory
        return make_dense(self, times=2) if self.choose_norm_algorithm() == "dense" else self

    def squared_norms(self) -> Tensor:
        if self.choose_norm_algorithm() == "dense":
            return super().squared_norms()
        squares = torch.cat([products.real.sum((1, 2, 3)) for products in self._iterate_products()])
        return squares.add_(self._find_lost_squares())

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None, Term]:
        if self.choose_norm_algorithm() == "dense":
            squares, _, term = super().measure(compact, summed)
            return squares, self._find_floor_of_sums() if term is self and summed else None, term
        sums = [add_up_products(products) for products in self._iterate_products()]
        size = torch.cat([size for _, size in sums])
        squares = torch.cat([squares for squares, _ in sums]).add_(self._find_lost_squares())
        return squares, find_floor_of_products(size, self._length), self

    @property
    def _length(self) -> int:
        """The number of entries of the vectors in inner products of positions."""
        return max(self.shape[0] // self.groups, self.shape[1:].numel())

    def _find_lost_squares(self) -> Tensor:
        """What norms from inner products of positions can lose to underflow."""
        positions, offsets = self.sizes[0], math.prod(self.kernel)  # a pixel is part of at most `offsets` patches
        input, grad = sum_squares(widen(self.input)), sum_squares(widen(self.grad))
        return find_lost_squares(input * (positions * offsets), grad * positions, self._length)

    def _find_floor_of_sums(self) -> Tensor:
        """The floor of norms from the dense form: the size of a group is at most the product of its factors' norms.

        A pixel of the input is part of at most `patches` patches.
        """
        patches = math.prod(-(-size // step) for size, step in zip(self.kernel, self.stride, strict=True))
        input, grad = promote(widen(self.input), widen(self.grad))
        sizes = [torch.linalg.vector_norm(split_groups(self, t), dim=(2, 3)).square() for t in (input, grad)]
        return find_floor_of_sums((sizes[0] * sizes[1]).sum(1) * patches)

    def _iterate_products(self) -> Iterator[Tensor]:
        """`(samples, group, p, q)`, in blocks of samples: the inner products of what the positions contribute."""
        algorithm = self.choose_norm_algorithm()
        points = self._pixels if algorithm == "pixels" else self.sizes[0]
        step = max(1, BLOCK_SIZE // (self.groups * points**2))
        for start in range(0, max(1, self.batch), step):
            yield self.some(start, start + step)._multiply_positions(algorithm)

    def choose_norm_algorithm(self) -> Algorithm:
        """The algorithm of `squared_norms`."""
        return choose_patch_norm_algorithm(self._pixels, *self.sizes)

    @property
    def _pixels(self) -> int:
        return self.input.shape[1] * self.input.shape[3:].numel()

    def _multiply_positions(self, algorithm: Algorithm) -> Tensor:
        input, grad = promote(widen(self.input), widen(self.grad))
        term = replace(self, input=input, grad=grad)
        if algorithm == "pixels":
            patch_products = multiply_patches_by_pixels(term)
        else:
            patch_products = multiply_columns(term.extract_patches())
        return patch_products.mul_(multiply_columns(split_groups(term, grad)).conj())

    def sum(self, weights: Tensor) -> Tensor:
        # The library has no complex weight gradient, and a slow one for groups of one channel.
        if self.grad.is_complex() or self._choose_dense_algorithm() == "correlation":
            return super().sum(weights)
        if has_many_positions(self):
            return add_tensors(part.sum(weights) for part in split_positions(self))
        padded, padding = prepare_input(self)
        input, grad, weights = promote(widen(padded), widen(self.grad), weights)
        grad = grad * weights.view(-1, *[1] * (grad.dim() - 1))
        return compute_weight_gradient(self, input.flatten(0, 1), grad.flatten(0, 1), padding, self.groups)

    def dot(self, direction: Tensor) -> Tensor:
        padded, padding = prepare_input(self)
        input, grad, direction = promote(widen(padded), widen(self.grad), widen(direction))
        out = convolve(self, input.flatten(0, 1), direction, self.stride, padding, self.dilation, self.groups)
        return (grad.conj() * out.view(grad.shape)).real.flatten(1).sum(1)

    def multiply_sides(self, sides: Sides) -> Tensor:
        # Both projections are convolutions: of the input with filters, and of the gradient with kernels of one point.
        if sides.rows != self.shape[0]:
            return super().multiply_sides(sides)
        padded, padding = prepare_input(self)
        input, grad = promote(widen(padded), widen(self.grad))
        right = torch.eye(sides.columns).to(input) if sides.right is None else sides.right.to(input.dtype)
        filters = right.mT.reshape(-1, *self.shape[1:]).repeat(self.groups, *[1] * (len(self.kernel) + 1))
        inputs = convolve(self, input.flatten(0, 1), filters, self.stride, padding, self.dilation, self.groups)
        left = torch.eye(sides.rows).to(input) if sides.left is None else sides.left.to(input.dtype)
        points = left.unflatten(0, (self.groups, -1)).mT.flatten(0, 1)
        points = points.view(*points.shape, *[1] * len(self.kernel))
        ones, zeros = [1] * len(self.kernel), [0] * len(self.kernel)
        grads = convolve(self, grad.flatten(0, 1), points, ones, zeros, ones, self.groups)
        return split_groups_last(self, grads) @ split_groups_last(self, inputs).mT


@dataclass(frozen=True)
class RowSlice(Term):
    """The rows `start` to `stop` of a term, sliced from its dense form."""

    term: Term
    start: int
    stop: int

    @property
    def batch(self) -> int:
        return self.term.batch

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.stop - self.start, *self.term.shape[1:]])

    def dense(self) -> Tensor:
        return self.term.dense()[:, self.start : self.stop]

    def merge_samples(self, groups: Groups) -> RowSlice | None:
        merged = self.term.merge_samples(groups)
        return None if merged is None else RowSlice(merged, self.start, self.stop)

    def some(self, start: int, stop: int) -> RowSlice:
        return RowSlice(self.term.some(start, stop), self.start, self.stop)

    def part(self, start: int, stop: int) -> RowSlice:
        return RowSlice(self.term, self.start + start, self.start + stop)
