"""Layouts as tensors of sample ids: the sample of each entry, -1 for none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample.layouts.layout import Crossed, Divided, Layout, Lost, Reduced, Scattered, Where


def make_sample_ids(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """For each entry of `tensor` the sample that it belongs to, -1 for none.

    >>> make_sample_ids(torch.zeros(2, 3), Layout(1), batch=3)
    tensor([[0, 1, 2],
            [0, 1, 2]], dtype=torch.int32)
    """
    if isinstance(where, Scattered):
        return where.ids
    if not isinstance(where, Layout):
        return torch.full(tensor.shape, -1, dtype=torch.int32, device=tensor.device)
    row = make_row_ids(tensor, where, batch)
    if tensor.dim() == 0:
        return row.squeeze(0)
    return row.view(-1, *[1] * (tensor.dim() - where.dim - 1)).expand(tensor.shape)


def make_row_ids(tensor: Tensor, where: Layout, batch: int) -> Tensor:
    """The sample of each index along the dimension of a layout."""
    size = tensor.shape[where.dim] if tensor.dim() else 1
    return torch.tensor(where.get_ids(size, batch), dtype=torch.int32, device=tensor.device)


def add_up_samples(entries: Tensor, where: Where | None, batch: int) -> Tensor:
    """`(batch,)`: the sum of the entries of each sample.

    >>> add_up_samples(torch.arange(6), Layout(0, ids=(0, 0, 1, 1, -1, 2)), batch=3)
    tensor([1, 5, 5])
    """
    owner = make_sample_ids(entries, where, batch).flatten().long()
    values = entries.flatten().masked_fill(owner < 0, 0)  # of no sample
    return torch.zeros(batch, dtype=entries.dtype, device=entries.device).index_add(0, owner.clamp(min=0), values)


def make_strided_ids(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """`make_sample_ids` in new memory with the strides of `tensor`, for views by strides. Gaps in the memory get -1."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.full((size,), -1, dtype=torch.int32, device=tensor.device)
    ids = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return ids.copy_(make_sample_ids(tensor, where, batch))


def find_layout_of_ids(ids: Tensor, batch: int, loose: bool = False) -> Layout | Lost | None:
    """The layout of a tensor, given the sample of each entry (-1 for none); None if no entry belongs to a sample.

    For an empty tensor, the batch dimension is its first dimension of size 0.

    >>> find_layout_of_ids(torch.tensor([[0, 0], [1, 1], [2, 2]]), batch=3).dim
    0
    """
    if ids.numel() == 0:
        return Layout(list(ids.shape).index(0), ids=(), loose=loose)
    if int(ids.max()) < 0:
        return None
    if ids.dim() == 0:
        return Layout(0, ids=(int(ids),))
    for dim in range(ids.dim()):
        rest = [d for d in range(ids.dim()) if d != dim]
        largest = ids.amax(rest) if rest else ids
        smallest = torch.where(ids < 0, batch, ids).amin(rest) if rest else ids
        if bool(((largest == smallest) | (largest < 0)).all()):
            return make_layout(dim, tuple(largest.tolist()), batch, loose)
    return Scattered("the entries of one sample do not lie along one dimension", ids=ids, loose=loose)


def make_layout(dim: int, ids: tuple[int, ...], batch: int, loose: bool = False) -> Layout:
    """The layout with these `ids` along `dim`, without `ids` if exactly one pattern `(dim, inner)` matches them.

    A row that belongs to no sample matches every pattern: a constant that was written over a sample stays in the
    place of that sample. Loose rows match a pattern only by chance, so they keep their `ids`.

    >>> make_layout(0, (0, -1, 2), batch=3) == Layout(dim=0)
    True
    """
    if loose:
        return Layout(dim, ids=ids, loose=True)
    matching = [
        pattern
        for pattern in iterate_patterns(dim, len(ids), batch)
        if all(n in (-1, m) for n, m in zip(ids, pattern.get_ids(len(ids), batch), strict=True))
    ]
    return matching[0] if len(matching) == 1 or (batch == 1 and matching) else Layout(dim, ids=ids)


def add_samples_to_layout(where: Where | None, shape: Sequence[int], before: int, batch: int) -> Where | None:
    """The layout of a tensor in a batch of which the first `before` samples were all samples until now.

    >>> add_samples_to_layout(Layout(0, inner=2), (4,), 2, 3).ids
    (0, 0, 1, 1)
    """
    if isinstance(where, Reduced) and before == 1:  # the loss of the first sample
        return make_layout(0, (0,) * shape[0], batch) if shape else Layout(0, ids=(0,))

    def add(layout: Layout) -> Layout:
        if layout.ids is not None or not shape:
            return layout
        made = make_layout(layout.dim, layout.get_ids(shape[layout.dim], before), batch, layout.loose)
        return replace(made, loose_index=layout.loose_index, by_rank=layout.by_rank)

    return map_layouts(where, add)


def map_layouts(where: Where | None, change: Callable[[Layout], Layout]) -> Where | None:
    """What is known about a tensor, with a function of each layout in its place."""
    if isinstance(where, Layout):
        return change(where)
    if isinstance(where, Crossed):
        return replace(where, rows=(change(where.rows[0]), change(where.rows[1])))
    return replace(where, layout=change(where.layout)) if isinstance(where, Divided) else where


def iterate_patterns(dim: int, size: int, batch: int) -> Iterator[Layout]:
    """All layouts without `ids` that the samples can have in a dimension of this size."""
    rows, rest = divmod(size, batch)
    yield from (Layout(dim, inner) for inner in range(1, rows + 1) if rest == 0 and rows % inner == 0)
