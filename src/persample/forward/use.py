"""Plan and run a use of a weight in the forward pass, and put a tap on its result; keep effects that hold at any size.

Most calls of a forward pass are of functions whose motion does not depend on sizes (`layouts.SIZE_FREE`). The first
such call with a key takes the steps (`steps`), and later ones do not. Functions that change shapes (`view`, `x[:, 0]`)
have no key: their layout is computed from the shapes each time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.functions import find_results
from persample._internal.precision import find_autocast
from persample._internal.rng import fork_rng
from persample._internal.tree import find_slots, map_tensors, take_out_tensors
from persample._torch import get_backward_pass
from persample.backward import MAX_ENTRIES, Plan, RecordedUse, RetainedUse, Tap, is_entry_move
from persample.errors import ROWS_ADVICE, PerSampleError, SamplesMixed, get_op_name
from persample.forward.contributions import find_owners
from persample.forward.kernels import choose_kernel, run_detached
from persample.forward.known import ForwardPass, KnownTensors
from persample.layouts import (
    HAS_PARAMETERS,
    HAS_SAMPLES,
    MEMO,
    Call,
    Effect,
    Key,
    Layout,
    Lost,
    Motion,
    Reduced,
    find_motion_with_units,
    find_size_free_layout,
    get_argument,
)
from persample.rules import RULES_VERSION, Rewrite, Rule, get_handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Use(Effect):
    """The effect of a call that uses weights.

    Attributes:
        plan: what all such uses have in common.
        weights: the positions of the weights among the tensors.
    """

    plan: Plan
    weights: tuple[int, ...]


def run_use(
    call: Call, weights: dict[int, Tensor], rules: Sequence[Rule], forward: ForwardPass, motion: Motion | None = None
) -> tuple[Any, Motion]:
    """Run an op that uses `weights` (by position among its tensors); returns its result and how the samples moved.

    `motion` is given if it is known already.
    """
    check_not_mixed(call, forward)
    if call.facts.writes_entries and not is_entry_move(call):
        raise PerSampleError(
            f"{get_op_name(call.func)}, in {forward.place()}, combines weights with samples while it writes them into "
            "a tensor (reduce=...). Combine them first, then write the result."
        )
    saved = [t.detach() if i in weights else t for i, t in enumerate(call.tensors)]
    if call.is_inplace:
        saved[0] = saved[0].clone()
        if 0 in weights:
            weights = {**weights, 0: _move_aside(call, forward)}
    result = _run_repeatable(call, weights, rules, forward)
    results = find_results(result, call.args)
    if motion is None:
        call, motion = (find_owners if forward.is_coupled else find_motion_with_units)(call, results)
    plan = _find_plan(call, result, weights, rules, motion, forward)
    if not plan.tapped:
        return result, motion
    seen = _tap(call, saved, results, weights, plan, forward)
    if isinstance(result, Tensor):
        return seen[0], motion
    supply = iter([seen.get(i, r) for i, r in enumerate(results)])
    return map_tensors(lambda _: next(supply), result), motion


def _run_repeatable(call: Call, weights: dict[int, Tensor], rules: Sequence[Rule], forward: ForwardPass) -> Any:
    """Run a call with its weights detached; refuse one without a rule that draws random numbers."""
    trace = tracing.get_trace()
    rng_state = None if rules or trace else torch.get_rng_state()
    drawn = trace.drawn if trace else 0
    result = run_detached(call, weights, without_graph=any(rule.whole for rule in rules))
    if trace.drawn > drawn and not rules if trace else _is_random(call, rng_state):
        raise PerSampleError(
            f"{get_op_name(call.func)}, in {forward.place()}, draws random numbers and uses weights in one call. The "
            "same numbers cannot be drawn again for each sample. Draw them in a separate call, as dropout does. "
            f"{ROWS_ADVICE}"
        )
    return result


def _find_plan(
    call: Call, result: Any, weights: dict[int, Tensor], rules: Sequence[Rule], motion: Motion, forward: ForwardPass
) -> Plan:
    """The plan of a use that has just run; it is kept if its motion holds for later calls."""
    known, positions = MEMO.get(call.key), tuple(weights)
    if known is None or known.motion is not motion:
        return _make_plan(call, find_results(result, call.args), weights, rules, motion, forward)
    if isinstance(known, Use) and known.weights == positions and known.plan.rules is rules:
        plan = known.plan
    else:
        plan = _make_plan(call, find_results(result, call.args), weights, rules, motion, forward)
    version = RULES_VERSION.number if _can_repeat_later(call, result, weights, plan) else None
    MEMO.add(call.key, Use(motion, version, plan=plan, weights=positions))
    return plan


def _tap(
    call: Call,
    saved: list[Tensor],
    results: Sequence[Tensor],
    weights: dict[int, Tensor],
    plan: Plan,
    forward: ForwardPass,
) -> dict[int, Tensor]:
    """Put a tap on the results of a use; returns them by position."""
    shapes, collector = tuple([r.shape for r in results]), forward.collector
    device = call.tensors[0].device.type
    dtype = find_autocast(device)
    autocast = None if dtype is None else (device, dtype)
    use = RecordedUse(plan, shapes, weights, autocast, forward.batch, collector)
    factors = [t for i, t in enumerate(call.tensors) if i not in weights] + [results[i] for i in plan.tapped]
    collector.uses.expect(weights.values(), factors)
    if plan.rule is not None and plan.rule.whole:
        saved += results
    chosen = [results[i] if call.is_inplace else _find_base(results[i]) for i in plan.tapped]
    shared = plan.moves and not {*map(_torch.get_storage_id, chosen)}.isdisjoint(
        map(_torch.get_storage_id, weights.values())
    )
    copy = not call.is_inplace and (plan.reads_result or shared or any(c._base is not None for c in chosen))
    tapped = Tap.apply(use, saved, copy, *chosen, *(call.tensors[i] for i in plan.inputs), collector.anchor)
    pairs = zip(plan.tapped, tapped, strict=True)
    return {i: each if each.shape == shapes[i] else each.view(shapes[i]) for i, each in pairs}


def repeat_use(
    args: Sequence[Any], kwargs: dict[str, Any], plan: Plan, forward: ForwardPass, is_checkpointed: bool
) -> Tensor:
    """`run_use` for a call of parameters with a plan, without the cases that cannot occur. This is the hot path.

    `is_checkpointed` says whether hooks see the tensors that autograd saves.
    """
    given, weights = [*args, *kwargs.values()], {}
    for position, at in plan.weights_at:
        weights[position] = weight = given[at]
        given[at] = weight.detach()
    if not plan.has_graph:
        result = plan.kernel(*args, **kwargs).detach()
    elif kwargs:
        result = plan.kernel(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
    else:
        result = plan.kernel(*given)
    saved = [given[at] for at in plan.tensors_at]
    collector, base = forward.collector, result._base
    chosen = result if base is None else _find_base(result)
    if get_backward_pass() < 0:  # else it is a recomputation
        uses, retained = collector.uses, collector.retained
        uses.parameters += weights.values()
        can_retain = retained.is_open and plan.has_graph and (chosen is not result or base is None)
        if can_retain and not is_checkpointed and result.numel() <= MAX_ENTRIES:
            retained.add(RetainedUse(plan, saved, weights, forward.batch, result.shape, chosen, retained.carrier))
            return result
        if uses.early:
            uses.factor_bytes += sum([t.nbytes for i, t in enumerate(saved) if i not in weights], result.nbytes)
    use = RecordedUse(plan, (result.shape,), weights, None, forward.batch, collector)
    (seen,) = Tap.apply(use, saved, plan.reads_result or chosen._base is not None, chosen, collector.anchor)
    return seen if seen.shape == result.shape else seen.view(result.shape)


def _can_repeat_later(call: Call, result: Any, weights: dict[int, Tensor], plan: Plan) -> bool:
    """Whether later calls with the same key can skip `run_use`: a rule, one result, no other possible weights."""
    if call.facts.statistics_at:
        return False
    possible_weights = {i for i, t in enumerate(call.tensors) if t.requires_grad and call.where[i] is None}
    is_plain = plan.rule is not None and not plan.rule.whole and not call.is_inplace and isinstance(result, Tensor)
    return is_plain and bool(plan.tapped) and len(plan.weights_at) == len(weights) and possible_weights == {*weights}


def _make_plan(
    call: Call,
    results: Sequence[Tensor],
    weights: dict[int, Tensor],
    rules: Sequence[Rule],
    motion: Motion,
    forward: ForwardPass,
) -> Plan:
    tapped = tuple(i for i, r in enumerate(results) if r.is_floating_point() or r.is_complex())
    _check_results(call, [motion.results[i] for i in tapped], forward)
    aligned = dict(motion.aligned)
    layouts = tuple(aligned.get(i) or (w if isinstance(w, Layout) else None) for i, w in enumerate(call.where))
    arguments = take_out_tensors((call.args, call.kwargs))
    # In an empty batch, layouts are not known and make no difference.
    rule = next((r for r in rules if not forward.batch or _is_for(r, call, arguments, layouts, weights)), None)
    whole = any(r.whole for r in rules)
    if rule is None and whole:
        raise PerSampleError(
            f"{get_op_name(call.func)}, in {forward.place()}, has samples in an argument where its rule expects none."
        )
    where = tuple(w if isinstance(w, Layout) else None for w in motion.results)
    with_graph = [i for i, t in enumerate(call.tensors) if t.requires_grad and i not in weights]
    tensors_at = [at for at, value in enumerate((*call.args, *call.kwargs.values())) if isinstance(value, Tensor)]
    if len(tensors_at) != len(call.tensors):
        tensors_at = []
    return Plan(
        func=call.func,
        arguments=arguments,
        layouts=layouts,
        results=where,
        tapped=tapped,
        inputs=with_graph if whole else [],
        rule=rule,
        rules=rules,
        moves=rule is None and is_entry_move(call),
        kernel=choose_kernel(call.func, weights) if with_graph else call.func,
        has_graph=bool(with_graph),
        weights_at=[(i, tensors_at[i]) for i in weights] if tensors_at else [],
        tensors_at=tensors_at,
    )


def _move_aside(call: Call, forward: ForwardPass) -> Tensor:
    """A copy of a derived weight that samples are about to be written into: the tensor itself becomes the samples'."""
    weight = call.tensors[0]
    if weight.is_leaf or weight._base is not None or forward.collector.uses.count(weight):
        raise PerSampleError(
            f"{get_op_name(call.func)}, in {forward.place()}, writes samples into a tensor of shape "
            f"{tuple(weight.shape)} that was computed from weights and has another use. Write into a clone of it."
        )
    copy = weight.clone()
    weight.detach_()
    return copy


def _is_random(call: Call, rng_state: Tensor | None) -> bool:
    """Whether an op that has just run drew random numbers; `rng_state` is the state before it."""
    if rng_state is None or torch.equal(torch.get_rng_state(), rng_state):
        return False
    # Another thread may have drawn them: run the op once more to see.
    args, kwargs = call.fill([t.detach().clone() for t in call.tensors])
    with torch.no_grad(), _torch.DisableTorchFunction(), fork_rng():
        return _torch.draws_random_numbers(lambda: call.func(*args, **kwargs))


def _find_base(result: Tensor) -> Tensor:
    """The base of a result that is a view of all of it: a linear layer on sequences returns a view of its rows."""
    base = result._base
    is_whole = base is not None and base.numel() == result.numel() and base.is_contiguous() and result.is_contiguous()
    return base if is_whole and base is not None and not base.is_leaf else result


def check_not_mixed(call: Call, forward: ForwardPass) -> None:
    """Refuse arguments in which the samples are mixed."""
    if not all([t.layout is torch.strided for t in call.tensors]):  # a list is faster than a generator for so few
        raise PerSampleError(
            f"{get_op_name(call.func)}, in {forward.place()}, uses weights with sparse tensors, which is not "
            "supported. Make them dense."
        )
    for where in call.where:
        if isinstance(where, Reduced):
            raise SamplesMixed(
                f"{get_op_name(call.func)}, in {forward.place()}, combines weights with a sum over the samples "
                f"({where.cause}, in {where.place}), as a penalty on the weights does. The result belongs to no "
                "single sample. Leave a penalty to the optimizer (weight_decay), or call its backward() outside the "
                "recording."
            )
        if isinstance(where, Lost):
            raise make_mixed_error(call, where, forward)


def make_mixed_error(call: Call, lost: Lost, forward: ForwardPass) -> SamplesMixed:
    """The refusal of a use of weights on a tensor in which samples are mixed."""
    return SamplesMixed(
        f"{get_op_name(call.func)}, in {forward.place()}, uses weights on a tensor in which the samples of the batch "
        f"are mixed: {lost.cause}, in {lost.place}. {forward.advice}"
    )


def _check_results(call: Call, results: Sequence[Any], forward: ForwardPass) -> None:
    for where in results:
        if not isinstance(where, Layout):
            cause = where.cause if where else f"the result of {get_op_name(call.func)} belongs to no sample"
            raise SamplesMixed(f"The samples of the batch are mixed in {forward.place()}: {cause}. {forward.advice}")


def _is_for(
    rule: Rule, call: Call, arguments: tuple[Any, Any], layouts: Sequence[Layout | None], weights: Container[int]
) -> bool:
    """Whether a rule is for this call, with samples in the arguments and dimensions that the rule expects."""
    named = rule.bind(*arguments)
    if not named.keys() <= rule.known or not rule.when(*call.args, **call.kwargs):
        return False
    for name, value in named.items() if not rule.as_they_lie else ():
        for slot in find_slots(value):
            layout = layouts[slot]
            if (layout is not None) != (name in rule.batched) or (slot in weights and layout and not rule.whole):
                return False
            if layout is not None and not rule.accepts(call.tensors[slot], layout.dim):
                return False
    return True


# ---- effects that hold at any size ----


def keep_effect(call: Call, result: Any, key: Key, contents: int, known: KnownTensors) -> None:
    """After a call that took the steps: keep what it did under its key without sizes, if that holds at any size.

    `contents` says what the tensors of the call are.
    """
    if not contents & HAS_SAMPLES or isinstance(get_handler(call.func), Rewrite) or not torch.is_grad_enabled():
        return
    if call.facts.statistics_at and get_argument(call, 5, "training", "use_input_stats", default=True):
        return
    if call.is_inplace or call.kwargs.get("requires_grad"):  # the audit compares what was written
        return
    results = find_results(result, call.args)
    layout = find_size_free_layout(call, results)
    if layout is None or any(each not in known or known.get_layout(each) != layout for each in results):
        return
    motion = Motion((layout,))
    if contents & HAS_PARAMETERS:
        use = MEMO.get(call.key)
        if not isinstance(use, Use) or use.rules_version is None:
            return
        if _has_fixed_weights(call, use.plan, layout, results[0]):
            MEMO.add(key, Use(motion, use.rules_version, plan=use.plan, weights=use.weights))
    elif all(isinstance(each, Tensor) for each in (result if isinstance(result, (tuple, list)) else [result])):
        MEMO.add(key, Effect(motion, RULES_VERSION.number))


def _has_fixed_weights(call: Call, plan: Plan, layout: Layout, result: Tensor) -> bool:
    """Whether no weight of a use can have rows for each sample, whatever its size is.

    `layout` is where the samples lie in the result.
    """
    dims = [call.tensors[i].dim() for i, _ in plan.weights_at]
    if any(plan.layouts[i] is not None for i, _ in plan.weights_at):
        return False
    if call.facts.shares_weights:
        return True
    if call.facts.operator in ("matmul", "mm"):
        return max(dims) <= 2
    if call.facts.operator == "addmm":
        return all(dim == (1 if i == 0 else 2) for (i, _), dim in zip(plan.weights_at, dims, strict=True))
    # Functions of entries: dimensions are counted from the last one.
    return call.facts.is_pointwise and all(dim < result.dim() - layout.dim for dim in dims)
