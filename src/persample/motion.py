"""How an op moves the samples of a batch: from where they lie in its arguments to where they lie in its result.

There is no table of ops. An op that only moves entries (`MOVES`) is applied to a tensor that holds, for every entry,
the number of its sample: the result says exactly where each sample went. Any other op is tried:

1.  on shapes: run on the meta device with a batch of B and of B + 1, one dim of the result grows: the samples lie
    there. None: they were reduced together. Two: they were crossed.
2.  on values: run with invented numbers, and again with all samples but one changed. The entries that are said
    to be of that one sample must stay the same. This is what notices a softmax over the batch, a `cumsum` along it, or
    attention from one sample to the others, all of which keep their shapes.

What was found holds for the shapes it was found for, so it is remembered by them (`motion_of`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.errors import op_name
from persample.layout import Layout, Lost, Reduced, Where, from_ids, regular
from persample.tree import map_tensors, tensors_in

T = torch.Tensor

# Ops that only move, repeat or drop entries of their first argument (or of the tensors in it).
MOVES: set[Any] = {
    T.__getitem__, T.view, T.view_as, T.reshape, T.reshape_as, T.flatten, T.unflatten, T.squeeze, T.unsqueeze,
    T.transpose, T.swapaxes, T.swapdims, T.t, T.permute, T.movedim, T.moveaxis, T.expand, T.expand_as,
    T.broadcast_to, T.repeat, T.tile, T.repeat_interleave, T.chunk, T.split, T.split_with_sizes, T.tensor_split,
    T.unbind, T.__iter__, T.narrow, T.select, T.unfold, T.flip, T.fliplr, T.flipud, T.roll, T.index_select, T.gather,
    T.take_along_dim, T.masked_select, T.diagonal, T.squeeze_, T.unsqueeze_, T.transpose_, T.t_, T.contiguous,
    T.clone, T.detach, T.detach_, T.ravel, T.T.__get__, T.mT.__get__, T.data.__get__,  # type: ignore[attr-defined]
    torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze, torch.transpose, torch.swapaxes,
    torch.swapdims, torch.t, torch.permute, torch.movedim, torch.moveaxis, torch.broadcast_to, torch.tile,
    torch.repeat_interleave, torch.chunk, torch.split, torch.split_with_sizes, torch.tensor_split, torch.unbind,
    torch.narrow, torch.select, torch.flip, torch.fliplr, torch.flipud, torch.roll, torch.index_select, torch.gather,
    torch.take_along_dim, torch.masked_select, torch.diagonal, torch.clone, torch.detach, torch.ravel,
    torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack,
    torch.column_stack, torch.atleast_1d, torch.atleast_2d, torch.atleast_3d,
}  # fmt: skip

# Ops that write entries of one tensor into another, in place.
WRITES: set[Any] = {T.__setitem__, T.copy_, T.index_copy_, T.index_put_, T.scatter_, T.masked_scatter_}

# Ops that make a tensor like their argument, of which they read the shape alone.
LIKES: set[Any] = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like,
}  # fmt: skip

# Ops that read nothing of their tensor but its dtype and device.
MAKERS: set[Any] = {T.new_zeros, T.new_ones, T.new_empty, T.new_full}

# Reductions that add up what each sample gives, so that each sample's share has its own gradient.
ADDITIVE: set[Any] = {
    torch.sum, T.sum, torch.mean, T.mean, torch.nansum, T.nansum,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
    F.soft_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    F.ctc_loss,
}  # fmt: skip

# What keeps such a sum one: adding two, scaling by a constant, changing the shape or type of the number.
LINEAR: set[Any] = {
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, T.add, T.sub, T.mul, T.div, T.neg, T.add_, T.sub_, T.mul_,
    T.div_, T.__add__, T.__radd__, T.__iadd__, T.__sub__, T.__rsub__, T.__isub__, T.__mul__, T.__rmul__, T.__imul__,
    T.__truediv__, T.__itruediv__, T.__neg__, torch.sum, T.sum, torch.mean, T.mean, torch.stack, T.to, T.float,
    T.double, *MOVES,
}  # fmt: skip
BILINEAR: set[Any] = {
    torch.mul, torch.div, T.mul, T.div, T.mul_, T.div_, T.__mul__, T.__rmul__, T.__imul__, T.__truediv__,
    T.__itruediv__, T.__rtruediv__,
}  # fmt: skip


@dataclass(frozen=True)
class Motion:
    """Where the samples lie in each tensor of a result, and in those arguments that were thought to hold none.

    `following` maps the position of such an argument (a state made by `zeros(B, H)`, a learned token expanded to the
    batch) to its layout: its rows turned out to go with the samples. `by_values`: found out from this call's values alone.
    """

    results: tuple[Where | None, ...]
    following: tuple[tuple[int, Layout], ...] = ()
    by_values: bool = False

    def follows(self, position: int) -> Layout | None:
        return dict(self.following).get(position)


@dataclass(frozen=True)
class Op:
    """A call of a torch function, its tensors apart: `where[i]` tells where the samples lie in `tensors[i]`."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    where: tuple[Where | None, ...]
    batch: int

    @property
    def inplace(self) -> bool:
        """Whether the op changes its first argument."""
        name = op_name(self.func)
        return self.func in WRITES or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of the result, computed with other tensors in the place of the op's own."""
        args, kwargs = self.filled(tensors)
        return results_of(self.func(*args, **kwargs), args)

    def filled(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with other values in the place of the tensors."""
        supply = iter(tensors)
        return map_tensors(lambda _: next(supply), (self.args, self.kwargs))  # type: ignore[no-any-return]


def results_of(result: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors that a call gave: those in its result, or the first argument where it returns nothing (`x[i] = y`)."""
    return tuple(tensors_in(args[0] if result is None and args else result))


_KNOWN: dict[Any, Callable[[Op], Motion]] = {}


def motion(func: Callable[..., Any]) -> Callable[[Callable[[Op], Motion]], Callable[[Op], Motion]]:
    """Registers how a function moves the samples, for one that cannot be tried."""

    def register(known: Callable[[Op], Motion]) -> Callable[[Op], Motion]:
        _KNOWN[func] = known
        return known

    return register


_found: dict[Any, Motion] = {}
_MOST_REMEMBERED = 20_000


def motion_of(op: Op, results: Sequence[Tensor]) -> Motion:
    """How `op`, which gave `results`, moves the samples."""
    if op.func in _KNOWN:
        return _KNOWN[op.func](op)
    key = _key(op)
    if key in _found:
        return _found[key]
    motion = _motion_of(op, results)
    if key is not None and not motion.by_values:
        if len(_found) >= _MOST_REMEMBERED:
            _found.clear()
        _found[key] = motion
    return motion


def _motion_of(op: Op, results: Sequence[Tensor]) -> Motion:
    for i, where in enumerate(op.where):
        if isinstance(where, Lost) and not (op.func in MOVES and not _is_moved(op, i, op.tensors[i])):
            return _everywhere(where, results)
    if any(isinstance(where, Reduced) for where in op.where):
        return _everywhere(_after_reduction(op), results)
    if op.func in MAKERS:
        return _everywhere(None, results)
    if op.batch == 1:
        # There is nobody to be mixed with, and every entry is of the one sample.
        return Motion(tuple(Layout(0, max(1, r.shape[0])) if r.dim() else _reduced(op) for r in results))
    if op.func in LIKES:
        return _everywhere(next(where for where in op.where if where), results)
    with torch.no_grad():
        if op.func in MOVES or op.func in WRITES:
            motion = _by_ids(op)
            if motion is not None:
                return motion
        for where in op.where:
            if isinstance(where, Lost):
                return _everywhere(where, results)
        return _by_trial(op, results)


def _everywhere(where: Where | None, results: Sequence[Tensor]) -> Motion:
    return Motion(tuple(where for _ in results))


def _reduced(op: Op) -> Reduced:
    return Reduced(f"{op_name(op.func)} adds the samples up")


def _after_reduction(op: Op) -> Where:
    reduced = [where for where in op.where if isinstance(where, Reduced)]
    apart = any(isinstance(where, Layout) for where in op.where)
    if apart or op.func not in LINEAR or (op.func in BILINEAR and len(reduced) > 1):
        return Lost(f"{reduced[0].cause}, and {op_name(op.func)} is no linear function of that sum", reduced[0].place)
    return reduced[0]


# ---- by the numbers of the samples ----


def _by_ids(op: Op) -> Motion | None:
    """Exactly where a move put each entry, unless the samples themselves tell it where (an index of the batch's own)."""
    carriers = [i for i, tensor in enumerate(op.tensors) if _is_moved(op, i, tensor)]
    ids = {i: _sample_ids(op.tensors[i], op.where[i], op.batch) for i in carriers}
    moved = _moved(op, ids)
    found = [from_ids(m, op.batch) for m in moved]
    told_by_samples = any(where for i, where in enumerate(op.where) if i not in carriers)
    if told_by_samples and not _is_own_mask(op, moved[0]) and not _only_reorders(op, found):
        return None
    if any(isinstance(where, Layout) and m.dim() == 0 for where, m in zip(found, moved, strict=True)):
        return Motion(tuple(Lost(f"{op_name(op.func)} took one number of one sample") if w else None for w in found))
    first = op.where[0]
    if isinstance(first, Layout) and first.others:
        found[0] = _with_others(op, first, found[0])
    used = [i for i in carriers if op.where[i] is None and any(t.requires_grad for t in op.tensors)]
    following = [(i, layout) for i in used if (layout := _follows(op, i, ids, found)) is not None]
    return Motion(tuple(found), tuple(following))


def _with_others(op: Op, first: Layout, found: Where | None) -> Where | None:
    """`found`, with where the samples would be, had they been in another dim of the first argument."""
    moved = [_moved(op, {0: _sample_ids(op.tensors[0], other, op.batch)})[0] for other in first.others]
    others = tuple(layout for m in moved if isinstance(layout := from_ids(m, op.batch), Layout))
    return replace(found, others=others) if isinstance(found, Layout) else found


def _only_reorders(op: Op, found: Sequence[Where | None]) -> bool:
    """Whether the samples are all still there, in another order: an order may be told by the samples, a choice may not."""
    first, where = op.where[0], found[0]
    if op.func in WRITES or not isinstance(first, Layout) or not isinstance(where, Layout) or first.dim != where.dim:
        return False
    size = op.tensors[0].shape[first.dim]
    return sorted(first.sample_of(size, op.batch)) == sorted(where.ids or first.sample_of(size, op.batch))


def _is_own_mask(op: Op, moved: Tensor) -> bool:
    """Whether the batch's own mask (`x[mask]`, `x[mask] = y`) only ever decides over entries of the mask's own sample."""
    if (
        op.func not in (T.__getitem__, T.__setitem__)
        or not isinstance(op.args[1], Tensor)
        or op.args[1].dtype != torch.bool
    ):
        return False
    mask, where = op.args[1], op.where[1]
    owner = _sample_ids(mask, where, op.batch)
    if op.func is T.__getitem__:
        owner = owner[mask]
    owner = owner.view(*owner.shape, *[1] * (moved.dim() - owner.dim()))
    return bool(((moved == owner) | (moved < 0)).all())


def _is_moved(op: Op, position: int, tensor: Tensor) -> bool:
    """Whether a tensor's entries are moved, or only say where to."""
    if op.func in WRITES:
        return position == 0 or tensor.dtype not in _INDEX_DTYPES
    return position < len(list(tensors_in(op.args[0])))


def _moved(op: Op, ids: dict[int, Tensor]) -> tuple[Tensor, ...]:
    """The results of the op on tensors of numbers; a number that is written counts as nobody's."""
    args, kwargs = op.filled([ids[i].clone() if i in ids else t for i, t in enumerate(op.tensors)])
    if op.func in WRITES and not isinstance(args[-1], Tensor):
        args = (*args[:-1], -1)
    return results_of(op.func(*args, **kwargs), args)


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


# ---- by trial ----


def _by_trial(op: Op, results: Sequence[Tensor]) -> Motion:
    """The first reading of the arguments under which shapes and values agree that the samples stay apart."""
    failure: Motion | None = None
    for reading, following in _readings(op):
        try:
            candidates = _candidates_by_shape(reading, results)
        except Exception:  # not with these arguments growing
            continue
        found = _verified(reading, candidates, results)
        if not any(isinstance(where, Lost) for where in found):
            return Motion(found, following)
        failure = failure or Motion(found)
    if failure is None:  # sizes given as numbers, or no kernel for meta tensors: the values alone have to tell
        everywhere = [list(_all_layouts(result, op.batch)) for result in results]
        return Motion(_verified(op, everywhere, results), by_values=True)
    return failure


def _readings(op: Op) -> Iterator[tuple[Op, tuple[tuple[int, Layout], ...]]]:
    """The op as it was given; then with rows of other arguments going with the batch."""
    yield op, ()
    plain: list[list[Layout | None]] = []
    for tensor, where in zip(op.tensors, op.where, strict=True):
        if where is None:
            dims = [d for d, size in enumerate(tensor.shape) if size == op.batch]
            merged = [d for d, size in enumerate(tensor.shape) if size > op.batch and size % op.batch == 0]
            plain.append([None, *map(Layout, dims), *(Layout(d, tensor.shape[d] // op.batch) for d in merged)])
        else:
            assert isinstance(where, Layout)
            plain.append([where])
    for choice in itertools.islice(itertools.product(*plain), 1, 65):
        following = tuple(
            (i, new)
            for i, (new, old) in enumerate(zip(choice, op.where, strict=True))
            if new is not None and new != old
        )
        yield Op(op.func, op.args, op.kwargs, op.tensors, choice, op.batch), following


Candidates = Sequence["list[Layout] | Reduced | Lost | None"]


def _verified(op: Op, candidates: Candidates, results: Sequence[Tensor]) -> tuple[Where | None, ...]:
    """The first of each result's candidates that the values do not contradict."""
    for candidate in candidates:
        if isinstance(candidate, Lost):
            return tuple(candidate for _ in results)
    trials = _trials(op)
    if trials is None:
        return tuple(Lost(f"{op_name(op.func)} could not be tried on other values") for _ in results)
    found: list[Where | None] = []
    for i, options in enumerate(candidates):
        if isinstance(options, list):
            own = {n: (before[i], after[i]) for n, (before, after) in trials.items()}
            kept = (layout for layout in options if _keeps_apart(layout, own, op.batch))
            shapes = ", ".join(str(tuple(t.shape)) for t in op.tensors)
            found.append(next(kept, Lost(f"{op_name(op.func)} of {shapes} combines samples")))
        else:
            found.append(options)
    return tuple(found)


def _candidates_by_shape(op: Op, results: Sequence[Tensor]) -> Candidates:
    before = op.run([t.to("meta") for t in op.tensors])
    after = op.run([_grown(t, where, op.batch) for t, where in zip(op.tensors, op.where, strict=True)])
    candidates: list[list[Layout] | Reduced | Lost | None] = []
    for result, old, new in zip(results, before, after, strict=True):
        changed = [d for d in range(result.dim()) if old.shape[d] != new.shape[d]]
        if not changed:
            candidates.append(
                _reduced(op) if op.func in ADDITIVE else Lost(f"{op_name(op.func)} reduces over the samples")
            )
        elif len(changed) > 1:
            candidates.append(Lost(f"{op_name(op.func)} crosses the samples to {tuple(result.shape)}"))
        else:
            candidates.append(list(_layouts_at(changed[0], old.shape[changed[0]], new.shape[changed[0]], op)))
    return candidates


def _grown(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """A meta tensor of the shape that `tensor` would have with one sample more."""
    shape = list(tensor.shape)
    if isinstance(where, Layout):
        shape[where.dim] += shape[where.dim] // batch if where.ids is None else 1
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _layouts_at(dim: int, size: int, grown: int, op: Op) -> Iterator[Layout]:
    """The layouts that samples in a dim of this size may have, those of the arguments first."""
    known = [
        (where, t.shape[where.dim]) for t, where in zip(op.tensors, op.where, strict=True) if isinstance(where, Layout)
    ]
    yield from dict.fromkeys(Layout(dim, w.inner, w.ids) for w, own in known if own == size)
    if size * (op.batch + 1) == grown * op.batch:
        yield from _regular_layouts(dim, size, op.batch)


def _regular_layouts(dim: int, size: int, batch: int) -> Iterator[Layout]:
    each = size // batch
    yield from (Layout(dim, inner) for inner in range(1, each + 1) if each % inner == 0)


def _all_layouts(result: Tensor, batch: int) -> Iterator[Layout]:
    for dim, size in enumerate(result.shape):
        if size and size % batch == 0:
            yield from _regular_layouts(dim, size, batch)


def _trials(op: Op) -> dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] | None:
    """For the first and the last sample: the results on invented numbers, and those with all other samples changed."""
    layouts = [(t, where) for t, where in zip(op.tensors, op.where, strict=True) if isinstance(where, Layout)]
    present = {n for t, where in layouts for n in where.sample_of(t.shape[where.dim], op.batch) if n >= 0}
    for invent in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            base = [_invented(t, where) if invent else t for t, where in zip(op.tensors, op.where, strict=True)]
            try:
                before = _seeded_run(op, base)
                return {
                    n: (
                        before,
                        _seeded_run(op, [_altered(t, w, n, op.batch) for t, w in zip(base, op.where, strict=True)]),
                    )
                    for n in {min(present), max(present)}
                }
            except Exception:  # the op does not take such numbers; the true ones it took
                continue
    return None


def _seeded_run(op: Op, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return op.run([t.clone() for t in tensors])


def _invented(tensor: Tensor, where: Where | None) -> Tensor:
    """Numbers between 0.1 and 0.9 for batch and weights: logarithms, roots and probabilities take them too."""
    if (isinstance(where, Layout) or tensor.requires_grad) and (tensor.is_floating_point() or tensor.is_complex()):
        return torch.rand(tensor.shape, device=tensor.device).mul_(0.8).add_(0.1).to(tensor.dtype)
    return tensor.clone()


def _altered(tensor: Tensor, where: Where | None, keep: int, batch: int) -> Tensor:
    """The tensor with other values, of its own range, for all samples but one."""
    if not isinstance(where, Layout):
        return tensor
    if tensor.dtype == torch.bool:
        other = ~tensor
    elif tensor.is_floating_point() or tensor.is_complex():
        other = 1 - tensor if not tensor.isinf().any() else tensor.flip(where.dim)
    else:
        other = tensor.max() + tensor.min() - tensor if tensor.numel() else tensor
    kept = torch.tensor([n == keep for n in where.sample_of(tensor.shape[where.dim], batch)], device=tensor.device)
    return torch.where(kept.view(-1, *[1] * (tensor.dim() - where.dim - 1)), tensor, other)


def _keeps_apart(layout: Layout, trials: Mapping[int, tuple[Tensor, Tensor]], batch: int) -> bool:
    """Whether, by this layout, each of these samples kept its entries when all the others changed."""
    for sample, (before, after) in trials.items():
        ids = layout.sample_of(before.shape[layout.dim], batch)
        own = torch.tensor([j for j, n in enumerate(ids) if n == sample], dtype=torch.long, device=before.device)
        if not _same(before.index_select(layout.dim, own), after.index_select(layout.dim, own)):
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = 1e3 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)


# ---- memory ----

# Functions of such names put entries where an index tells, so its values matter, not its shape alone.
_BY_INDEX = re.compile(
    "item|index|gather|scatter|select|take|put|mask|repeat_interleave|segment|bincount|bucket|search"
)
_INDEX_DTYPES = {torch.bool, torch.uint8, torch.int64, torch.int32}


def _key(op: Op) -> Any:
    """What the motion depends on, or None where that includes values."""
    if _BY_INDEX.search(op_name(op.func)) and any(t.dtype in _INDEX_DTYPES for t in op.tensors):
        return None
    described = [(t.shape, t.dtype, where) for t, where in zip(op.tensors, op.where, strict=True)]
    supply = iter(described)
    key = (op.func, op.batch, _hashable(map_tensors(lambda _: next(supply), (op.args, op.kwargs))))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(part)) for key, part in value.items())
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    if isinstance(value, (int, float)):
        return (type(value), value)
    return value
