"""Patches of a grid: what a convolution contributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.dtypes import promote, widen
from persample.terms.base import BLOCK, Term
from persample.terms.cost import Way, dense_of_patches, norms_of_patches
from persample.terms.dense import Dense, measured_densely


@dataclass(frozen=True)
class Patches(Term):
    """`g_n = sum_p grad[n, :, p] ⊗ conj(patch[n, :, p])`, p being the positions at which the kernel was applied.

    `input` is `(batch, images, in, *size)`, `grad` is `(batch, images, out, *positions)`; `padding` holds what was
    put before and after each dim. Channels come in `groups` that do not see each other.
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
        return len(self.grad)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.grad.shape[2], self.input.shape[2] // self.groups, *self.kernel])

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """How many positions, channels, places in the kernel and outputs one sample has in one group."""
        outputs, channels, *kernel = self.shape
        positions = self.grad.shape[1] * self.grad.shape[3:].numel()
        return positions, channels, math.prod(kernel), outputs // self.groups

    def some(self, start: int, stop: int) -> Patches:
        return replace(self, input=self.input[start:stop], grad=self.grad[start:stop])

    def part(self, start: int, stop: int) -> Term:
        each = self.shape[0] // self.groups
        first, last = start // each, -(-stop // each)  # the groups in which these rows lie
        if self.groups == 1:
            return replace(self, grad=self.grad[:, :, start:stop])
        inputs = self.input.shape[2] // self.groups
        some = replace(
            self,
            input=self.input[:, :, first * inputs : last * inputs],
            grad=self.grad[:, :, first * each : last * each],
            groups=last - first,
        )
        whole_groups = start == first * each and stop == last * each
        return some if whole_groups else Cut(some, start - first * each, stop - first * each)

    # ---- the gradients themselves ----

    def dense(self) -> Tensor:
        ways = {"gemm": self._by_gemm, "groups": self._by_groups, "correlation": self._by_correlation}
        return ways[self._dense_way()]()

    def write(self, out: Tensor, scale: float = 1.0) -> None:
        if self._dense_way() != "gemm" or out.dtype != self._dtype:
            return Dense(self.dense()).write(out, scale)
        return (self if scale == 1 else replace(self, grad=self.grad * scale))._multiply(out)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.input.dtype, self.grad.dtype)

    def _dense_way(self) -> Way:
        return dense_of_patches(*self._sizes, self._dtype, self.grad.device) if self.batch else "gemm"

    def _by_gemm(self) -> Tensor:
        result = self.grad.new_empty(self.batch, *self.shape, dtype=self._dtype)
        self._multiply(result)
        return result

    def _multiply(self, out: Tensor) -> None:
        """The gradients times the patches, for so few samples at a time that their patches stay in cache."""
        positions, channels, places, outputs = self._sizes
        step = max(1, BLOCK // max(1, self.groups * positions * channels * places))
        for start in range(0, self.batch, step):
            some, here = self.some(start, start + step), out[start : start + step]
            grad, patches = promote(some._by_group(some.grad).flatten(0, 1), some.patches().conj().flatten(0, 1))
            matrices = here.view(len(grad), outputs, channels * places)
            if channels * places % 8:  # products with 27 columns, say, take half as long again as those with 27 rows
                matrices.copy_(torch.bmm(patches, grad.mT).mT)
            else:
                torch.bmm(grad, patches.mT, out=matrices)

    def _by_groups(self) -> Tensor:
        """The library's weight gradient of a batch of one, in which each sample has channels of its own."""
        padded, padding = self._library_input()
        input, grad = (t.transpose(0, 1).flatten(1, 2) for t in promote(padded, self.grad))
        total = self._weight_gradient(input, grad, padding, self.batch * self.groups)
        return total.view(self.batch, *self.shape)

    def _by_correlation(self) -> Tensor:
        """Where each group is one channel: the input convolved with the gradient. What were steps are gaps now."""
        padded, padding = self._library_input()
        input, grad = (t.transpose(1, 2).flatten(0, 1) for t in promote(padded, self.grad))
        found = self._conv(input.flatten(0, 1)[None], grad, None, self.dilation, padding, self.stride, len(grad))
        for i, size in enumerate(self.kernel):
            found = found.narrow(2 + i, 0, size)  # where the steps left a rest, there are places behind the kernel
        return found.reshape(self.batch, *self.shape)

    def patches(self) -> Tensor:
        """What each place of the kernel saw at each position: `(batch, group, in * kernel, images * positions)`."""
        positions, channels, places, _ = self._sizes
        windows = _padded(self.input, self.padding)
        for i, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(3 + i, gap * (size - 1) + 1, step)[..., ::gap]
        # (batch, images, in, *positions, *kernel), all of it a view: the kernel goes before the positions
        dims = len(self.kernel)
        windows = windows.permute(0, 2, *range(3 + dims, 3 + 2 * dims), 1, *range(3, 3 + dims))
        return windows.reshape(self.batch, self.groups, channels * places, positions)

    def _by_group(self, tensor: Tensor) -> Tensor:
        """`(batch, images, channel, *points)` as `(batch, group, channel, images * points)`."""
        return tensor.unflatten(2, (self.groups, -1)).movedim(1, 3).flatten(3)

    # ---- answers ----

    def compute_norms_and_compact(self) -> tuple[Tensor, Term]:
        if self.choose_norm_algorithm() == "dense":  # to make it a second time, for a sum, costs more than some memory
            return measured_densely(self, times=2)
        return self.squared_norms(), self

    def squared_norms(self) -> Tensor:
        way = self.choose_norm_algorithm()
        if way == "dense":
            return super().squared_norms()
        points = self._pixels if way == "pixels" else self._sizes[0]
        step = max(1, BLOCK // (self.groups * points**2))
        starts = range(0, max(1, self.batch), step)
        return torch.cat([self.some(start, start + step)._ghost_norms(way) for start in starts])

    def choose_norm_algorithm(self) -> Way:
        """How the norms are computed."""
        return norms_of_patches(self._pixels, *self._sizes)

    @property
    def _pixels(self) -> int:
        return self.input.shape[1] * self.input.shape[3:].numel()

    def _ghost_norms(self, way: Way) -> Tensor:
        input, grad = promote(widen(self.input), widen(self.grad))
        term = replace(self, input=input, grad=grad)
        of_patches = term._products_by_pixels() if way == "pixels" else _products(term.patches())
        return (of_patches * _products(term._by_group(grad)).conj()).real.sum((1, 2, 3))

    def _products_by_pixels(self) -> Tensor:
        """`_products(self.patches())`: that of two patches is the sum of those of the pixels at each place in them."""
        images, size, dims = self.input.shape[1], self.input.shape[3:], len(self.kernel)
        products = _products(self._by_group(self.input)).view(self.batch, self.groups, *2 * (images, *size))
        for i, positions in enumerate(self.grad.shape[3:]):
            rows, columns = 3 + i, 4 + dims + i
            shape = list(products.shape)
            shape[rows] = shape[columns] = positions
            total = products.new_zeros(shape)
            for place in range(self.kernel[i]):
                seen = place * self.dilation[i] - self.padding[i][0]  # the pixel at this place of the first patch
                first = max(0, -(seen // self.stride[i]))  # the first patch that has a pixel there, not a padded zero
                pixel = seen + first * self.stride[i]
                count = min(positions - first, 1 + (size[i] - 1 - pixel) // self.stride[i])
                if count > 0:
                    there = slice(first, first + count)
                    here = slice(pixel, pixel + (count - 1) * self.stride[i] + 1, self.stride[i])
                    _at(there, total, rows, columns).add_(_at(here, products, rows, columns))
            products = total
        return products.flatten(3 + dims).flatten(2, 2 + dims)

    def sum(self, weights: Tensor) -> Tensor:
        if self.grad.is_complex() or self._dense_way() == "correlation":  # the library refuses these, or is slow
            return super().sum(weights)
        padded, padding = self._library_input()
        input, grad, weights = promote(widen(padded), widen(self.grad), weights)
        grad = grad * weights.view(-1, *[1] * (grad.dim() - 1))
        return self._weight_gradient(input.flatten(0, 1), grad.flatten(0, 1), padding, self.groups)

    def dot(self, direction: Tensor) -> Tensor:
        padded, padding = self._library_input()
        input, grad, direction = promote(widen(padded), widen(self.grad), widen(direction))
        out = self._conv(input.flatten(0, 1), direction, None, self.stride, padding, self.dilation, self.groups)
        return (grad.conj() * out.view(grad.shape)).real.flatten(1).sum(1)

    # ---- the library's own functions ----

    @property
    def _conv(self) -> Callable[..., Tensor]:
        return (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]

    def _weight_gradient(self, input: Tensor, grad: Tensor, padding: list[int], groups: int) -> Tensor:
        """The sum of what all images `(image, channel, *size)` contribute."""
        like = grad.new_empty(1).expand(grad.shape[1], *self.shape[1:])
        _, total, _ = torch.ops.aten.convolution_backward(
            grad, input, like, None, list(self.stride), padding, list(self.dilation), False, [0] * len(padding), groups,
            [False, True, False],
        )  # fmt: skip
        return total

    def _library_input(self) -> tuple[Tensor, list[int]]:
        """The input, and what the library has to pad: as much before as after, or nothing if that is done already."""
        if all(before == after >= 0 for before, after in self.padding):
            return self.input, [before for before, _ in self.padding]
        return _padded(self.input, self.padding), [0] * len(self.padding)


def _padded(input: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    widths = [width for before_after in reversed(padding) for width in before_after]
    return F.pad(input, widths) if any(widths) else input


def _products(vectors: Tensor) -> Tensor:
    """`(..., n, n)`: the inner products of the columns of `(..., size, n)`."""
    return vectors.mT @ vectors.conj()


def _at(where: slice, tensor: Tensor, *dims: int) -> Tensor:
    """The tensor at these indices along some of its dims."""
    return tensor[tuple(where if dim in dims else slice(None) for dim in range(tensor.dim()))]


@dataclass(frozen=True)
class Cut(Term):
    """Some rows of a term that cannot be cut there itself."""

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

    def some(self, start: int, stop: int) -> Cut:
        return Cut(self.term.some(start, stop), self.start, self.stop)

    def part(self, start: int, stop: int) -> Cut:
        return Cut(self.term, self.start + start, self.start + stop)
