"""How any op moves the samples: tried on shapes with one sample more, and on values with half of them changed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

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
        found, by_values = _verified(op, candidates, results, _trials(reading, constants=True))
        if any(isinstance(where, Reduced) for where in found):  # a loss may be flat for targets that are no targets
            found, by_values = _verified(op, found, results, _trials(op, constants=False))
        if not any(isinstance(where, Lost) for where in found):
            return Motion(found, following, by_values)
        failure = failure or Motion(found, by_values=by_values)
    if failure is None:  # sizes given as numbers, or no kernel for meta tensors: the values alone have to tell
        everywhere = [list(_all_layouts(result, op.batch)) for result in results]
        return Motion(_verified(op, everywhere, results, _trials(op, constants=False))[0], by_values=True)
    return failure


def _readings(op: Op) -> Iterator[tuple[Op, tuple[tuple[int, Layout], ...]]]:
    """The op as it was given; then with rows of other arguments going with the batch."""
    yield op, ()
    options = [[where] if where else _soft_layouts(t, op.batch) for t, where in zip(op.tensors, op.where, strict=True)]
    # Parameters vary last: of them it is the least likely that their rows go with the batch.
    parameters = [t.requires_grad and t.is_leaf for t in op.tensors]
    slow = [choices if late else choices[:1] for late, choices in zip(parameters, options, strict=True)]
    fast = [choices[:1] if late else choices for late, choices in zip(parameters, options, strict=True)]
    for weights, others in itertools.islice(
        itertools.product(itertools.product(*slow), itertools.product(*fast)), 1, 129
    ):
        choice = tuple(w or o for w, o in zip(weights, others, strict=True))
        following = tuple(
            (i, new) for i, (new, old) in enumerate(zip(choice, op.where, strict=True)) if new and not old
        )
        yield replace(op, where=choice), following  # type: ignore[misc]


def _soft_layouts(tensor: Tensor, batch: int) -> list[Layout | None]:
    """How the rows of a tensor that does not depend on the batch may go with it: not at all, or where the sizes fit."""
    dims = [d for d, size in enumerate(tensor.shape) if size == batch]
    merged = [d for d, size in enumerate(tensor.shape) if size > batch and size % batch == 0]
    return [None, *map(Layout, dims), *(Layout(d, inner) for d in merged for inner in (tensor.shape[d] // batch, 1))]


Candidates = Sequence["list[Layout] | Layout | Reduced | Lost | None"]


def _verified(
    op: Op, candidates: Candidates, results: Sequence[Tensor], trials: Trials | None
) -> tuple[tuple[Where | None, ...], bool]:
    """The first of each result's candidates that the values do not contradict; and whether these were the op's own."""
    for candidate in candidates:
        if isinstance(candidate, Lost):
            return tuple(candidate for _ in results), False
    if trials is None:
        return tuple(Lost(f"{op_name(op.func)} could not be tried on other values") for _ in results), True
    found: list[Where | None] = []
    for i, options in enumerate(candidates):
        if isinstance(options, Layout):
            options = [options]
        if isinstance(options, list):
            fits = (layout for layout in options if _keeps_apart(layout, trials, i, op.batch))
            shapes = ", ".join(str(tuple(t.shape)) for t in op.tensors)
            found.append(next(fits, Lost(f"{op_name(op.func)} of {shapes} combines samples")))
        elif isinstance(options, Reduced) and not _adds_up(trials, i):
            found.append(Lost(f"{op_name(op.func)} is no sum of what each sample gives"))
        else:
            found.append(options)
    return tuple(found), trials.by_values


def _candidates_by_shape(op: Op, results: Sequence[Tensor]) -> Candidates:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has not asked for these shapes
        before = op.run([t.to("meta") for t in op.tensors])
        after = op.run([_grown(t, where, op.batch) for t, where in zip(op.tensors, op.where, strict=True)])
    candidates: list[list[Layout] | Layout | Reduced | Lost | None] = []
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


Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Trials:
    """Results of an op on some values, and on these with some of the samples changed, then all."""

    before: Results
    changed: Mapping[frozenset[int], Results]
    all_changed: Results
    by_values: bool  # the values were the op's own, or could not be changed


def _halves(samples: set[int]) -> list[frozenset[int]]:
    """Sets of samples such that of any two samples, each is in one of the sets without the other.

    >>> [sorted(half) for half in _halves({0, 1, 2})]
    [[1], [0, 2], [2], [0, 1]]
    """
    numbered = list(enumerate(sorted(samples)))
    halves = []
    for bit in range(max(1, (len(samples) - 1).bit_length())):
        for digit in (1, 0):
            halves.append(frozenset(n for code, n in numbered if (code >> bit) & 1 == digit))
    return halves


def _trials(op: Op, constants: bool) -> Trials | None:
    """Tries the op on invented numbers, if it takes any, else on its own; `constants`: what holds no samples too."""
    present = op.samples() or {0}
    for invent, step in itertools.product((True, False), (1, -1, 0)):
        with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has not asked for these values
            torch.manual_seed(0)
            places = list(zip(op.tensors, op.where, strict=True))
            base = [_invented(t, where, constants) if invent else t for t, where in places]

            def changed(samples: Set[int], base: Sequence[Tensor] = base, step: int = step) -> Results:
                values = [_changed(t, w, samples, op.batch, step) for t, w in zip(base, op.where, strict=True)]
                return _seeded_run(op, values)

            try:
                return Trials(
                    _seeded_run(op, base),
                    {half: changed(half) for half in _halves(present)},
                    changed(present),
                    by_values=not invent or step == 0,
                )
            except Exception:  # the op does not take such numbers
                continue
    return None


def _seeded_run(op: Op, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return op.run([t.clone() for t in tensors])


def _invented(tensor: Tensor, where: Where | None, constants: bool) -> Tensor:
    """Numbers between 0.1 and 0.9, which logarithms, roots and probabilities take too; of integers their own."""
    of_interest = constants or isinstance(where, Layout) or tensor.requires_grad
    if of_interest and (tensor.is_floating_point() or tensor.is_complex()):
        return torch.rand(tensor.shape, device=tensor.device).mul_(0.8).add_(0.1).to(tensor.dtype)
    return tensor.detach().clone()


def _changed(tensor: Tensor, where: Where | None, samples: Set[int], batch: int, step: int) -> Tensor:
    """The tensor with other values, of its own range if they differ there, for these samples."""
    if not isinstance(where, Layout):
        return tensor
    if tensor.dtype == torch.bool:
        other = ~tensor
    elif tensor.is_floating_point() or tensor.is_complex():
        other = 1 - tensor if not tensor.isinf().any() else tensor.flip(where.dim)
    elif tensor.numel():
        other = tensor.max() + tensor.min() - tensor
        other = other + step if torch.equal(other, tensor) else other
    else:
        other = tensor
    ids = where.sample_of(tensor.shape[where.dim], batch)
    chosen = torch.tensor([n in samples for n in ids], device=tensor.device, dtype=torch.bool)
    return torch.where(chosen.view(-1, *[1] * (tensor.dim() - where.dim - 1)), other, tensor)


def _keeps_apart(layout: Layout, trials: Trials, result: int, batch: int) -> bool:
    """Whether, by this layout, samples kept their entries when others changed."""
    before = trials.before[result]
    ids = layout.sample_of(before.shape[layout.dim], batch)
    for changed, results in trials.changed.items():
        after = results[result]
        if before.shape != after.shape:
            return False
        kept = [j for j, n in enumerate(ids) if n >= 0 and n not in changed]
        own = torch.tensor(kept, dtype=torch.long, device=before.device)
        if not _same(before.index_select(layout.dim, own), after.index_select(layout.dim, own)):
            return False
    return True


def _adds_up(trials: Trials, result: int) -> bool:
    """Whether changing some samples makes the same difference whatever the others are."""
    dtype = trials.before[result].dtype
    tolerance = 1e3 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    whole = trials.before[result].double() + trials.all_changed[result].double()
    halves = [results[result].double() for results in trials.changed.values()]
    pairs = zip(halves[::2], halves[1::2], strict=True)  # a set and the rest
    return all(torch.allclose(whole, half + rest, rtol=tolerance, atol=tolerance) for half, rest in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = 16 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def reduced(op: Op) -> Reduced:
    """What an op gives that adds the samples up."""
    return Reduced(f"{op_name(op.func)} adds the samples up")
