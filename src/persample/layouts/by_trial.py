"""The motion of any other function, found by trial: with a larger batch, and with other values for some samples.

1.  Shapes: the call runs on the meta device with a batch of B and of B + 1. The dimension of the result that grows is
    the batch dimension. If none grows, the samples were reduced; if two grow, they were combined with each other.
2.  Values: the call runs on invented values, and again with other values for half of the samples. The entries of the
    other half must stay the same. This detects a softmax over the batch, a `cumsum` along it, or attention between
    samples, which all keep their shapes.

Trials compute in float64 if the function accepts that, else in float32. The entries must be equal to 9 digits in either
case: a difference that rounding to few digits would explain is a difference. A function that returns numbers with fewer
digits than float32 is refused, because rounding could hide what it mixes.
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
from persample.errors import get_op_name, raise_if_out_of_memory
from persample.layouts.call import Call
from persample.layouts.layout import Layout, Lost, Reduced, Where, iterate_patterns
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import make_reduced

Results = tuple[Tensor, ...]

# For each result what it may be: one of several layouts, or what is known about it already.
Candidates = Sequence["list[Layout] | Where | None"]

# The values that a call is tried on:
#   unit      between 0.1 and 0.9, which logarithms, roots and probabilities accept too
#   matrices  well-conditioned matrices, for inverses and factorisations
#   wide      normal with standard deviation 8, for functions that are constant or linear between 0.1 and 0.9
#   large     normal with standard deviation 100
#   given     the values that the call was given
# The samples must stay separate on all of them that the call accepts.
Values = Literal["unit", "matrices", "wide", "large", "given"]
_ALL_VALUES: tuple[Values, ...] = ("unit", "matrices", "wide", "large", "given")

_SCALES = {"wide": 8.0, "large": 100.0}

# The precision of trials, the first that the call accepts; None: that of the call.
_PRECISIONS = (torch.float64, torch.float32, None)

# Relative and absolute difference that rounding may make between two runs on the same values, and between sums in
# another order.
_TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
_SUM_TOLERANCE = 1e-9

# The difference that rounding may make for a row at another position, where a kernel may compute in another order. A
# function that depends on positions differs by more.
_POSITION_TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

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
        except Exception as error:  # the function does not accept a larger batch in these arguments
            raise_if_out_of_memory(error)
            continue
        trials = _run_all_trials(interpreted, invent_constants=True)
        found, depends_on_values = _verify(call, by_shape, results, trials)
        if any(isinstance(where, Reduced) for where in found):  # a loss may be constant for invented targets
            trials = _run_all_trials(call, invent_constants=False, values=("wide", "given"))
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
        list(_iterate_layouts(result, call))
        if result.dim() or not call.facts.is_additive
        else make_reduced(call, results)
        for result in results
    ]
    has_constants = any(w is None and t.numel() > 1 for t, w in zip(call.tensors, call.where, strict=True))
    if call.has_loose_rows() and has_constants:
        candidates = [[] for _ in results]  # which row a constant is combined with depends on all samples
    for invent_constants in (True, False):  # given constants may be so large that no sample makes a difference
        trials = _run_all_trials(call, invent_constants)
        if trials:  # a result that never changes shows no layout
            is_shown = [any(each.is_conclusive(i) for each in trials) for i in range(len(results))]
            candidates = [options if shown else [] for options, shown in zip(candidates, is_shown, strict=True)]
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
    arguments = zip(call.tensors, call.where, strict=True)
    dims = [w.dim if isinstance(w, Layout) and w.loose and t.dim() else None for t, w in arguments]
    size = max(1, next((t.shape[d] for t, d in zip(call.tensors, dims, strict=True) if d is not None), 1))
    for precision in _PRECISIONS:
        try:
            before, again, after = _run_in_other_order(call, dims, precision)
            break
        except Exception as error:  # the function does not accept this precision, or such values
            raise_if_out_of_memory(error)
    else:
        return False
    for a, other_seed, b, of_result in zip(before, again, after, found, strict=True):
        if a.shape != b.shape or _is_coarse(a):
            return False
        if not _is_close(a, other_seed):  # random numbers belong to no row
            continue
        a = a.roll(a.shape[of_result.dim] // size, of_result.dim) if isinstance(of_result, Layout) and a.numel() else a
        if not torch.allclose(a.double(), b.double(), **_POSITION_TOLERANCE, equal_nan=True):
            return False
    return True


def _run_in_other_order(
    call: Call, dims: Sequence[int | None], precision: torch.dtype | None
) -> tuple[Results, Results, Results]:
    """The results on invented values, again with another seed, and with the loose rows in another order."""
    with fork_rng():
        seed_torch(0)
        base = [
            _invent(_convert(t, precision), w, False, "unit") if isinstance(w, Layout) else _convert(t, precision)
            for t, w in zip(call.tensors, call.where, strict=True)
        ]
        rolled = [t if dim is None else t.roll(1, dim) for t, dim in zip(base, dims, strict=True)]

        def run(tensors: Sequence[Tensor], seed: int = 1) -> Results:
            seed_torch(seed)
            return call.run([t.clone() for t in tensors])

        return run(base), run(base, seed=2), run(rolled)


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
            candidates.append(
                make_reduced(call, results) if call.facts.is_additive else Lost(f"{name} reduces over the samples")
            )
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
    depends_on_values: bool  # given values were used: all, those of large constants, or integers that stay the same

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
    call: Call, candidates: Candidates, results: Sequence[Tensor], trials: Sequence[Trials]
) -> tuple[tuple[Where | None, ...], bool]:
    """The first candidate of each result that no trial contradicts, and whether that depends on values."""
    name = get_op_name(call.func)
    for candidate in candidates:
        if isinstance(candidate, Lost):
            return tuple(candidate for _ in results), False
    if not trials:
        return tuple(Lost(f"{name} could not be tried on other values") for _ in results), True
    coarse = next((result for each in trials for result in each.before if _is_coarse(result)), None)
    if coarse is not None:
        cause = f"{name} computes in {coarse.dtype}, in which rounding could hide from a trial that it mixes samples"
        return tuple(Lost(cause) for _ in results), False
    found: list[Where | None] = []
    for i, options in enumerate(candidates):
        if isinstance(options, Layout):
            options = [options]
        is_conclusive = any(each.is_conclusive(i) for each in trials)
        if isinstance(options, list):
            if _must_change(call, results[i]) and not is_conclusive:
                options = []  # the output never changed, so the trial is inconclusive
            fitting = (
                layout for layout in options if all(_keeps_separate(layout, each, i, call.batch) for each in trials)
            )
            shapes = ", ".join(str(tuple(t.shape)) for t in call.tensors)
            found.append(next(fitting, Lost(f"{name} of {shapes} mixes the samples")))
        elif isinstance(options, Reduced) and not (is_conclusive and all(_is_sum(each, i) for each in trials)):
            found.append(Lost(f"{name} is not a sum over the samples"))
        else:
            found.append(options)
    is_shown_by_invented = any(
        not each.depends_on_values and all(each.is_conclusive(i) for i in range(len(results))) for each in trials
    )
    return tuple(found), not is_shown_by_invented


def _must_change(call: Call, result: Tensor) -> bool:
    """Whether a trial must change a result to be conclusive. For integers there may be no other valid values."""
    arguments = zip(call.tensors, call.where, strict=True)
    has_numbers = any(w is not None and (t.is_floating_point() or t.is_complex()) for t, w in arguments)
    return has_numbers and result.is_floating_point() and result.numel() > 0


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
    before, all_changed = (_widen(each[result]) for each in (trials.before, trials.all_changed))
    changed = (_widen(after) for _, after in trials.iterate_changed(result))
    for half, rest in zip(changed, changed, strict=True):  # a set of samples, and its complement
        scale = torch.stack([part.abs() for part in (before, all_changed, half, rest)]).amax(0)
        difference = (before + all_changed - half - rest).abs()
        if not bool((difference <= _SUM_TOLERANCE * scale).all()):
            return False
    return True


def _is_close(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(_widen(a), _widen(b), **_TOLERANCE, equal_nan=True)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_coarse(result: Tensor) -> bool:
    """Whether numbers have fewer digits than float32."""
    dtype = result.dtype.to_real() if result.is_complex() else result.dtype
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


# ---- run trials ----


def _run_all_trials(call: Call, invent_constants: bool, values: Sequence[Values] = _ALL_VALUES) -> list[Trials]:
    """A trial on each kind of values that the call accepts, in the highest precision that it accepts.

    `invent_constants`: arguments without samples get invented values too.
    """
    is_square = any(t.dim() > 1 and t.shape[-1] == t.shape[-2] for t in call.tensors)
    kinds = [kind for kind in values if is_square or kind != "matrices"]
    for precision in _PRECISIONS:
        found = [_run_conclusive_trials(call, invent_constants, kind, precision) for kind in kinds]
        accepted = [trials for trials in found if trials is not None]
        if accepted:
            return accepted
    return []


def _run_conclusive_trials(
    call: Call, invent_constants: bool, kind: Values, precision: torch.dtype | None
) -> Trials | None:
    """The first way to change integers for which all results change, else the first that the call accepts."""
    has_integers = any(w and not t.is_floating_point() for t, w in zip(call.tensors, call.where, strict=True))
    first: Trials | None = None
    for step in (1, -1, 0) if has_integers else (1,):
        trials = _run_trials(call, invent_constants, kind, step, precision)
        if trials is not None and all(trials.is_conclusive(i) for i in range(len(trials.before))):
            return trials
        first = first or trials
    return first


def _run_trials(
    call: Call, invent_constants: bool, kind: Values, step: int, precision: torch.dtype | None
) -> Trials | None:
    """Trials on one kind of values; None if the call does not accept them. `step` is added to integers."""
    samples = call.find_samples() or {0}
    with fork_rng():
        seed_torch(0)
        given = [_convert(t, precision) for t in call.tensors]
        base = [_invent(t, where, invent_constants, kind) for t, where in zip(given, call.where, strict=True)]
    others = [_make_other(t, where, kind, step) for t, where in zip(base, call.where, strict=True)]

    def run(changed: Set[int]) -> Results:
        arguments = zip(base, others, call.where, strict=True)
        tensors = [_replace_samples(t, other, where, changed, call.batch) for t, other, where in arguments]
        with fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that the user did not choose
            seed_torch(1)
            return call.run(tensors)

    depends_on_values = kind == "given" or step == 0 or any(map(_is_kept, given, call.where))
    try:
        run(_make_halves(samples)[0])
        return Trials(run(set()), run(samples), run, samples, depends_on_values)
    except Exception as error:  # the function does not accept such values
        raise_if_out_of_memory(error)
        return None


def _convert(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    """A tensor of numbers in this precision; integers stay as they are."""
    if precision is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().to(precision.to_complex() if tensor.is_complex() else precision)


def _is_kept(tensor: Tensor, where: Where | None) -> bool:
    """Whether a constant is so large that it keeps its values: other values would let all entries pass."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return where is None and is_number and bool((tensor.detach().abs() > _LARGEST_CONSTANT).any())


def _invent(tensor: Tensor, where: Where | None, invent_constants: bool, kind: Values) -> Tensor:
    """A tensor of the same shape with invented values; integers, and constants that matter, keep their values."""
    is_invented = invent_constants or isinstance(where, Layout) or tensor.requires_grad
    if kind == "given" or not is_invented or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    if _is_kept(tensor, where):
        return tensor.detach().clone()
    if kind in _SCALES:
        return torch.randn(tensor.shape, device=tensor.device).mul_(_SCALES[kind]).to(tensor.dtype)
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
