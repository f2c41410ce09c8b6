"""How an op that only moves entries moves the samples: applied to the numbers of the samples, it tells exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample.layout import Layout, Where, from_ids, regular
from persample.motion.kinds import MOVES, WRITES, T
from persample.motion.motion import Motion
from persample.motion.op import Op, results_of
from persample.tree import tensors_in


def by_ids(op: Op) -> Motion | None:
    """Exactly where a move put each entry; None where the samples themselves tell it where to."""
    carriers = [i for i in range(len(op.tensors)) if is_moved(op, i)]
    ids = {i: _sample_ids(op.tensors[i], op.where[i], op.batch) for i in carriers}
    moved = _moved(op, ids)
    found: list[Where | None] = [from_ids(m, op.batch) for m in moved]
    told_by_samples = any(where for i, where in enumerate(op.where) if i not in carriers)
    if told_by_samples and not _is_own_mask(op, moved[0]) and not _only_reorders(op, found[0], moved[0]):
        return None
    first = op.where[0]
    if isinstance(first, Layout) and first.others and carriers == [0] and op.func in MOVES:
        found[0] = _with_others(op, first, found[0])
    used = [i for i in carriers if op.where[i] is None and any(t.requires_grad for t in op.tensors)]
    following = [(i, layout) for i in used if (layout := _follows(op, i, ids, found)) is not None]
    return Motion(tuple(found), tuple(following))


def _with_others(op: Op, first: Layout, found: Where | None) -> Where | None:
    """`found`, with where the samples would be, had they been in another dim of the first argument."""
    moved = [_moved(op, {0: _sample_ids(op.tensors[0], other, op.batch)})[0] for other in first.others]
    others = tuple(layout for m in moved if isinstance(layout := from_ids(m, op.batch), Layout))
    return replace(found, others=others) if isinstance(found, Layout) else found


def _only_reorders(op: Op, where: Where | None, moved: Tensor) -> bool:
    """Whether the samples are all still there, in another order. Samples may tell an order, but not make a choice."""
    first = op.where[0]
    if op.func in WRITES or not isinstance(first, Layout) or not isinstance(where, Layout) or first.dim != where.dim:
        return False
    before = first.sample_of(op.tensors[0].shape[first.dim], op.batch)
    return sorted(before) == sorted(where.sample_of(moved.shape[where.dim], op.batch))


def _is_own_mask(op: Op, moved: Tensor) -> bool:
    """Whether the batch's mask (`x[mask]`, `x[mask] = y`) decides in each sample over that sample's own entries."""
    mask = op.args[1] if op.func in (T.__getitem__, T.__setitem__) else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return False
    owner = _sample_ids(mask, op.where[1], op.batch)
    if op.func is T.__getitem__:
        owner = owner[mask]
    owner = owner.view(*owner.shape, *[1] * (moved.dim() - owner.dim()))
    return bool(((moved == owner) | (moved < 0)).all())


def is_moved(op: Op, position: int) -> bool:
    """Whether a tensor's entries are moved, or only say where to."""
    if op.func in WRITES:
        return position == 0 or (position == len(op.tensors) - 1 and isinstance(op.args[-1], Tensor))
    return position < len(list(tensors_in(op.args[0])))


def _moved(op: Op, ids: dict[int, Tensor]) -> tuple[Tensor, ...]:
    """The results of the op on tensors of numbers."""
    args, kwargs = op.filled([ids[i].clone() if i in ids else t for i, t in enumerate(op.tensors)])
    kwargs.pop("out", None)
    if op.func not in WRITES:
        return results_of(op.func(*args, **kwargs), args)
    if not isinstance(args[-1], Tensor):
        args = (*args[:-1], -1)
    (written,) = results_of(op.func(*args, **kwargs), args)
    # What belongs to nobody, once it is written over a sample, is that sample's.
    return (torch.where(written < 0, ids[0], written),)


def _follows(op: Op, position: int, ids: dict[int, Tensor], found: Sequence[Where | None]) -> Layout | None:
    """The dim of a weight along which each index was put among the entries of one sample only."""
    tensor = op.tensors[position]
    nobody = {i: torch.full_like(t, -1) for i, t in ids.items()}
    for dim, size in enumerate(tensor.shape):
        own = [-1] * size
        along = torch.arange(size, dtype=torch.int32).view(size, *[1] * (tensor.dim() - dim - 1))
        for moved, where in zip(_moved(op, nobody | {position: along.expand(tensor.shape)}), found, strict=True):
            if isinstance(where, Layout):
                sample = _sample_ids(moved, where, op.batch)
                for index, n in torch.stack([moved, sample], -1)[moved >= 0].unique(dim=0).tolist():
                    own[index] = n if own[index] in (-1, n) else op.batch
        if size > 1 and op.batch not in own and len(set(own)) > 1:
            return regular(dim, tuple(own), op.batch)
    return None


def _sample_ids(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """For each entry of `tensor` the sample it belongs to, -1 for none."""
    ids = torch.full(tensor.shape, -1, dtype=torch.int32, device=tensor.device)
    if isinstance(where, Layout):
        size = tensor.shape[where.dim]
        row = torch.tensor(where.sample_of(size, batch), dtype=torch.int32, device=tensor.device)
        ids.copy_(row.view(size, *[1] * (tensor.dim() - where.dim - 1)).expand(tensor.shape))
    return ids
