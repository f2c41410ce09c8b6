"""How any op moves the samples: tried on shapes with one sample more, and on values with half of them changed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from persample.errors import op_name
from persample.layouts.call import Op
from persample.layouts.functions import ADDITIVE
from persample.layouts.layout import Layout, Lost, Reduced, Where
from persample.layouts.motion import Motion, everywhere


def by_trial(op: Op, results: Sequence[Tensor]) -> Motion:
    """The first reading of the arguments under which shapes and values agree that the samples stay apart."""
    if in_other_orders(op):  # which a trial may miss: equal numbers are rare
        return everywhere(Lost(f"{op_name(op.func)} takes the samples in different orders"), results)
    failure: Motion | None = None
    for reading, following in _readings(op):
        try:
            by_shape = _candidates_by_shape(reading, results)
        except Exception:  # not with these arguments growing
            continue
        found, by_values = _verified(op, by_shape, results, _trials(reading, constants=True))
        if any(isinstance(where, Reduced) for where in found):  # a loss may be flat for targets that are no targets
            found, by_values = _verified(op, found, results, _trials(op, constants=False, kinds=("wide", "own")))
        if _is_loose(op) and not goes_with_rows(op, found):
            return everywhere(Lost(f"{op_name(op.func)} goes by the places of rows, which all samples decide"), results)
        if not any(isinstance(where, Lost) for where in found):
            return Motion(found, following, by_values)
        failure = failure or Motion(found, by_values=by_values)
    if failure is None:  # sizes given as numbers, or no kernel for meta tensors: the values alone have to tell
        candidates: list[list[Layout] | Reduced]
        candidates = [
            list(_all_layouts(result, op)) if result.dim() or op.func not in ADDITIVE else reduced(op)
            for result in results
        ]
        if _is_loose(op) and any(w is None and t.numel() > 1 for t, w in zip(op.tensors, op.where, strict=True)):
            candidates = [[] for _ in results]  # each of the constants would meet whom all samples say
        by_values_alone: Candidates = candidates
        for constants in (True, False):  # the op's own may be so large that nothing else matters
            trials = _trials(op, constants)
            if trials is not None:  # of what stays the same whoever changes, nobody can say whose it is
                by_values_alone = [options if trials.tells(i) else [] for i, options in enumerate(by_values_alone)]
            by_values_alone, _ = _verified(op, by_values_alone, results, trials)
        return Motion(tuple(by_values_alone), by_values=True)  # type: ignore[arg-type]
    return failure


def _readings(op: Op) -> Iterator[tuple[Op, tuple[tuple[int, Layout], ...]]]:
    """The op as it was given; then with rows of other arguments going with the batch."""
    yield op, ()
    if _is_loose(op):
        return
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


def in_other_orders(op: Op) -> bool:
    """Whether the samples lie in different orders in two arguments."""
    orders = {
        (t.shape[w.dim], w.sample_of(t.shape[w.dim], op.batch))
        for t, w in zip(op.tensors, op.where, strict=True)
        if isinstance(w, Layout) and t.dim()
    }
    return len({size for size, _ in orders}) < len(orders)


def _is_loose(op: Op) -> bool:
    return any(isinstance(where, Layout) and where.loose for where in op.where)


def goes_with_rows(op: Op, found: Sequence[Where | None]) -> bool:
    """Whether loose rows in another order give the same result in that order: nothing goes by their places."""
    places = list(zip(op.tensors, op.where, strict=True))
    loose = [w.dim if isinstance(w, Layout) and w.loose and t.dim() else None for t, w in places]
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        _seed(0)
        base = [_invented(t, w, constants=False, kind="numbers") if isinstance(w, Layout) else t for t, w in places]
        rolled = [t if dim is None else t.roll(1, dim) for t, dim in zip(base, loose, strict=True)]

        def run(tensors: Sequence[Tensor], seed: int = 1) -> Results:
            _seed(seed)
            return op.run([t.clone() for t in tensors])

        before, again, after = run(base), run(base, seed=2), run(rolled)
    for a, random, b, where in zip(before, again, after, found, strict=True):
        if not _same(a, random):  # numbers that are drawn are nobody's
            continue
        a = a.roll(a.shape[where.dim] // _rows(op), where.dim) if isinstance(where, Layout) and a.numel() else a
        # Kernels may round differently by place; what goes by place differs by more.
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True):
            return False
    return True


def _rows(op: Op) -> int:
    """How many loose rows there are."""
    places = zip(op.tensors, op.where, strict=True)
    return max(1, next(t.shape[w.dim] for t, w in places if isinstance(w, Layout) and w.loose and t.dim()))


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
            if _may_change(op, results[i]) and not trials.tells(i):
                options = []  # what stays the same whoever changes says nothing of who meets whom
            fits = (layout for layout in options if _keeps_apart(layout, trials, i, op.batch))
            shapes = ", ".join(str(tuple(t.shape)) for t in op.tensors)
            found.append(next(fits, Lost(f"{op_name(op.func)} of {shapes} combines samples")))
        elif isinstance(options, Reduced) and not (trials.tells(i) and _adds_up(trials, i)):
            found.append(Lost(f"{op_name(op.func)} is no sum of what each sample gives"))
        else:
            found.append(options)
    return tuple(found), trials.by_values


def _may_change(op: Op, result: Tensor) -> bool:
    """Whether numbers of the samples meet others in a result; of integers there may be no others to try."""
    places = zip(op.tensors, op.where, strict=True)
    numbers = any(w is not None and (t.is_floating_point() or t.is_complex()) for t, w in places)
    return numbers and len(op.tensors) > 1 and result.is_floating_point() and result.numel() > 0


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
    if isinstance(where, Layout) and shape:
        shape[where.dim] += shape[where.dim] // batch if where.ids is None else 1
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _layouts_at(dim: int, size: int, grown: int, op: Op) -> Iterator[Layout]:
    """The layouts that samples in a dim of this size may have, those of the arguments first."""
    yield from _same_as_arguments(dim, size, op)
    if size * (op.batch + 1) == grown * op.batch:
        yield from _regular_layouts(dim, size, op.batch)


def _same_as_arguments(dim: int, size: int, op: Op) -> Iterator[Layout]:
    known = [
        where
        for t, where in zip(op.tensors, op.where, strict=True)
        if isinstance(where, Layout) and t.dim() and t.shape[where.dim] == size
    ]
    yield from dict.fromkeys(replace(where, dim=dim, others=(), places=False) for where in known)


def _regular_layouts(dim: int, size: int, batch: int) -> Iterator[Layout]:
    each = size // batch
    yield from (Layout(dim, inner) for inner in range(1, each + 1) if each % inner == 0)


def _all_layouts(result: Tensor, op: Op) -> Iterator[Layout]:
    for dim, size in enumerate(result.shape):
        yield from _same_as_arguments(dim, size, op)
        if size and size % op.batch == 0:
            yield from _regular_layouts(dim, size, op.batch)


Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Trials:
    """An op on some values, on these with all of the samples changed, and with some of them changed.

    The last are run when they are looked at, one after the other: together they would take the memory of many steps.
    """

    before: Results
    all_changed: Results
    run: Callable[[Set[int]], Results]
    samples: Set[int]
    by_values: bool  # the values were the op's own, or could not be changed

    def some_changed(self, result: int) -> Iterator[tuple[frozenset[int], Tensor]]:
        """Sets of samples, each followed by the rest, with what a result is when these are changed."""
        return ((half, self.run(half)[result]) for half in _halves(self.samples))

    def tells(self, result: int) -> bool:
        """Whether a result changes at all when the samples do, or some of them."""
        before = self.before[result].nan_to_num()
        if bool(self.before[result].isnan().all()):
            return False
        others = itertools.chain([self.all_changed[result]], (after for _, after in self.some_changed(result)))
        return any(not torch.equal(before, after.nan_to_num()) for after in others)


def _halves(samples: Set[int]) -> list[frozenset[int]]:
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


# What the invented numbers may be: any between 0.1 and 0.9, which logarithms, roots and probabilities take too; well
# conditioned matrices, which inverses and factorizations need; numbers of all sizes, for what is flat or straight
# between 0.1 and 0.9; or the op's own.
_KINDS = ("numbers", "matrices", "wide", "own")
_HALVES = {torch.float16, torch.bfloat16}
_ENDLESS = 1e4


def _trials(op: Op, constants: bool, kinds: Sequence[str] = _KINDS) -> Trials | None:
    """Tries the op on the first kind of numbers that it takes and that make a difference, or on the first it takes.

    `constants`: what holds no samples is invented too.
    """
    first: Trials | None = None
    halved = any(t.dtype in _HALVES for t in op.tensors)
    counts = any(w and not t.is_floating_point() for t, w in zip(op.tensors, op.where, strict=True))
    square = any(t.dim() > 1 and t.shape[-1] == t.shape[-2] for t in op.tensors)
    kinds = [kind for kind in kinds if square or kind != "matrices"]
    steps = (1, -1, 0) if counts else (1,)  # for integers only
    for kind, step, precise in itertools.product(kinds, steps, (True, False) if halved else (False,)):
        trials = _tried(op, constants, kind, step, precise)
        if trials is not None and all(trials.tells(i) for i in range(len(trials.before))):
            return trials
        first = first or trials
    return first


def _tried(op: Op, constants: bool, kind: str, step: int, precise: bool) -> Trials | None:
    present = op.samples() or {0}
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        _seed(0)
        given = [t.float() if precise and t.dtype in _HALVES else t for t in op.tensors]
        base = [_invented(t, where, constants, kind) for t, where in zip(given, op.where, strict=True)]
    others = [_other(t, where, kind, step) for t, where in zip(base, op.where, strict=True)]

    def run(samples: Set[int]) -> Results:
        places = zip(base, others, op.where, strict=True)
        values = [_changed(t, other, where, samples, op.batch) for t, other, where in places]
        with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has not asked for these values
            _seed(1)
            return op.run(values)

    try:
        run(_halves(present)[0])
        return Trials(run(set()), run(present), run, present, by_values=kind == "own" or step == 0)
    except Exception:  # the op does not take such numbers
        return None


def _seed(number: int) -> None:
    """As torch.manual_seed does, which takes far longer than what is tried."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _invented(tensor: Tensor, where: Where | None, constants: bool, kind: str) -> Tensor:
    """Other numbers in the shape of a tensor; of integers its own."""
    of_interest = constants or isinstance(where, Layout) or tensor.requires_grad
    if kind == "own" or not of_interest or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    if where is None and tensor.numel() and bool(tensor.detach().abs().max() > _ENDLESS):  # a mask, by what it adds
        return tensor.detach().clone()
    if kind == "wide":
        return torch.randn(tensor.shape, device=tensor.device).mul_(8).to(tensor.dtype)
    numbers = torch.rand(tensor.shape, device=tensor.device).mul_(0.8).add_(0.1).to(tensor.dtype)
    if kind == "matrices" and tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]:
        unit = torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        return unit + (numbers + numbers.mT) * (0.1 / tensor.shape[-1])
    return numbers


def _other(tensor: Tensor, where: Where | None, kind: str, step: int) -> Tensor:
    """Other values for a tensor that holds samples, of its own range if they differ there."""
    if not isinstance(where, Layout):
        return tensor
    if tensor.dtype == torch.bool:
        return ~tensor
    another_place = tensor.flatten().roll(1).view_as(tensor)  # numbers of its own
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor + step if torch.equal(another_place, tensor) else another_place
    if kind == "own" and not torch.equal(another_place, tensor):
        return another_place
    return 1.5 * tensor if kind == "matrices" else 0.9 - 0.8 * tensor


def _changed(tensor: Tensor, other: Tensor, where: Where | None, samples: Set[int], batch: int) -> Tensor:
    """A copy of the tensor with the other values for these samples."""
    if not isinstance(where, Layout) or not samples:
        return tensor.clone()
    if not tensor.dim():
        return (other if set(where.ids or ()) <= samples else tensor).clone()
    mine = [n in samples for n in where.sample_of(tensor.shape[where.dim], batch)]
    rows = torch.tensor(mine, device=tensor.device, dtype=torch.bool).view(-1, *[1] * (tensor.dim() - where.dim - 1))
    return torch.where(rows, other, tensor)


def _keeps_apart(layout: Layout, trials: Trials, result: int, batch: int) -> bool:
    """Whether, by this layout, samples kept their entries when others changed."""
    before = trials.before[result]
    ids = layout.sample_of(before.shape[layout.dim], batch)
    for changed, after in trials.some_changed(result):
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
    each = (after.double() for _, after in trials.some_changed(result))
    pairs = zip(each, each, strict=True)  # a set, and the rest, which comes next
    return all(torch.allclose(whole, half + rest, rtol=tolerance, atol=tolerance) for half, rest in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = 16 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def reduced(op: Op) -> Reduced:
    """What an op gives that adds the samples up."""
    return Reduced(f"{op_name(op.func)} adds the samples up")
