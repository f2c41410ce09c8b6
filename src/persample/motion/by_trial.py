"""How any op moves the samples: tried on shapes with one sample more, and on values with all but one changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample.errors import op_name
from persample.layout import Layout, Lost, Reduced, Where
from persample.motion.kinds import ADDITIVE
from persample.motion.motion import Motion
from persample.motion.op import Op


def by_trial(op: Op, results: Sequence[Tensor]) -> Motion:
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
        yield replace(op, where=choice), following


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
                reduced(op) if op.func in ADDITIVE else Lost(f"{op_name(op.func)} reduces over the samples")
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
    present = op.samples() or {0}
    for invent in (True, False):
        with torch.random.fork_rng(range(torch.cuda.device_count())):
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
    tolerance = 16 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def reduced(op: Op) -> Reduced:
    """What an op gives that adds the samples up."""
    return Reduced(f"{op_name(op.func)} adds the samples up")
