"""How the answers of `Patches` are computed: by products of matrices, or by the library's convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.precision import promote
from persample.terms.base import BLOCK_SIZE, add_tensors
from persample.terms.products import MAX_LENGTH, multiply_stacks

if TYPE_CHECKING:
    from persample.terms.patches import Patches

# Positions for which the library's weight gradient is precise. It adds them up one after the other, and the error grows
# with their number if all are equal: measured, 3e-5 for images of 64 x 64 and 5e-4 for 256 x 256.
_MAX_ADDED = 4096


def compute_by_gemm(term: Patches) -> Tensor:
    result = term.grad.new_empty(term.batch, *term.shape, dtype=term.dtype)
    write_products(term, result)
    return result


def write_products(term: Patches, out: Tensor) -> None:
    """Write the products of `grad` with the patches into `out`, in blocks with patches that fit the cache."""
    positions, channels, offsets, outputs = term.sizes
    step = max(1, BLOCK_SIZE // max(1, term.groups * positions * channels * offsets))
    for start in range(0, term.batch, step):
        some, block = term.some(start, start + step), out[start : start + step]
        grad = split_groups(some, some.grad).flatten(0, 1)
        grad, patches = promote(grad, some.extract_patches().conj().flatten(0, 1))
        matrices = block.view(len(grad), outputs, channels * offsets)
        if channels * offsets % 8:  # a product with 27 columns takes 1.5 times as long as one with 27 rows
            matrices.copy_(multiply_stacks(patches, grad.mT).mT)
        elif positions > MAX_LENGTH:
            matrices.copy_(multiply_stacks(grad, patches.mT))
        else:
            torch.bmm(grad, patches.mT, out=matrices)


def compute_by_groups(term: Patches) -> Tensor:
    """The library's weight gradient for one image, with the channels of each sample as groups."""
    if has_many_positions(term):
        return add_tensors(compute_by_groups(part) for part in split_positions(term))
    padded, padding = prepare_input(term)
    input, grad = (t.transpose(0, 1).flatten(1, 2) for t in promote(padded, term.grad))
    total = compute_weight_gradient(term, input, grad, padding, term.batch * term.groups)
    return total.view(term.batch, *term.shape)


def compute_by_correlation(term: Patches) -> Tensor:
    """For groups of one channel: the input convolved with `grad`. Stride and dilation change roles."""
    padded, padding = prepare_input(term)
    input, grad = (t.transpose(1, 2).flatten(0, 1) for t in promote(padded, term.grad))
    result = convolve(term, input.flatten(0, 1)[None], grad, term.dilation, padding, term.stride, len(grad))
    for i, size in enumerate(term.kernel):  # the result is larger if the stride does not divide the input
        result = result.narrow(2 + i, 0, size)
    return result.reshape(term.batch, *term.shape)


def has_many_positions(term: Patches) -> bool:
    """Whether the library's weight gradient has to be computed in parts, because its error would be too large."""
    return term.sizes[0] > _MAX_ADDED and term.grad.shape[3] > 1


def split_positions(term: Patches) -> Iterator[Patches]:
    """Terms for blocks of rows of the positions, which add up to this one."""
    rows, size = term.grad.shape[3], term.input.shape[3]
    count = max(1, _MAX_ADDED * rows // term.sizes[0])
    for start in range(0, rows, count):
        stop = min(start + count, rows)
        before = term.padding[0][0] - start * term.stride[0]
        end = (stop - 1) * term.stride[0] + term.dilation[0] * (term.kernel[0] - 1) + 1 - term.padding[0][0]
        padding = [(before, end - size), *term.padding[1:]]
        yield replace(term, grad=term.grad[:, :, :, start:stop], padding=padding)


def convolve(
    term: Patches,
    images: Tensor,
    filters: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The library's convolution in the dimensions of the kernel."""
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[len(term.kernel) - 1]
    result: Tensor = function(images, filters, None, stride, padding, dilation, groups)
    return result


def compute_weight_gradient(term: Patches, input: Tensor, grad: Tensor, padding: list[int], groups: int) -> Tensor:
    """The weight gradient summed over all images `(image, channel, *size)`."""
    weight = grad.new_empty(1).expand(grad.shape[1], *term.shape[1:])  # only its shape is read
    _, total, _ = torch.ops.aten.convolution_backward(
        grad, input, weight, None, list(term.stride), padding, list(term.dilation), False, [0] * len(padding),
        groups, [False, True, False],
    )  # fmt: skip
    return total


def prepare_input(term: Patches) -> tuple[Tensor, list[int]]:
    """The input, and the padding for the library, which pads symmetrically. Other padding is applied here."""
    if all(before == after >= 0 for before, after in term.padding):
        return term.input, [before for before, _ in term.padding]
    return pad(term.input, term.padding), [0] * len(term.padding)


def split_groups_last(term: Patches, images: Tensor) -> Tensor:
    """`(batch * images, group * k, *points)` to `(batch, k, group * images * points)`."""
    split = images.reshape(term.batch, term.grad.shape[1], term.groups, -1, images.shape[2:].numel())
    return split.permute(0, 3, 2, 1, 4).flatten(2)


def multiply_patches_by_pixels(term: Patches) -> Tensor:
    """`multiply_columns(term.extract_patches())`, summed from inner products of pixels.

    The inner product of two patches is the sum, over the offsets in the kernel, of the inner products of the two
    pixels at that offset. The sum is taken over one spatial dimension at a time.
    """
    images, size, dims = term.input.shape[1], term.input.shape[3:], len(term.kernel)
    products = multiply_columns(split_groups(term, term.input)).view(term.batch, term.groups, *2 * (images, *size))
    for i, positions in enumerate(term.grad.shape[3:]):
        rows, columns = 3 + i, 4 + dims + i
        shape = list(products.shape)
        shape[rows] = shape[columns] = positions
        total = products.new_zeros(shape)
        for offset in range(term.kernel[i]):
            pixel = offset * term.dilation[i] - term.padding[i][0]  # at this offset in the first patch
            first = max(0, -(pixel // term.stride[i]))  # the first patch with a pixel here that is not padding
            pixel += first * term.stride[i]
            count = min(positions - first, 1 + (size[i] - 1 - pixel) // term.stride[i])
            if count > 0:
                patches = slice(first, first + count)
                pixels = slice(pixel, pixel + (count - 1) * term.stride[i] + 1, term.stride[i])
                _slice_dims(total, patches, rows, columns).add_(_slice_dims(products, pixels, rows, columns))
        products = total
    return products.flatten(3 + dims).flatten(2, 2 + dims)


def split_groups(term: Patches, tensor: Tensor) -> Tensor:
    """`(batch, images, channel, *points)` to `(batch, group, channel, images * points)`."""
    return tensor.unflatten(2, (term.groups, -1)).movedim(1, 3).flatten(3)


def pad(input: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    widths = [width for before_after in reversed(padding) for width in before_after]
    return F.pad(input, widths) if any(widths) else input


def multiply_columns(vectors: Tensor) -> Tensor:
    """`(..., n, n)`: the inner products of the columns of `(..., size, n)`."""
    return multiply_stacks(vectors.mT, vectors.conj())


def _slice_dims(tensor: Tensor, index: slice, *dims: int) -> Tensor:
    """The tensor with the same slice taken along several dimensions."""
    return tensor[tuple(index if dim in dims else slice(None) for dim in range(tensor.dim()))]
