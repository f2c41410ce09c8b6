"""Split a tensor into its samples, and join samples to a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from persample.layouts.ids import make_layout, make_row_ids
from persample.layouts.layout import Layout


@dataclass(frozen=True)
class Owners:
    """The sample of each entry of a tensor (-1 for none), and the batch size."""

    ids: Tensor
    batch: int

    def group(self, owner: Tensor, *rows: Tensor) -> list[Tensor]:
        """Each `(N, ...)` as `(batch, n, ...)`: the rows of each sample, padded with zeros; `owner` is `(N,)`."""
        layout = make_layout(0, tuple(owner.tolist()), self.batch)
        return [split_samples(part, layout, self.batch) for part in rows]


def split_samples(tensor: Tensor, layout: Layout, batch: int, zeros: bool = True) -> Tensor:
    """The tensor with the samples in front: `(batch, *shape)`, where `dim` keeps only the rows of the sample.

    Sample n of `(T, B, D)` is a `(T, 1, D)`; of `(B*T, D)` it is a `(T, D)`. If samples have different numbers of rows,
    the shorter ones are padded: with zeros, which add nothing to a result that is linear in them, or without `zeros`
    with rows that exist, for functions that are not defined at zero. A sample without rows gets finite ones.

    >>> x = torch.arange(6).view(6, 1)                              # two samples of three rows each
    >>> split_samples(x, Layout(dim=0, inner=3), batch=2)[1].flatten()
    tensor([3, 4, 5])
    """
    dim = layout.dim
    if tensor.dim() == 0:
        return split_samples(tensor.unsqueeze(0), layout, batch, zeros).squeeze(1)
    if layout.ids is None and tensor.shape[dim] == batch:  # by far the most frequent case
        return tensor.movedim(dim, 0).unsqueeze(dim + 1) if dim else tensor.unsqueeze(1)
    if layout.ids is None:
        outer = tensor.shape[dim] // (batch * layout.inner)
        rows = tensor.unflatten(dim, (outer, batch, layout.inner)).movedim(dim + 1, 0)
        return rows.flatten(dim + 1, dim + 2)
    padded, is_real = _find_rows(layout.ids, batch)
    index = torch.tensor(padded, device=tensor.device, dtype=torch.long)
    rows = tensor.index_select(dim, index.flatten()).unflatten(dim, index.shape)
    if not zeros:
        without = [not any(real) for real in is_real]
        if any(without):
            mask = torch.tensor(without, device=tensor.device).view(-1, *[1] * (rows.dim() - dim - 1))
            rows = torch.where(mask & ~rows.isfinite(), 1, rows)
        return rows.movedim(dim, 0)
    mask = torch.tensor(is_real, device=tensor.device, dtype=torch.bool)
    mask = mask.view(*index.shape, *[1] * (tensor.dim() - dim - 1))
    return torch.where(mask, rows, torch.zeros((), dtype=rows.dtype, device=rows.device)).movedim(dim, 0)


def take_sample(tensor: Tensor, layout: Layout, sample: int, batch: int) -> Tensor:
    """The rows of one sample, as the tensor would be in a batch of that sample alone.

    >>> take_sample(torch.arange(6), Layout(dim=0, inner=3), 1, batch=2)
    tensor([3, 4, 5])
    """
    if tensor.dim() == 0:
        return tensor
    if layout.ids is None and tensor.shape[layout.dim] == batch:
        return tensor.narrow(layout.dim, sample, 1)
    ids = make_row_ids(tensor, layout, batch)
    return tensor.index_select(layout.dim, (ids == sample).nonzero().flatten())


def replace_samples(tensor: Tensor, layout: Layout, samples: Sequence[int], batch: int) -> Tensor | None:
    """The tensor with the rows of sample n replaced by those of `samples[n]`; None if their numbers of rows differ.

    >>> replace_samples(torch.arange(6), Layout(dim=0, inner=3), [1, 0], batch=2)
    tensor([3, 4, 5, 0, 1, 2])
    """
    if not has_equal_shares(tensor, layout, batch):
        return None
    ids = make_row_ids(tensor, layout, batch)
    order = ids.argsort(stable=True)  # the rows of sample 0, then those of sample 1, and so on
    index = torch.empty_like(order)
    index[order] = order.view(batch, -1)[torch.tensor(samples, device=order.device)].flatten()
    return tensor.index_select(layout.dim, index)


def has_equal_shares(tensor: Tensor, layout: Layout, batch: int) -> bool:
    """Whether all samples have the same number of rows, and each row belongs to a sample.

    >>> has_equal_shares(torch.arange(3), Layout(dim=0, ids=(0, 1, 1)), batch=2)
    False
    """
    if tensor.dim() == 0:
        return False
    ids = make_row_ids(tensor, layout, batch)
    counts = torch.bincount(ids[ids >= 0], minlength=batch)
    return not bool((ids < 0).any()) and bool((counts == counts[0]).all())


def join_samples(rows: Tensor, layout: Layout, shape: torch.Size, batch: int) -> Tensor:
    """The inverse of `split_samples`: from `(batch, ...)` back to `shape`. Rows that belong to no sample are zero.

    >>> x = torch.arange(12).view(2, 3, 2)
    >>> torch.equal(join_samples(split_samples(x, Layout(1), 3), Layout(1), x.shape, 3), x)
    True
    """
    dim = layout.dim
    if not shape:
        return join_samples(rows.unsqueeze(1), layout, torch.Size([1]), batch).squeeze(0)
    if layout.ids is None:
        return rows.unflatten(dim + 1, (-1, layout.inner)).movedim(0, dim + 1).reshape(shape)
    padded, is_real = _find_rows(layout.ids, batch)
    mask = torch.tensor(is_real, device=rows.device)
    index = torch.tensor(padded, device=rows.device)[mask]
    real_rows = rows.movedim(dim + 1, 1)[mask].movedim(0, dim)
    return rows.new_zeros(shape).index_copy(dim, index, real_rows)


def place_rows(rows: Tensor, layout: Layout, shape: torch.Size, batch: int) -> Tensor:
    """A `(batch, *shape)` that is zero, except that sample n has its rows at the indices where the layout has them.

    >>> place_rows(torch.ones(2, 1, 3), Layout(0), torch.Size([2, 3]), batch=2)[1]
    tensor([[0., 0., 0.],
            [1., 1., 1.]])
    """
    padded, is_real = _find_rows(layout.get_ids(shape[layout.dim], batch), batch)
    result = rows.new_zeros(batch, *shape)
    for n in range(batch):
        indices = [j for j, real in zip(padded[n], is_real[n], strict=True) if real]
        index = torch.tensor(indices, device=rows.device, dtype=torch.long)
        result[n].index_copy_(layout.dim, index, rows[n].narrow(layout.dim, 0, len(indices)))
    return result


def _find_rows(ids: tuple[int, ...], batch: int) -> tuple[list[list[int]], list[list[bool]]]:
    """For each sample the indices of its rows, padded to the same length, and for each index whether it is no padding.

    The padding repeats the last row of the sample, so that no sample gets infinities or NaN of another. A sample
    without rows gets those of the sample with the most rows.
    """
    rows: list[list[int]] = [[] for _ in range(batch)]
    for index, sample in enumerate(ids):
        if sample >= 0:
            rows[sample].append(index)
    longest = max(rows, key=len, default=[])
    padded = [own + own[-1:] * (len(longest) - len(own)) if own else longest for own in rows]
    is_real = [[True] * len(own) + [False] * (len(longest) - len(own)) for own in rows]
    return padded, is_real
