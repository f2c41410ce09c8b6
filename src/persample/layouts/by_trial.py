"""The motion of any other function, found by trial: with a larger batch, and with other values for some samples.

1.  Shapes: the call runs on the meta device with a batch of B and of B + 1. The dimension of the result that grows is
    the batch dimension. If none grows, the samples were reduced; if two grow, they were combined with each other.
2.  Values: the call runs on invented values, and again with other values for half of the samples. The entries of the
    other half must stay the same. This detects a softmax over the batch, a `cumsum` along it, or attention between
    samples, which all keep their shapes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from persample._internal.rng import fork_rng, seed_torch
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.layout import Layout, Lost, Reduced, Where, iterate_patterns
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import ADDITIVE, make_reduced

Results = tuple[Tensor, ...]

# For each result what it may be: one of several layouts, or what is known about it already.
Candidates = Sequence["list[Layout] | Where | None"]

# The values that a call is tried on:
#   unit      between 0.1 and 0.9, which logarithms, roots and probabilities accept too
#   matrices  well-conditioned matrices, for inverses and factorisations
#   wide      normal with standard deviation 8, for functions that are constant or linear between 0.1 and 0.9
#   given     the values that the call was given
Values = Literal["unit", "matrices", "wide", "given"]
_ALL_VALUES: tuple[Values, ...] = ("unit", "matrices", "wide", "given")

_HALF_PRECISION = {torch.float16, torch.bfloat16}

# A constant with larger values is a mask that is added to scores; other values would let all entries pass.
_LARGEST_CONSTANT = 1e4


def find_motion_by_trial(call: Call, results: Sequence[Tensor]) -> Motion:
    """The motion for the first interpretation of the arguments in which shapes and values keep the samples separate."""
    if has_different_orders(call):  # trials may not notice this: a comparison of two samples is rarely true
        cause = f"{get_op_name(call.func)} has arguments with the samples in different orders"
        return make_uniform_motion(Lost(cause), results)
    failure: Motion | None = None
    for interpreted, aligned in _iterate_interpretations(call):
        try:
            by_shape = _find_candidates_by_shape(interpreted, results)
        except Exception:  # the function does not accept a larger batch in these arguments
            continue
        trials = _choose_trials(interpreted, invent_constants=True)
        found, depends_on_values = _verify(call, by_shape, results, trials)
        if any(isinstance(where, Reduced) for where in found):  # a loss may be constant for invented targets
            trials = _choose_trials(call, invent_constants=False, values=("wide", "given"))
            found, depends_on_values = _verify(call, found, results, trials)
        if call.has_loose_rows() and not is_row_equivariant(call, found):
            cause = f"{get_op_name(call.func)} depends on the positions of rows whose order depends on all samples"
            return make_uniform_motion(Lost(cause), results)
        if not any(isinstance(where, Lost) for where in found):
            return Motion(found, aligned, depends_on_values)
        failure = failure or Motion(found, depends_on_values=depends_on_values)
    return failure or _find_motion_by_values(call, results)


def _find_motion_by_values(call: Call, results: Sequence[Tensor]) -> Motion:
    """The motion from values alone, if sizes are given as numbers or there is no kernel for meta tensors."""
    candidates: Candidates = [
        list(_iterate_layouts(result, call)) if result.dim() or call.func not in ADDITIVE else make_reduced(call)
        for result in results
    ]
    has_constants = any(w is None and t.numel() > 1 for t, w in zip(call.tensors, call.where, strict=True))
    if call.has_loose_rows() and has_constants:
        candidates = [[] for _ in results]  # which row a constant is combined with depends on all samples
    for invent_constants in (True, False):  # given constants may be so large that no sample makes a difference
        trials = _choose_trials(call, invent_constants)
        if trials is not None:  # a result that never changes shows no layout
            candidates = [options if trials.is_conclusive(i) else [] for i, options in enumerate(candidates)]
        candidates, _ = _verify(call, candidates, results, trials)
    return Motion(tuple(candidates), depends_on_values=True)  # type: ignore[arg-type]


def has_different_orders(call: Call) -> bool:
    """Whether the samples lie in different orders in two arguments."""
    orders = {
        (t.shape[w.dim], w.get_ids(t.shape[w.dim], call.batch))
        for t, w in zip(call.tensors, call.where, strict=True)
        if isinstance(w, Layout) and t.dim()
    }
    return len({size for size, _ in orders}) < len(orders)


# ---- arguments that may have rows for each sample ----


def _iterate_interpretations(call: Call) -> Iterator[tuple[Call, tuple[tuple[int, Layout], ...]]]:
    """The call as it is, then with layouts for constants that may have rows for each sample; each with `aligned`."""
    yield call, ()
    if call.has_loose_rows():
        return
    options = [
        [where] if where else _list_alignments(t, call.batch) for t, where in zip(call.tensors, call.where, strict=True)
    ]
    # Parameters vary last: they are the least likely to have rows for each sample.
    is_parameter = [t.requires_grad and t.is_leaf for t in call.tensors]
    slow = [layouts if last else layouts[:1] for last, layouts in zip(is_parameter, options, strict=True)]
    fast = [layouts[:1] if last else layouts for last, layouts in zip(is_parameter, options, strict=True)]
    choices = itertools.product(itertools.product(*slow), itertools.product(*fast))
    for of_parameters, of_others in itertools.islice(choices, 1, 129):
        where = tuple(w or o for w, o in zip(of_parameters, of_others, strict=True))
        pairs = enumerate(zip(where, call.where, strict=True))
        aligned = tuple((i, new) for i, (new, old) in pairs if isinstance(new, Layout) and not old)
        yield replace(call, where=where), aligned


def _list_alignments(tensor: Tensor, batch: int) -> list[Where | None]:
    """The layouts that a constant may have: none, or along a dimension whose size is a multiple of the batch size."""
    dims = [d for d, size in enumerate(tensor.shape) if size == batch]
    merged = [d for d, size in enumerate(tensor.shape) if size > batch and size % batch == 0]
    return [None, *map(Layout, dims), *(Layout(d, inner) for d in merged for inner in (tensor.shape[d] // batch, 1))]


# ---- loose rows ----


def is_row_equivariant(call: Call, found: Sequence[Where | None]) -> bool:
    """Whether loose rows in another order give the same results in that order, so that no position matters.

    `found` is where the samples lie in each result.
    """
    arguments = list(zip(call.tensors, call.where, strict=True))
    dims = [w.dim if isinstance(w, Layout) and w.loose and t.dim() else None for t, w in arguments]
    size = max(1, next((t.shape[d] for t, d in zip(call.tensors, dims, strict=True) if d is not None), 1))
    with fork_rng():
        seed_torch(0)
        base = [_invent(t, w, False, "unit") if isinstance(w, Layout) else t for t, w in arguments]
        rolled = [t if dim is None else t.roll(1, dim) for t, dim in zip(base, dims, strict=True)]

        def run(tensors: Sequence[Tensor], seed: int = 1) -> Results:
            seed_torch(seed)
            return call.run([t.clone() for t in tensors])

        before, again, after = run(base), run(base, seed=2), run(rolled)
    for a, other_seed, b, where in zip(before, again, after, found, strict=True):
        if not _is_close(a, other_seed):  # random numbers belong to no row
            continue
        a = a.roll(a.shape[where.dim] // size, where.dim) if isinstance(where, Layout) and a.numel() else a
        # A kernel may round differently at other positions. A function that depends on positions differs by more.
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True):
            return False
    return True


# ---- by shape ----


def _find_candidates_by_shape(call: Call, results: Sequence[Tensor]) -> Candidates:
    """What each result may be, by the dimensions that grow with the batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about shapes that the user did not choose
        before = call.run([t.to("meta") for t in call.tensors])
        after = call.run(
            [_make_larger(t, where, call.batch) for t, where in zip(call.tensors, call.where, strict=True)]
        )
    name = get_op_name(call.func)
    candidates: list[list[Layout] | Where | None] = []
    for result, old, new in zip(results, before, after, strict=True):
        grown = [d for d in range(result.dim()) if old.shape[d] != new.shape[d]]
        if not grown:
            candidates.append(make_reduced(call) if call.func in ADDITIVE else Lost(f"{name} reduces over the samples"))
        elif len(grown) > 1:
            cause = f"{name} combines samples with each other in a result of shape {tuple(result.shape)}"
            candidates.append(Lost(cause))
        else:
            (dim,) = grown
            candidates.append(list(_iterate_layouts_in(dim, old.shape[dim], new.shape[dim], call)))
    return candidates


def _make_larger(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """A meta tensor of the shape that `tensor` would have with one more sample."""
    shape = list(tensor.shape)
    if isinstance(where, Layout) and shape:
        shape[where.dim] += shape[where.dim] // batch if where.ids is None else 1
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _iterate_layouts_in(dim: int, size: int, larger: int, call: Call) -> Iterator[Layout]:
    """The layouts that samples can have in a dimension that grows from `size` to `larger` with one more sample."""
    yield from _iterate_layouts_of_arguments(dim, size, call)
    if size * (call.batch + 1) == larger * call.batch:
        yield from iterate_patterns(dim, size, call.batch)


def _iterate_layouts(result: Tensor, call: Call) -> Iterator[Layout]:
    """The layouts that samples can have in a result, by its shape."""
    for dim, size in enumerate(result.shape):
        yield from _iterate_layouts_of_arguments(dim, size, call)
        yield from iterate_patterns(dim, size, call.batch)


def _iterate_layouts_of_arguments(dim: int, size: int, call: Call) -> Iterator[Layout]:
    """The layouts of the arguments whose batch dimension has this size, for dimension `dim` of a result."""
    layouts = [
        where
        for t, where in zip(call.tensors, call.where, strict=True)
        if isinstance(where, Layout) and t.dim() and t.shape[where.dim] == size
    ]
    yield from dict.fromkeys(replace(where, dim=dim, alternatives=(), loose_index=False) for where in layouts)


# ---- by value ----


@dataclass(frozen=True)
class Trials:
    """The results of a call for some values of the samples, and for other values of all or some samples.

    Trials with other values for some samples run when they are read, one after the other: all results at once would
    take the memory of many steps.
    """

    before: Results
    all_changed: Results
    run: Callable[[Set[int]], Results]  # the results with other values for these samples
    samples: Set[int]
    depends_on_values: bool  # the given values were used, or integers could not be changed

    def iterate_changed(self, result: int) -> Iterator[tuple[frozenset[int], Tensor]]:
        """Sets of samples, each followed by its complement, and one of the results if these samples are changed."""
        return ((changed, self.run(changed)[result]) for changed in _make_halves(self.samples))

    def is_conclusive(self, result: int) -> bool:
        """Whether a result ever changed when samples did."""
        before = self.before[result].nan_to_num()
        if bool(self.before[result].isnan().all()):
            return False
        others = itertools.chain([self.all_changed[result]], (after for _, after in self.iterate_changed(result)))
        return any(not torch.equal(before, after.nan_to_num()) for after in others)


def _make_halves(samples: Set[int]) -> list[frozenset[int]]:
    """Sets of samples such that, for any two samples, some set has the first but not the second one.

    >>> [sorted(half) for half in _make_halves({0, 1, 2})]
    [[1], [0, 2], [2], [0, 1]]
    """
    numbered = list(enumerate(sorted(samples)))
    halves = []
    for bit in range(max(1, (len(samples) - 1).bit_length())):
        for digit in (1, 0):
            halves.append(frozenset(n for number, n in numbered if (number >> bit) & 1 == digit))
    return halves


def _verify(
    call: Call, candidates: Candidates, results: Sequence[Tensor], trials: Trials | None
) -> tuple[tuple[Where | None, ...], bool]:
    """The first candidate of each result that the trials do not contradict, and whether that depends on values."""
    name = get_op_name(call.func)
    for candidate in candidates:
        if isinstance(candidate, Lost):
            return tuple(candidate for _ in results), False
    if trials is None:
        return tuple(Lost(f"{name} could not be tried on other values") for _ in results), True
    found: list[Where | None] = []
    for i, options in enumerate(candidates):
        if isinstance(options, Layout):
            options = [options]
        if isinstance(options, list):
            if _must_change(call, results[i]) and not trials.is_conclusive(i):
                options = []  # the output never changed, so the trial is inconclusive
            fitting = (layout for layout in options if _keeps_separate(layout, trials, i, call.batch))
            shapes = ", ".join(str(tuple(t.shape)) for t in call.tensors)
            found.append(next(fitting, Lost(f"{name} of {shapes} mixes the samples")))
        elif isinstance(options, Reduced) and not (trials.is_conclusive(i) and _is_sum(trials, i)):
            found.append(Lost(f"{name} is not a sum over the samples"))
        else:
            found.append(options)
    return tuple(found), trials.depends_on_values


def _must_change(call: Call, result: Tensor) -> bool:
    """Whether a trial must change a result to be conclusive. For integers there may be no other valid values."""
    arguments = zip(call.tensors, call.where, strict=True)
    has_numbers = any(w is not None and (t.is_floating_point() or t.is_complex()) for t, w in arguments)
    return has_numbers and len(call.tensors) > 1 and result.is_floating_point() and result.numel() > 0


def _keeps_separate(layout: Layout, trials: Trials, result: int, batch: int) -> bool:
    """Whether, with this layout, the entries of samples did not change when other samples did."""
    before = trials.before[result]
    ids = layout.get_ids(before.shape[layout.dim], batch)
    for changed, after in trials.iterate_changed(result):
        if before.shape != after.shape:
            return False
        unchanged = [j for j, n in enumerate(ids) if n >= 0 and n not in changed]
        index = torch.tensor(unchanged, dtype=torch.long, device=before.device)
        if not _is_close(before.index_select(layout.dim, index), after.index_select(layout.dim, index)):
            return False
    return True


def _is_sum(trials: Trials, result: int) -> bool:
    """Whether the difference that some samples make does not depend on the values of other samples."""
    dtype = trials.before[result].dtype
    tolerance = 1e3 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    expected = trials.before[result].double() + trials.all_changed[result].double()
    changed = (after.double() for _, after in trials.iterate_changed(result))
    pairs = zip(changed, changed, strict=True)  # a set of samples, and its complement
    return all(torch.allclose(expected, half + rest, rtol=tolerance, atol=tolerance) for half, rest in pairs)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = 16 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- run trials ----


def _choose_trials(call: Call, invent_constants: bool, values: Sequence[Values] = _ALL_VALUES) -> Trials | None:
    """Trials on the first kind of values for which all results change, else on the first that the call accepts.

    `invent_constants`: arguments without samples get invented values too.
    """
    first: Trials | None = None
    is_half = any(t.dtype in _HALF_PRECISION for t in call.tensors)
    has_integers = any(w and not t.is_floating_point() for t, w in zip(call.tensors, call.where, strict=True))
    is_square = any(t.dim() > 1 and t.shape[-1] == t.shape[-2] for t in call.tensors)
    kinds = [kind for kind in values if is_square or kind != "matrices"]
    steps = (1, -1, 0) if has_integers else (1,)
    for kind, step, as_float in itertools.product(kinds, steps, (True, False) if is_half else (False,)):
        trials = _run_trials(call, invent_constants, kind, step, as_float)
        if trials is not None and all(trials.is_conclusive(i) for i in range(len(trials.before))):
            return trials
        first = first or trials
    return first


def _run_trials(call: Call, invent_constants: bool, kind: Values, step: int, as_float: bool) -> Trials | None:
    """Trials on one kind of values; None if the call does not accept them.

    `step` is added to integers to change them. `as_float`: half precision is tried in float32, which rounds less.
    """
    samples = call.find_samples() or {0}
    with fork_rng():
        seed_torch(0)
        given = [t.float() if as_float and t.dtype in _HALF_PRECISION else t for t in call.tensors]
        base = [_invent(t, where, invent_constants, kind) for t, where in zip(given, call.where, strict=True)]
    others = [_make_other(t, where, kind, step) for t, where in zip(base, call.where, strict=True)]

    def run(changed: Set[int]) -> Results:
        arguments = zip(base, others, call.where, strict=True)
        tensors = [_replace_samples(t, other, where, changed, call.batch) for t, other, where in arguments]
        with fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that the user did not choose
            seed_torch(1)
            return call.run(tensors)

    try:
        run(_make_halves(samples)[0])
        return Trials(run(set()), run(samples), run, samples, depends_on_values=kind == "given" or step == 0)
    except Exception:  # the function does not accept such values
        return None


def _invent(tensor: Tensor, where: Where | None, invent_constants: bool, kind: Values) -> Tensor:
    """A tensor of the same shape with invented values; integers, and constants that matter, keep their values."""
    is_invented = invent_constants or isinstance(where, Layout) or tensor.requires_grad
    if kind == "given" or not is_invented or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    if where is None and tensor.numel() and bool(tensor.detach().abs().max() > _LARGEST_CONSTANT):
        return tensor.detach().clone()
    if kind == "wide":
        return torch.randn(tensor.shape, device=tensor.device).mul_(8).to(tensor.dtype)
    values = torch.rand(tensor.shape, device=tensor.device).mul_(0.8).add_(0.1).to(tensor.dtype)
    if kind == "matrices" and tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]:
        unit = torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        return unit + (values + values.mT) * (0.1 / tensor.shape[-1])
    return values


def _make_other(tensor: Tensor, where: Where | None, kind: Values, step: int) -> Tensor:
    """Other values for a tensor with samples, in the range of its own values if possible."""
    if not isinstance(where, Layout):
        return tensor
    if tensor.dtype == torch.bool:
        return ~tensor
    rolled = tensor.flatten().roll(1).view_as(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor + step if torch.equal(rolled, tensor) else rolled
    if kind == "given" and not torch.equal(rolled, tensor):
        return rolled
    return 1.5 * tensor if kind == "matrices" else 0.9 - 0.8 * tensor


def _replace_samples(tensor: Tensor, other: Tensor, where: Where | None, samples: Set[int], batch: int) -> Tensor:
    """A copy of `tensor` with the values of `other` for these samples."""
    if not isinstance(where, Layout) or not samples:
        return tensor.clone()
    if not tensor.dim():
        return (other if set(where.ids or ()) <= samples else tensor).clone()
    is_replaced = [n in samples for n in where.get_ids(tensor.shape[where.dim], batch)]
    mask = torch.tensor(is_replaced, device=tensor.device, dtype=torch.bool)
    return torch.where(mask.view(-1, *[1] * (tensor.dim() - where.dim - 1)), other, tensor)
