"""Patches of a grid: what a convolution contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from persample.terms.base import Term, promoted


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

    def dense(self) -> Tensor:
        patches, grad = promoted(self.patches(), self.grad)
        grad = grad.unflatten(2, (self.groups, -1)).flatten(4).permute(0, 2, 3, 1, 4).flatten(3)
        per_group = grad @ patches.mT.conj()  # (batch, group, out, in * kernel)
        return per_group.flatten(1, 2).unflatten(-1, (-1, *self.kernel))

    def patches(self) -> Tensor:
        """What each place of the kernel saw at each position: `(batch, group, in * kernel, images * positions)`."""
        widths = [width for before_after in reversed(self.padding) for width in before_after]
        windows = F.pad(self.input, widths)
        for i, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(3 + i, gap * (size - 1) + 1, step)[..., ::gap]
        # (batch, images, in, *positions, *kernel), all of it a view: the kernel goes before the positions
        dims = len(self.kernel)
        positions, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        windows = windows.permute(0, 2, *kernel, 1, *positions).unflatten(1, (self.groups, -1))
        return windows.reshape(*windows.shape[:2], -1, self.input.shape[1] * self.grad.shape[3:].numel())
