"""Patches of a grid: what a convolution contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.terms.base import Term, promoted, sum_of, wide
from persample.terms.cost import cheaper_way
from persample.terms.sketch import Sketch, TensorSketch


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

    def dense(self) -> Tensor:
        patches, grad = promoted(self.patches(), self._grads())
        per_group = grad @ patches.mT.conj()  # (batch, group, out, in * kernel)
        return per_group.flatten(1, 2).unflatten(-1, self.shape[1:])

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

    def patches(self) -> Tensor:
        """What each place of the kernel saw at each position: `(batch, group, in * kernel, images * positions)`."""
        windows = self._padded()
        for i, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(3 + i, gap * (size - 1) + 1, step)[..., ::gap]
        # (batch, images, in, *positions, *kernel), all of it a view: the kernel goes before the positions
        dims = len(self.kernel)
        positions, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        windows = windows.permute(0, 2, *kernel, 1, *positions).unflatten(1, (self.groups, -1))
        positions_in_all = self.input.shape[1] * self.grad.shape[3:].numel()
        return windows.reshape(self.batch, self.groups, self.shape[1:].numel(), positions_in_all)

    def _grads(self) -> Tensor:
        """`(batch, group, out, images * positions)`."""
        return self.grad.unflatten(2, (self.groups, -1)).flatten(4).permute(0, 2, 3, 1, 4).flatten(3)

    def _padded(self) -> Tensor:
        widths = [width for before_after in reversed(self.padding) for width in before_after]
        return F.pad(self.input, widths)

    def squared_norms(self) -> Tensor:
        positions = self.input.shape[1] * self.grad.shape[3:].numel()
        outputs, inputs = self.shape[0] // self.groups, self.shape[1:].numel()
        if cheaper_way(positions, inputs, outputs) == "dense":
            return super().squared_norms()
        a, g = promoted(wide(self.patches()), wide(self._grads()))
        return ((a.mT @ a.conj()) * (g.mH @ g)).real.sum((1, 2, 3))

    def sum(self, weights: Tensor) -> Tensor:
        if self.grad.is_complex():  # which the library's own weight gradient does not take
            return super().sum(weights)
        input, grad, weights = promoted(wide(self._padded()), wide(self.grad), weights)
        grad = grad * weights.view(-1, *[1] * (grad.dim() - 1))
        like = grad.new_empty(1).expand(self.shape)
        zeros = [0] * len(self.kernel)
        _, total, _ = torch.ops.aten.convolution_backward(
            grad.flatten(0, 1), input.flatten(0, 1), like, None, list(self.stride), zeros, list(self.dilation), False,
            zeros, self.groups, [False, True, False],
        )  # fmt: skip
        return total

    def dot(self, direction: Tensor) -> Tensor:
        input, grad, direction = promoted(wide(self._padded()), wide(self.grad), wide(direction))
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        out = conv(input.flatten(0, 1), direction, None, self.stride, 0, self.dilation, self.groups)
        return (grad.conj() * out.view(grad.shape)).real.flatten(1).sum(1)

    def project(self, sketch: Sketch) -> Tensor:
        if not isinstance(sketch, TensorSketch):
            return super().project(sketch)
        patches, grad = promoted(wide(self.patches()).conj(), wide(self._grads()))
        each = self.shape[0] // self.groups
        total = sum_of(
            (sketch.columns(patches[:, k].mT) * sketch.rows(grad[:, k].mT, k * each)).sum(1) for k in range(self.groups)
        )
        return torch.fft.irfft(total, sketch.size)


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
