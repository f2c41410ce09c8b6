"""Patches of a grid: what a convolution contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
        grad = grad.flatten(3).unflatten(2, (self.groups, -1))
        # n sample, m image, g group, o/i channel out/in, p position, k place in the kernel
        per_group = torch.einsum("nmgop,nmgipk->ngoik", grad, patches.conj())
        return per_group.flatten(1, 2).unflatten(-1, tuple(self.kernel))

    def patches(self) -> Tensor:
        """`(batch, images, group, in, position, kernel)`: what the kernel saw at each position; a view but for padding."""
        widths = [width for before_after in reversed(self.padding) for width in before_after]
        windows = F.pad(self.input, widths)
        dims = len(self.kernel)
        for i, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(3 + i, gap * (size - 1) + 1, step)[..., ::gap]
        return windows.flatten(3 + dims).flatten(3, 2 + dims).unflatten(2, (self.groups, -1))
