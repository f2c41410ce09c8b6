"""Where the samples of a batch lie in a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The samples lie along `dim`: index j there belongs to sample `(j // inner) % batch`.

    One pair of numbers covers a batch that was moved (`x.transpose(0, 1)`), merged from either side
    (`(B*T, D)` has inner T, `(T*B, D)` has inner 1), or doubled (`torch.cat([x, y])`). Where the rows follow
    no such pattern (packed sequences, a permutation), `ids` names the sample of every index, -1 for a row
    that belongs to none.

    `others` are layouts that an input's shape allows just as well; only a function that knows better asks for them.

    A tensor of one number has no dim; if it is of one sample, that sample is in `ids`.

    `loose`: which row stands at which index depends on all samples (rows picked by a mask, or sorted), so nothing may
    be chosen by its index; `ids` is given. `places`: the tensor's values are indices of a loose tensor's rows, so they
    may be used as an index of such, and for nothing else.
    """

    dim: int
    inner: int = 1
    ids: tuple[int, ...] | None = None
    others: tuple[Layout, ...] = ()
    loose: bool = False
    places: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # it is part of the key of every op that is looked up, and `ids` may be long
        return hash((self.dim, self.inner, self.ids, self.others, self.loose, self.places))

    def sample_of(self, size: int, batch: int) -> tuple[int, ...]:
        """The sample of each of the `size` indices along `dim`."""
        if self.ids is not None:
            return self.ids
        return tuple((j // self.inner) % batch for j in range(size))


@dataclass(frozen=True)
class Reduced:
    """A sum of the samples' own values, as a loss is: none of it belongs to one sample, but nothing is mixed yet."""

    cause: str
    place: str = ""


@dataclass(frozen=True)
class Lost:
    """It is not known which sample an entry belongs to; `cause` and `place` say why and since where.

    `listed`: it lists what occurs in the batch (the experts that any token goes to). To go through such a list is
    control flow: what stands in it is a constant then.
    """

    cause: str
    place: str = ""
    listed: bool = False


Where = Layout | Reduced | Lost


@dataclass(frozen=True)
class Owners:
    """The sample of each entry of a tensor (-1: of none), and how many samples there are."""

    ids: Tensor
    batch: int

    def group(self, owner: Tensor, *rows: Tensor) -> list[Tensor]:
        """Each `(N, ...)` as `(batch, n, ...)`: the rows of each sample, filled up with zeros; `owner` is `(N,)`."""
        layout = regular(0, tuple(owner.tolist()), self.batch)
        return [samples(part, layout, self.batch) for part in rows]


def samples(tensor: Tensor, layout: Layout, batch: int, zeros: bool = True) -> Tensor:
    """The tensor with the samples in front: `(batch, *shape)`, where `dim` has kept the sample's own rows.

    Sample n of `(T, B, D)` is a `(T, 1, D)`; of `(B*T, D)` a `(T, D)`. With explicit ids, samples with fewer rows
    than others are filled up with zeros, which contribute nothing to anything that is linear in a gradient; or with
    rows of others, which functions that do not take zeros take.

    >>> x = torch.arange(6).view(6, 1)                              # two samples of three rows each
    >>> samples(x, Layout(dim=0, inner=3), batch=2)[1].flatten()
    tensor([3, 4, 5])
    """
    dim = layout.dim
    if tensor.dim() == 0:  # of one sample
        return samples(tensor.unsqueeze(0), layout, batch, zeros).squeeze(1)
    if layout.ids is None and tensor.shape[dim] == batch:  # by far the most frequent
        return tensor.movedim(dim, 0).unsqueeze(dim + 1) if dim else tensor.unsqueeze(1)
    if layout.ids is None:
        outer = tensor.shape[dim] // (batch * layout.inner)
        rows = tensor.unflatten(dim, (outer, batch, layout.inner)).movedim(dim + 1, 0)
        return rows.flatten(dim + 1, dim + 2)
    where, filled = _positions(layout.ids, batch)
    index = torch.tensor(where, device=tensor.device, dtype=torch.long)
    rows = tensor.index_select(dim, index.flatten()).unflatten(dim, index.shape)
    if not zeros:
        return rows.movedim(dim, 0)
    present = torch.tensor(filled, device=tensor.device, dtype=torch.bool)
    present = present.view(*index.shape, *[1] * (tensor.dim() - dim - 1))
    return torch.where(present, rows, torch.zeros((), dtype=rows.dtype, device=rows.device)).movedim(dim, 0)


def joined(rows: Tensor, layout: Layout, shape: torch.Size, batch: int) -> Tensor:
    """The inverse of `samples`: from `(batch, ...)` back to `shape`, with zeros for rows that belong to no sample.

    >>> x = torch.arange(12).view(2, 3, 2)
    >>> torch.equal(joined(samples(x, Layout(1), 3), Layout(1), x.shape, 3), x)
    True
    """
    dim = layout.dim
    if not shape:
        return joined(rows.unsqueeze(1), layout, torch.Size([1]), batch).squeeze(0)
    if layout.ids is None:
        return rows.unflatten(dim + 1, (-1, layout.inner)).movedim(0, dim + 1).reshape(shape)
    where, filled = _positions(layout.ids, batch)
    index = torch.tensor(where, device=rows.device)[torch.tensor(filled, device=rows.device)]
    present = rows.movedim(dim + 1, 1)[torch.tensor(filled, device=rows.device)].movedim(0, dim)
    return rows.new_zeros(shape).index_copy(dim, index, present)


def place(rows: Tensor, layout: Layout, shape: torch.Size, batch: int) -> Tensor:
    """The inverse of `samples` for gradients: `(batch, *shape)` where sample n's rows stand at its own indices.

    >>> place(torch.ones(2, 1, 3), Layout(0), torch.Size([2, 3]), batch=2)[1]
    tensor([[0., 0., 0.],
            [1., 1., 1.]])
    """
    size = shape[layout.dim]
    where, filled = _positions(layout.sample_of(size, batch), batch)
    result = rows.new_zeros(batch, *shape)
    for n in range(batch):
        index = [j for j, there in zip(where[n], filled[n], strict=True) if there]
        at = torch.tensor(index, device=rows.device, dtype=torch.long)
        result[n].index_copy_(layout.dim, at, rows[n].narrow(layout.dim, 0, len(index)))
    return result


def _positions(ids: tuple[int, ...], batch: int) -> tuple[list[list[int]], list[list[bool]]]:
    """For each sample the indices of its rows, filled up with those of the sample that has most; and which are real."""
    rows: list[list[int]] = [[] for _ in range(batch)]
    for position, sample in enumerate(ids):
        if sample >= 0:
            rows[sample].append(position)
    most = max(rows, key=len, default=[])
    where = [r + most[len(r) :] for r in rows]
    filled = [[True] * len(r) + [False] * (len(most) - len(r)) for r in rows]
    return where, filled


def sample_ids(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """For each entry of `tensor` the sample it belongs to, -1 for none.

    >>> sample_ids(torch.zeros(2, 3), Layout(1), batch=3)
    tensor([[0, 1, 2],
            [0, 1, 2]], dtype=torch.int32)
    """
    if not isinstance(where, Layout):
        return torch.full(tensor.shape, -1, dtype=torch.int32, device=tensor.device)
    size = tensor.shape[where.dim] if tensor.dim() else 1
    row = torch.tensor(where.sample_of(size, batch), dtype=torch.int32, device=tensor.device)
    if tensor.dim() == 0:
        return row.squeeze(0)
    return row.view(size, *[1] * (tensor.dim() - where.dim - 1)).expand(tensor.shape)


def laid_out_ids(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """The same in a memory laid out as the tensor's own, for what goes by strides; the rest is nobody's."""
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.full((numbers,), -1, dtype=torch.int32, device=tensor.device)
    lying = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return lying.copy_(sample_ids(tensor, where, batch))


def from_ids(ids: Tensor, batch: int, loose: bool = False) -> Layout | Lost | None:
    """The layout that a tensor of sample ids (-1 where an entry belongs to none) describes; None: to none at all.

    A tensor without entries has its no samples where it has no entries.

    >>> from_ids(torch.tensor([[0, 0], [1, 1], [2, 2]]), batch=3).dim
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
        most = ids.amax(rest) if rest else ids
        least = torch.where(ids < 0, batch, ids).amin(rest) if rest else ids
        if bool(((most == least) | (most < 0)).all()):
            return regular(dim, tuple(most.tolist()), batch, loose)
    return Lost("its entries of one sample do not lie along one dim")


def regular(dim: int, ids: tuple[int, ...], batch: int, loose: bool = False) -> Layout:
    """`ids` along `dim`, as a pattern where they follow one, and only one; loose rows follow none, but by chance.

    Rows that belong to no sample by what is in them (a constant written over a sample) belong to one by where they are.

    >>> regular(0, (0, -1, 2), batch=3) == Layout(dim=0)
    True
    """
    if loose:
        return Layout(dim, ids=ids, loose=True)
    each = len(ids) // batch
    patterns = (
        [Layout(dim, inner) for inner in range(1, each + 1) if each % inner == 0] if each * batch == len(ids) else []
    )
    fitting = [p for p in patterns if all(n in (-1, m) for n, m in zip(ids, p.sample_of(len(ids), batch), strict=True))]
    return fitting[0] if len(fitting) == 1 or (batch == 1 and fitting) else Layout(dim, ids=ids)
