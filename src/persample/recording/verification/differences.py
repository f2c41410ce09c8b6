"""Compare the output of a sample in its batch with its output alone, with rounding in mind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.layouts import Layout, take_sample


@dataclass(frozen=True)
class Part:
    """An output of a model in which the samples lie in known places.

    Attributes:
        position: which of the tensors in the output it is.
        scale: the size of typical entries.
    """

    position: int
    tensor: Tensor
    layout: Layout
    scale: float


@dataclass(frozen=True)
class Difference:
    """The largest difference between two outputs of one sample.

    Attributes:
        relative: the difference, relative to the entry and the scale of the output.
        absolute: the difference itself.
        shape: the shape of that tensor in the batch.
    """

    relative: float
    absolute: float
    shape: tuple[int, ...]


def make_part(position: int, tensor: Tensor, layout: Layout) -> Part:
    """A part with the scale of its tensor."""
    return Part(position, tensor.detach(), layout, find_scale(tensor.detach()))


def find_scale(tensor: Tensor) -> float:
    """The largest of the typical entries, in absolute value.

    Entries a thousand times larger than the smaller ones are not typical: masked logits are often -1e4 or -1e9.

    >>> find_scale(torch.tensor([0.5, -2.0, 1.0, 0.0, -1e9]))
    2.0
    """
    every = max(1, tensor.numel() // 4096) | 1  # odd: the sizes of most dimensions are even
    sizes = tensor.reshape(-1)[::every].abs().double()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    if not len(sizes):
        return 0.0
    smaller = sizes.kthvalue((len(sizes) + 3) // 4).values
    return float(sizes[sizes <= 1000 * smaller].max())


def find_difference(
    parts: Iterable[Part], outputs: Mapping[int, Tensor], sample: int, batch: int, crop: bool = False
) -> Difference | None:
    """The largest difference between a sample's rows in a batch and its outputs by position; None if there is none.

    An output that has another number of entries alone is left out. With `crop`, one that is shorter alone, because it
    is padded to the longest sample of the batch, is compared with the first or the last entries in the batch.
    """
    found: Difference | None = None
    for part, own, alone in _take_rows(parts, outputs, sample, batch):
        candidates = [own] if own.numel() == alone.numel() else list_crops(own, alone.shape) if crop else []
        if candidates:
            relative, absolute = min(compute_difference(each, alone, part.scale) for each in candidates)
            if found is None or relative > found.relative:
                found = Difference(relative, absolute, tuple(part.tensor.shape))
    return found


def find_other_form(
    parts: Iterable[Part], outputs: Mapping[int, Tensor], sample: int, batch: int, tolerance: float
) -> tuple[int, ...] | None:
    """The shape of an output that is left out, unless it agrees with the first or last entries in the batch."""
    for part, own, alone in _take_rows(parts, outputs, sample, batch):
        crops = list_crops(own, alone.shape)
        is_close = any(compute_difference(crop, alone, part.scale)[0] <= tolerance for crop in crops)
        if own.numel() != alone.numel() and not is_close:
            return tuple(part.tensor.shape)
    return None


def _take_rows(
    parts: Iterable[Part], outputs: Mapping[int, Tensor], sample: int, batch: int
) -> Iterator[tuple[Part, Tensor, Tensor]]:
    """Each output with a sample's rows in a batch, some of which are finite, and its output by position."""
    for part in parts:
        own, alone = take_sample(part.tensor, part.layout, sample, batch), outputs.get(part.position)
        if alone is not None and own.isfinite().any():
            yield part, own, alone


def list_crops(tensor: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """The first and the last entries of a tensor, if `shape` is shorter in one dimension and equal in the others.

    >>> [crop.tolist() for crop in list_crops(torch.tensor([[1, 2, 3]]), (1, 2))]
    [[[1, 2]], [[2, 3]]]
    """
    dims = [d for d, (size, other) in enumerate(zip(tensor.shape, shape, strict=False)) if size != other]
    if 0 in shape or tensor.dim() != len(shape) or len(dims) != 1 or tensor.shape[dims[0]] < shape[dims[0]]:
        return []
    (dim,) = dims
    length = shape[dim]
    return [tensor.narrow(dim, start, length) for start in (0, tensor.shape[dim] - length)]


def compute_difference(one: Tensor, other: Tensor, scale: float) -> tuple[float, float]:
    """The largest difference of two tensors with equally many entries, relative to `scale` and absolute.

    >>> compute_difference(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]), 1.0)
    (0.25, 1.0)
    """
    wide = torch.promote_types(one.dtype, torch.float32)
    a, b = one.detach().reshape(-1).to(wide), other.detach().reshape(-1).to(wide)
    difference = (a - b).abs()
    relative = difference / (a.abs() + max(scale, torch.finfo(wide).tiny))
    if not math.isfinite(float(relative.max())):
        is_same = (a == b) | (a.isnan() & b.isnan())
        difference, relative = (
            part.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same, 0) for part in (difference, relative)
        )
    return float(relative.max()), float(difference.max())


def match_any_layout(one: Tensor, batch: Tensor, sample: int, size: int, tolerance: float) -> bool:
    """Whether a tensor of a sample alone, or of a batch of copies of it, agrees with that of a batch in some layout.

    Used where no layout is known. True if the shapes do not tell where the samples could lie.
    """
    if one.dim() != batch.dim() or not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return True
    scale = find_scale(batch)
    if one.shape == batch.shape and compute_difference(one, batch, scale)[0] <= tolerance:
        return True
    dims = [d for d in range(one.dim()) if one.shape[d] != batch.shape[d]]
    if len(dims) > 1 or (dims and batch.shape[dims[0]] != size * one.shape[dims[0]]):
        return True
    # With equal shapes, `one` is from a batch of copies, or the tensor is computed from all samples.
    for dim in dims or [d for d in range(one.dim()) if one.shape[d] % size == 0]:
        for layout in {Layout(dim, inner) for inner in (1, batch.shape[dim] // size)}:
            own = one if dims else take_sample(one, layout, sample, size)
            if compute_difference(own, take_sample(batch, layout, sample, size), scale)[0] <= tolerance:
                return True
    return False
