"""The term of a convolution: patches of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.dtypes import promote, widen
from persample.terms.base import BLOCK_SIZE, Term, add_tensors, sum_squares
from persample.terms.cost import Algorithm, choose_patch_dense_algorithm, choose_patch_norm_algorithm
from persample.terms.dense import Dense, make_dense
from persample.terms.kronecker import Sides
from persample.terms.products import MAX_LENGTH, multiply_stacks
from persample.terms.rounding import add_up_products, find_floor_of_products, find_floor_of_sums, find_lost_squares

# Positions for which the library's weight gradient is precise. It adds them up one after the other, and the error grows
# with their number if all are equal: measured, 3e-5 for images of 64 x 64 and 5e-4 for 256 x 256.
_MAX_ADDED = 4096
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
    def _sizes(self) -> tuple[int, int, int, int]:
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
        algorithms = {
            "gemm": self._compute_by_gemm,
            "groups": self._compute_by_groups,
            "correlation": self._compute_by_correlation,
        }
        return algorithms[self._choose_dense_algorithm()]()

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        if self._choose_dense_algorithm() != "gemm" or out.dtype != self._dtype:
            return Dense(self.dense()).write(out, scale)
        return (self if scale == 1 else replace(self, grad=self.grad * scale))._multiply(out)

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
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.input.dtype, self.grad.dtype)

    def _choose_dense_algorithm(self) -> Algorithm:
        return choose_patch_dense_algorithm(*self._sizes, self._dtype, self.grad.device) if self.batch else "gemm"

    def _compute_by_gemm(self) -> Tensor:
        result = self.grad.new_empty(self.batch, *self.shape, dtype=self._dtype)
        self._multiply(result)
        return result

    def _multiply(self, out: Tensor) -> None:
        """Write the products of `grad` with the patches into `out`, in blocks with patches that fit the cache."""
        positions, channels, offsets, outputs = self._sizes
        step = max(1, BLOCK_SIZE // max(1, self.groups * positions * channels * offsets))
        for start in range(0, self.batch, step):
            some, block = self.some(start, start + step), out[start : start + step]
            grad = some._split_groups(some.grad).flatten(0, 1)
            grad, patches = promote(grad, some.extract_patches().conj().flatten(0, 1))
            matrices = block.view(len(grad), outputs, channels * offsets)
            if channels * offsets % 8:  # a product with 27 columns takes 1.5 times as long as one with 27 rows
                matrices.copy_(multiply_stacks(patches, grad.mT).mT)
            elif positions > MAX_LENGTH:
                matrices.copy_(multiply_stacks(grad, patches.mT))
            else:
                torch.bmm(grad, patches.mT, out=matrices)

    def _compute_by_groups(self) -> Tensor:
        """The library's weight gradient for one image, with the channels of each sample as groups."""
        if self._has_many_positions:
            return add_tensors(part._compute_by_groups() for part in self._split_positions())
        padded, padding = self._prepare_input()
        input, grad = (t.transpose(0, 1).flatten(1, 2) for t in promote(padded, self.grad))
        total = self._compute_weight_gradient(input, grad, padding, self.batch * self.groups)
        return total.view(self.batch, *self.shape)

    def _compute_by_correlation(self) -> Tensor:
        """For groups of one channel: the input convolved with `grad`. Stride and dilation change roles."""
        padded, padding = self._prepare_input()
        input, grad = (t.transpose(1, 2).flatten(0, 1) for t in promote(padded, self.grad))
        result = self._conv(input.flatten(0, 1)[None], grad, None, self.dilation, padding, self.stride, len(grad))
        for i, size in enumerate(self.kernel):  # the result is larger if the stride does not divide the input
            result = result.narrow(2 + i, 0, size)
        return result.reshape(self.batch, *self.shape)

    def extract_patches(self) -> Tensor:
        """The input under the kernel at each position: `(batch, group, in * kernel, images * positions)`."""
        positions, channels, offsets, _ = self._sizes
        windows = _pad(self.input, self.padding)
        for i, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(3 + i, gap * (size - 1) + 1, step)[..., ::gap]
        # A view (batch, images, in, *positions, *kernel); move the kernel in front of the positions.
        dims = len(self.kernel)
        windows = windows.permute(0, 2, *range(3 + dims, 3 + 2 * dims), 1, *range(3, 3 + dims))
        return windows.reshape(self.batch, self.groups, channels * offsets, positions)

    def _split_groups(self, tensor: Tensor) -> Tensor:
        """`(batch, images, channel, *points)` to `(batch, group, channel, images * points)`."""
        return tensor.unflatten(2, (self.groups, -1)).movedim(1, 3).flatten(3)

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
        positions, offsets = self._sizes[0], math.prod(self.kernel)  # a pixel is part of at most `offsets` patches
        input, grad = sum_squares(widen(self.input)), sum_squares(widen(self.grad))
        return find_lost_squares(input * (positions * offsets), grad * positions, self._length)

    def _find_floor_of_sums(self) -> Tensor:
        """The floor of norms from the dense form: the size of a group is at most the product of its factors' norms.

        A pixel of the input is part of at most `patches` patches.
        """
        patches = math.prod(-(-size // step) for size, step in zip(self.kernel, self.stride, strict=True))
        input, grad = promote(widen(self.input), widen(self.grad))
        sizes = [torch.linalg.vector_norm(self._split_groups(t), dim=(2, 3)).square() for t in (input, grad)]
        return find_floor_of_sums((sizes[0] * sizes[1]).sum(1) * patches)

    def _iterate_products(self) -> Iterator[Tensor]:
        """`(samples, group, p, q)`, in blocks of samples: the inner products of what the positions contribute."""
        algorithm = self.choose_norm_algorithm()
        points = self._pixels if algorithm == "pixels" else self._sizes[0]
        step = max(1, BLOCK_SIZE // (self.groups * points**2))
        for start in range(0, max(1, self.batch), step):
            yield self.some(start, start + step)._multiply_positions(algorithm)

    def choose_norm_algorithm(self) -> Algorithm:
        """The algorithm of `squared_norms`."""
        return choose_patch_norm_algorithm(self._pixels, *self._sizes)

    @property
    def _pixels(self) -> int:
        return self.input.shape[1] * self.input.shape[3:].numel()

    def _multiply_positions(self, algorithm: Algorithm) -> Tensor:
        input, grad = promote(widen(self.input), widen(self.grad))
        term = replace(self, input=input, grad=grad)
        if algorithm == "pixels":
            patch_products = term._multiply_patches_by_pixels()
        else:
            patch_products = _multiply_columns(term.extract_patches())
        return patch_products.mul_(_multiply_columns(term._split_groups(grad)).conj())

    def _multiply_patches_by_pixels(self) -> Tensor:
        """`_multiply_columns(self.extract_patches())`, summed from inner products of pixels.

        The inner product of two patches is the sum, over the offsets in the kernel, of the inner products of the two
        pixels at that offset. The sum is taken over one spatial dimension at a time.
        """
        images, size, dims = self.input.shape[1], self.input.shape[3:], len(self.kernel)
        products = _multiply_columns(self._split_groups(self.input)).view(self.batch, self.groups, *2 * (images, *size))
        for i, positions in enumerate(self.grad.shape[3:]):
            rows, columns = 3 + i, 4 + dims + i
            shape = list(products.shape)
            shape[rows] = shape[columns] = positions
            total = products.new_zeros(shape)
            for offset in range(self.kernel[i]):
                pixel = offset * self.dilation[i] - self.padding[i][0]  # at this offset in the first patch
                first = max(0, -(pixel // self.stride[i]))  # the first patch with a pixel here that is not padding
                pixel += first * self.stride[i]
                count = min(positions - first, 1 + (size[i] - 1 - pixel) // self.stride[i])
                if count > 0:
                    patches = slice(first, first + count)
                    pixels = slice(pixel, pixel + (count - 1) * self.stride[i] + 1, self.stride[i])
                    _slice_dims(total, patches, rows, columns).add_(_slice_dims(products, pixels, rows, columns))
            products = total
        return products.flatten(3 + dims).flatten(2, 2 + dims)

    def sum(self, weights: Tensor) -> Tensor:
        # The library has no complex weight gradient, and a slow one for groups of one channel.
        if self.grad.is_complex() or self._choose_dense_algorithm() == "correlation":
            return super().sum(weights)
        if self._has_many_positions:
            return add_tensors(part.sum(weights) for part in self._split_positions())
        padded, padding = self._prepare_input()
        input, grad, weights = promote(widen(padded), widen(self.grad), weights)
        grad = grad * weights.view(-1, *[1] * (grad.dim() - 1))
        return self._compute_weight_gradient(input.flatten(0, 1), grad.flatten(0, 1), padding, self.groups)

    def dot(self, direction: Tensor) -> Tensor:
        padded, padding = self._prepare_input()
        input, grad, direction = promote(widen(padded), widen(self.grad), widen(direction))
        out = self._conv(input.flatten(0, 1), direction, None, self.stride, padding, self.dilation, self.groups)
        return (grad.conj() * out.view(grad.shape)).real.flatten(1).sum(1)

    def multiply_sides(self, sides: Sides) -> Tensor:
        # Both projections are convolutions: of the input with filters, and of the gradient with kernels of one point.
        if sides.rows != self.shape[0]:
            return super().multiply_sides(sides)
        padded, padding = self._prepare_input()
        input, grad = promote(widen(padded), widen(self.grad))
        right = torch.eye(sides.columns).to(input) if sides.right is None else sides.right.to(input.dtype)
        filters = right.mT.reshape(-1, *self.shape[1:]).repeat(self.groups, *[1] * (len(self.kernel) + 1))
        inputs = self._conv(input.flatten(0, 1), filters, None, self.stride, padding, self.dilation, self.groups)
        left = torch.eye(sides.rows).to(input) if sides.left is None else sides.left.to(input.dtype)
        points = left.unflatten(0, (self.groups, -1)).mT.flatten(0, 1)
        points = points.view(*points.shape, *[1] * len(self.kernel))
        grads = self._conv(grad.flatten(0, 1), points, groups=self.groups)
        return self._split_groups_last(grads) @ self._split_groups_last(inputs).mT

    def _split_groups_last(self, images: Tensor) -> Tensor:
        """`(batch * images, group * k, *points)` to `(batch, k, group * images * points)`."""
        split = images.reshape(self.batch, self.grad.shape[1], self.groups, -1, images.shape[2:].numel())
        return split.permute(0, 3, 2, 1, 4).flatten(2)

    # ---- library functions ----

    @property
    def _has_many_positions(self) -> bool:
        """Whether the library's weight gradient has to be computed in parts, because its error would be too large."""
        return self._sizes[0] > _MAX_ADDED and self.grad.shape[3] > 1

    def _split_positions(self) -> Iterator[Patches]:
        """Terms for blocks of rows of the positions, which add up to this one."""
        rows, size = self.grad.shape[3], self.input.shape[3]
        count = max(1, _MAX_ADDED * rows // self._sizes[0])
        for start in range(0, rows, count):
            stop = min(start + count, rows)
            before = self.padding[0][0] - start * self.stride[0]
            end = (stop - 1) * self.stride[0] + self.dilation[0] * (self.kernel[0] - 1) + 1 - self.padding[0][0]
            padding = [(before, end - size), *self.padding[1:]]
            yield replace(self, grad=self.grad[:, :, :, start:stop], padding=padding)

    @property
    def _conv(self) -> Callable[..., Tensor]:
        return (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]

    def _compute_weight_gradient(self, input: Tensor, grad: Tensor, padding: list[int], groups: int) -> Tensor:
        """The weight gradient summed over all images `(image, channel, *size)`."""
        weight = grad.new_empty(1).expand(grad.shape[1], *self.shape[1:])  # only its shape is read
        _, total, _ = torch.ops.aten.convolution_backward(
            grad, input, weight, None, list(self.stride), padding, list(self.dilation), False, [0] * len(padding),
            groups, [False, True, False],
        )  # fmt: skip
        return total

    def _prepare_input(self) -> tuple[Tensor, list[int]]:
        """The input, and the padding for the library, which pads symmetrically. Other padding is applied here."""
        if all(before == after >= 0 for before, after in self.padding):
            return self.input, [before for before, _ in self.padding]
        return _pad(self.input, self.padding), [0] * len(self.padding)


def _pad(input: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    widths = [width for before_after in reversed(padding) for width in before_after]
    return F.pad(input, widths) if any(widths) else input


def _multiply_columns(vectors: Tensor) -> Tensor:
    """`(..., n, n)`: the inner products of the columns of `(..., size, n)`."""
    return multiply_stacks(vectors.mT, vectors.conj())


def _slice_dims(tensor: Tensor, index: slice, *dims: int) -> Tensor:
    """The tensor with the same slice taken along several dimensions."""
    return tensor[tuple(index if dim in dims else slice(None) for dim in range(tensor.dim()))]


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
