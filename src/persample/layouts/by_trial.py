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
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample._internal.precision import to_double
from persample._internal.rng import fork_rng, seed_torch
from persample.errors import get_op_name, raise_if_out_of_memory
from persample.layouts.call import Call
from persample.layouts.ids import iterate_patterns
from persample.layouts.layout import Layout, Lost, Reduced, Where
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import make_reduced
from persample.layouts.trials import PRECISIONS, Results, Trials, convert, invent, run_all_trials

# For each result what it may be: one of several layouts, or what is known about it already.
Candidates = Sequence["list[Layout] | Where | None"]

# Relative and absolute difference that rounding may make between two runs on the same values, and between sums in
# another order.
_TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}

_SUM_TOLERANCE = 1e-9

# The difference that rounding may make for a row at another position, where a kernel may compute in another order. A
# function that depends on positions differs by more.
_POSITION_TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


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
        trials = run_all_trials(interpreted, invent_constants=True)
        found, depends_on_values = _verify(call, by_shape, results, trials)
        if any(isinstance(where, Reduced) for where in found):  # a loss may be constant for invented targets
            trials = run_all_trials(call, invent_constants=False, values=("wide", "given"))
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
        [layout for dim, size in enumerate(result.shape) for layout in _iterate_layouts(call, dim, size)]
        if result.dim() or not call.facts.is_additive
        else make_reduced(call, results)
        for result in results
    ]
    has_constants = any(w is None and t.numel() > 1 for t, w in call.pairs)
    if call.has_loose_rows() and has_constants:
        candidates = [[] for _ in results]  # which row a constant is combined with depends on all samples
    for invent_constants in (True, False):  # given constants may be so large that no sample makes a difference
        trials = run_all_trials(call, invent_constants)
        if trials:  # a result that never changes shows no layout
            is_shown = [any(each.is_conclusive(i) for each in trials) for i in range(len(results))]
            candidates = [options if shown else [] for options, shown in zip(candidates, is_shown, strict=True)]
        candidates, _ = _verify(call, candidates, results, trials)
    return Motion(tuple(candidates), depends_on_values=True)  # type: ignore[arg-type]


def has_different_orders(call: Call) -> bool:
    """Whether the samples lie in different orders in two arguments."""
    orders = {
        (t.shape[w.dim], w.get_ids(t.shape[w.dim], call.batch))
        for t, w in call.pairs
        if isinstance(w, Layout) and t.dim()
    }
    return len({size for size, _ in orders}) < len(orders)


# ---- arguments that may have rows for each sample ----


def _iterate_interpretations(call: Call) -> Iterator[tuple[Call, tuple[tuple[int, Layout], ...]]]:
    """The call as it is, then with layouts for constants that may have rows for each sample; each with `aligned`."""
    yield call, ()
    if call.has_loose_rows():
        return
    options = [[where] if where else _list_alignments(t, call.batch) for t, where in call.pairs]
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
    arguments = call.pairs
    dims = [w.dim if isinstance(w, Layout) and w.loose and t.dim() else None for t, w in arguments]
    size = max(1, next((t.shape[d] for t, d in zip(call.tensors, dims, strict=True) if d is not None), 1))
    for precision in PRECISIONS:
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
            invent(convert(t, precision), w, False, "unit") if isinstance(w, Layout) else convert(t, precision)
            for t, w in call.pairs
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
        after = call.run([_make_larger(t, where, call.batch) for t, where in call.pairs])
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
            size, larger = old.shape[dim], new.shape[dim]
            has_patterns = size * (call.batch + 1) == larger * call.batch
            candidates.append(list(_iterate_layouts(call, dim, size, has_patterns)))
    return candidates


def _make_larger(tensor: Tensor, where: Where | None, batch: int) -> Tensor:
    """A meta tensor of the shape that `tensor` would have with one more sample."""
    shape = list(tensor.shape)
    if isinstance(where, Layout) and shape:
        shape[where.dim] += shape[where.dim] // batch if where.ids is None else 1
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _iterate_layouts(call: Call, dim: int, size: int, has_patterns: bool = True) -> Iterator[Layout]:
    """The layouts that samples can have in dimension `dim` of a result, which has this size."""
    layouts = [where for t, where in call.pairs if isinstance(where, Layout) and t.dim() and t.shape[where.dim] == size]
    yield from dict.fromkeys(replace(where, dim=dim, alternatives=(), loose_index=False) for where in layouts)
    if has_patterns:
        yield from iterate_patterns(dim, size, call.batch)


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
    arguments = call.pairs
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
    before, all_changed = (to_double(each[result]) for each in (trials.before, trials.all_changed))
    changed = (to_double(after) for _, after in trials.iterate_changed(result))
    for half, rest in zip(changed, changed, strict=True):  # a set of samples, and its complement
        scale = torch.stack([part.abs() for part in (before, all_changed, half, rest)]).amax(0)
        difference = (before + all_changed - half - rest).abs()
        if not bool((difference <= _SUM_TOLERANCE * scale).all()):
            return False
    return True


def _is_close(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(to_double(a), to_double(b), **_TOLERANCE, equal_nan=True)


def _is_coarse(result: Tensor) -> bool:
    """Whether numbers have fewer digits than float32."""
    dtype = result.dtype.to_real() if result.is_complex() else result.dtype
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps
