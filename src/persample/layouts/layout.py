"""Where the samples of a batch lie in a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from persample.layouts.divisors import Divisor

# How a loss combines the samples.
Reduction = Literal["sum", "mean", "unclear", "mixed"]


@dataclass(frozen=True)
class Layout:
    """The samples lie along one dimension of a tensor.

    Index j along `dim` belongs to sample `(j // inner) % batch`. This covers a batch dimension that was moved
    (`x.transpose(0, 1)`), merged with another one (`(B*T, D)` has inner T, `(T*B, D)` has inner 1), or repeated
    (`torch.cat([x, y])`). If the rows follow no such pattern (packed sequences, permutations), `ids` holds the sample
    of each index, -1 for a row that belongs to no sample.

    A tensor without dimensions has dim 0. If it belongs to one sample, `ids` holds that sample.

    Attributes:
        alternatives: other layouts that the shape of an input allows too. Only functions that know the batch dimension
            of their arguments use them.
        loose: the order of the rows depends on all samples (rows selected by a mask, or sorted), so no row may be
            selected by its index. `ids` is always given.
        loose_index: the values of the tensor are indices of loose rows. The tensor may only be used as an index of
            loose rows.
        by_rank: a loose row that was selected by its index, or a tensor that is partly filled with such rows: other
            ops refuse it until all rows are written.
    """

    dim: int
    inner: int = 1
    ids: tuple[int, ...] | None = None
    alternatives: tuple[Layout, ...] = ()
    loose: bool = False
    loose_index: bool = False
    by_rank: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a layout is part of the key of every call, and `ids` may be long
        return hash((self.dim, self.inner, self.ids, self.alternatives, self.loose, self.loose_index, self.by_rank))

    @cached_property
    def is_pattern(self) -> bool:
        """Whether the rows follow the pattern (dim, inner), and nothing else is known about them."""
        is_marked = self.loose or self.loose_index or self.by_rank
        return self.ids is None and not self.alternatives and not is_marked

    @cached_property
    def token(self) -> object | None:
        """An object that stands for the pattern in keys and is hashed by identity; None if there is no pattern."""
        return _TOKENS.setdefault((self.dim, self.inner), object()) if self.is_pattern else None

    def get_ids(self, size: int, batch: int) -> tuple[int, ...]:
        """The sample of each of the `size` indices along `dim`, -1 for none."""
        if self.ids is not None:
            return self.ids
        return tuple((j // self.inner) % batch for j in range(size))


# By dim and inner. A pattern has always the same token.
_TOKENS: dict[tuple[int, int], object] = {}


@cache
def make_pattern(dim: int, inner: int = 1) -> Layout:
    """The layout with this pattern, always the same object: keys are compared by identity first."""
    return Layout(dim, inner)


@dataclass(frozen=True)
class Reduced:
    """A sum over the samples, such as a loss: it belongs to no single sample, but no samples are mixed yet.

    Attributes:
        cause: the function that added up the samples, as part of an error message.
        place: the module where it happened, in words.
        kind: "sum", or "mean" if the sum was divided by the batch size; "unclear" if it may be either; "mixed" if it is
            a sum in one part and a mean in another. `cause` says why.
        is_assumed: the sum was scaled by a number of which nothing is known, so that other parts of the loss may show
            that `kind` is the other one.
        entries: the number of entries that were added up for each entry of the tensor, 0 if it is not known.
        sizes: the sizes of what was added up, without that of the dimension of the samples.
        uneven: if samples had different numbers of rows in the sum: each sample's number of rows, and of entries.
        counts: nothing that was added up requires grad: a number of targets, the sum of a mask or of weights, or a
            function of such numbers. It may be the divisor of a loss.
        is_share: the sum was divided by numbers of all samples, which are in `divisors`; with `counts`, the tensor is
            the inverse of such a number.
        divisors: the numbers by which the sum was divided, or may be: those that `counts` holds, or the number of
            targets that a loss does not ignore.
    """

    cause: str
    place: str = ""
    kind: Reduction = "sum"
    entries: int = 0
    sizes: tuple[int, ...] = ()
    uneven: tuple[tuple[int, ...], ...] = ()
    counts: bool = False
    is_share: bool = False
    divisors: tuple[Divisor, ...] = field(default=(), compare=False)
    is_assumed: bool = False

    @property
    def is_clear(self) -> bool:
        """Whether it is known how the samples were combined."""
        return self.kind in ("sum", "mean")


@dataclass(frozen=True)
class Lost:
    """It is not known which sample an entry belongs to.

    Attributes:
        cause: the reason, as part of an error message.
        place: the module where it happened, in words.
        listing: the tensor lists the values that occur in the batch (the experts that any token is sent to). A loop
            over such a list is control flow, so each of its elements is a constant.
        sized: only the size of the tensor depends on the batch: `arange(lengths.max())`, padding to the longest. Each
            entry is a constant beside samples, but a sum of the entries is not.
        imported: the tensor was made from Python numbers or by numpy. As an index it is a constant, which selects
            rows whose samples are known.
    """

    cause: str
    place: str = ""
    listing: bool = False
    sized: bool = False
    imported: bool = False


@dataclass(frozen=True, eq=False)
class Scattered(Lost):
    """The entries of one sample do not lie along one dimension, but the sample of each entry is known.

    Attributes:
        ids: the sample of each entry, -1 for none.
        loose, loose_index: as for a `Layout`.
    """

    ids: Tensor = field(default_factory=lambda: torch.empty(0))
    loose: bool = False
    loose_index: bool = False

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, eq=False)
class Divided(Lost):
    """A tensor of samples that was divided by a number of all samples: weights that add up to one.

    In a sum over the samples that number is a divisor of the loss; elsewhere it mixes the samples.
    """

    layout: Layout = field(default_factory=lambda: Layout(0))
    divisors: tuple[Divisor, ...] = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class Crossed(Lost):
    """Each entry combines a row of one tensor with a row of another, along two dimensions: a matrix of all pairs.

    The entries that combine two rows of one sample, such as those on the diagonal, belong to that sample.

    Attributes:
        rows: where the samples lie in the rows of both tensors.
    """

    rows: tuple[Layout, Layout] = (Layout(0), Layout(1))


def lose_entries(where: Where | None) -> Where | None:
    """A plain `Lost` for a tensor of which entries are known; anything else as it is."""
    return Lost(where.cause, where.place) if isinstance(where, (Scattered, Divided, Crossed)) else where


# What is known about a tensor that depends on the batch; None instead of it: the tensor does not depend on the batch.
Where = Layout | Reduced | Lost


@dataclass(frozen=True)
class Owners:
    """The sample of each entry of a tensor (-1 for none), and the batch size."""

    ids: Tensor
    batch: int

    def group(self, owner: Tensor, *rows: Tensor) -> list[Tensor]:
        """Each `(N, ...)` as `(batch, n, ...)`: the rows of each sample, padded with zeros; `owner` is `(N,)`."""
        layout = make_layout(0, tuple(owner.tolist()), self.batch)
        return [split_samples(part, layout, self.batch) for part in rows]


# ---- split and join the samples ----


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
    ids = _make_ids(tensor, layout, batch)
    return tensor.index_select(layout.dim, (ids == sample).nonzero().flatten())


def replace_samples(tensor: Tensor, layout: Layout, samples: Sequence[int], batch: int) -> Tensor | None:
    """The tensor with the rows of sample n replaced by those of `samples[n]`; None if their numbers of rows differ.

    >>> replace_samples(torch.arange(6), Layout(dim=0, inner=3), [1, 0], batch=2)
    tensor([3, 4, 5, 0, 1, 2])
    """
    if not has_equal_shares(tensor, layout, batch):
        return None
    ids = _make_ids(tensor, layout, batch)
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
    ids = _make_ids(tensor, layout, batch)
    counts = torch.bincount(ids[ids >= 0], minlength=batch)
    return not bool((ids < 0).any()) and bool((counts == counts[0]).all())


def _make_ids(tensor: Tensor, layout: Layout, batch: int) -> Tensor:
    """The sample of each index along the dimension of a layout."""
    if layout.ids is not None:
        return torch.tensor(layout.ids, device=tensor.device)
    return torch.arange(tensor.shape[layout.dim], device=tensor.device) // layout.inner % batch


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


# ---- layouts as tensors of sample ids ----


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
    size = tensor.shape[where.dim] if tensor.dim() else 1
    row = torch.tensor(where.get_ids(size, batch), dtype=torch.int32, device=tensor.device)
    if tensor.dim() == 0:
        return row.squeeze(0)
    return row.view(size, *[1] * (tensor.dim() - where.dim - 1)).expand(tensor.shape)


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
    if isinstance(where, Crossed):
        first, second = (add_samples_to_layout(rows, shape, before, batch) for rows in where.rows)
        assert isinstance(first, Layout) and isinstance(second, Layout)
        return replace(where, rows=(first, second))
    if isinstance(where, Divided):
        layout = add_samples_to_layout(where.layout, shape, before, batch)
        assert isinstance(layout, Layout)
        return replace(where, layout=layout)
    if not isinstance(where, Layout) or where.ids is not None or not shape:
        return where
    made = make_layout(where.dim, where.get_ids(shape[where.dim], before), batch, where.loose)
    return replace(made, loose_index=where.loose_index, by_rank=where.by_rank)


def iterate_patterns(dim: int, size: int, batch: int) -> Iterator[Layout]:
    """All layouts without `ids` that the samples can have in a dimension of this size."""
    rows, rest = divmod(size, batch)
    yield from (Layout(dim, inner) for inner in range(1, rows + 1) if rest == 0 and rows % inner == 0)
