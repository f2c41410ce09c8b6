"""A use of a weight in the forward pass: runs it, and taps its result for the backward pass."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.functions import find_results
from persample._internal.tree import find_slots, map_tensors, take_out_tensors
from persample.backward.collector import Collector
from persample.backward.entry_moves import is_entry_move
from persample.backward.tap import Plan, Tap, Use
from persample.errors import PerSampleError, SamplesMixed, op_name
from persample.forward.kernels import kernel, run_detached
from persample.layouts import Motion, Op, motion_of
from persample.layouts.functions import WRITES
from persample.layouts.layout import Layout, Reduced
from persample.rules import Rule, get_rules

REMEDY = (
    "Keep the samples apart (GroupNorm or LayerNorm instead of BatchNorm, or eval() for it; statistics and attention "
    "within a sample), or tell where the batch lies with batch_size and batch_first."
)


class Surroundings(Protocol):
    """What a use needs to know of the forward pass that it is part of."""

    batch: int
    collector: Collector
    anchor: Tensor  # which every tapped result depends on
    anchor_node: Any  # and what gathers its gradient: it is part of every backward pass that reaches weights

    def place(self) -> str: ...


def run_use(
    op: Op, weights: dict[int, Tensor], rules: Sequence[Rule], around: Surroundings, motion: Motion | None = None
) -> tuple[Any, Motion]:
    """The result of an op that uses `weights` (by their position among its tensors), and where its samples lie.

    `motion` says how the op moves the samples, if that is known already.
    """
    check_apart(op, around)
    if op.func in WRITES and not is_entry_move(op):
        raise PerSampleError(
            f"{op_name(op.func)}, in {around.place()}, combines weights with samples while it puts them in place. Do "
            "the one and then the other."
        )
    saved = [t.detach() if i in weights else t for i, t in enumerate(op.tensors)]
    if op.inplace:
        saved[0] = saved[0].clone()
        if 0 in weights:
            weights = {**weights, 0: _moved_aside(op, around)}
    trace = tracing.get_trace()
    rng_state = None if rules or trace else torch.get_rng_state()
    drawn = trace.drawn if trace else 0
    result = run_detached(op, weights, whole=any(rule.whole for rule in rules))
    draws = trace.drawn > drawn and not rules if trace else _changed(rng_state)
    if draws:
        raise PerSampleError(
            f"{op_name(op.func)}, in {around.place()}, draws random numbers where it uses weights, which cannot be "
            "drawn again for each sample. Draw them in a function of their own, as dropout before or after it does."
        )

    results = find_results(result, op.args)
    motion = motion or motion_of(op, results)
    key = tuple(weights)
    plan = motion.plans.get(key)
    if plan is None or plan.rules is not rules:
        plan = motion.plans[key] = _planned(op, results, weights, rules, motion, around)
        motion.use = plan if _can_be_repeated(op, result, weights, plan) else None
    if not plan.tapped:
        return result, motion

    shapes = tuple([r.shape for r in results])
    autocast = _autocast(op.tensors[0].device.type)
    use = Use(plan, shapes, weights, autocast, around.batch, around.collector, around.anchor_node)
    around.collector.expect(weights.values())
    if around.collector.early:
        factors = [t for i, t in enumerate(op.tensors) if i not in weights] + [results[i] for i in plan.tapped]
        around.collector.expect_bytes(sum(t.nbytes for t in factors))
    if plan.rule is not None and plan.rule.whole:
        saved += results
    chosen = [results[i] if op.inplace else _beneath(results[i]) for i in plan.tapped]
    shared = plan.moves and any(_same_memory(c, w) for c in chosen for w in weights.values())
    copy = not op.inplace and (plan.reads_result or shared or any(c._base is not None for c in chosen))
    passed_on = Tap.apply(use, saved, copy, *chosen, *(op.tensors[i] for i in plan.inputs), around.anchor)
    seen = {i: p if p.shape == shapes[i] else p.view(shapes[i]) for i, p in zip(plan.tapped, passed_on, strict=True)}
    if isinstance(result, Tensor):
        return seen[0], motion
    supply = iter([seen.get(i, r) for i, r in enumerate(results)])
    return map_tensors(lambda _: next(supply), result), motion


def can_repeat(op: Op, plan: Plan, around: Surroundings) -> bool:
    """Whether a call of the kind that `plan` was made for can be run by it."""
    parameters = around.collector.parameters
    return all([id(op.tensors[i]) in parameters for i, _ in plan.weights_at]) and plan.rules is get_rules(op.func)


def repeat_use(op: Op, plan: Plan, around: Surroundings) -> Tensor:
    """The result of a call that has been planned: the same as above, without what cannot happen here."""
    saved, weights = list(op.tensors), {i: op.tensors[i] for i, _ in plan.weights_at}
    if plan.reached:
        args, kwargs = list(op.args), dict(op.kwargs)
        for position, argument in plan.weights_at:
            (args if isinstance(argument, int) else kwargs)[argument] = saved[position].detach()  # type: ignore[index]
        result = plan.kernel(*args, **kwargs)
    else:
        result = plan.kernel(*op.args, **op.kwargs).detach()
    collector = around.collector
    use = Use(
        plan, (result.shape,), weights, _autocast(result.device.type), around.batch, collector, around.anchor_node
    )
    collector.expect(weights.values())
    if collector.early:
        collector.expect_bytes(sum([t.nbytes for i, t in enumerate(saved) if i not in weights], result.nbytes))
    for i in weights:
        saved[i] = saved[i].detach()
    chosen = _beneath(result)
    (seen,) = Tap.apply(use, saved, plan.reads_result or chosen._base is not None, chosen, around.anchor)
    return seen if seen.shape == result.shape else seen.view(result.shape)


def _can_be_repeated(op: Op, result: Any, weights: dict[int, Tensor], plan: Plan) -> bool:
    """Whether this is a plain call by a rule, which gives one tensor, and nothing but its weights may be weights."""
    may_be_weights = {i for i, t in enumerate(op.tensors) if t.requires_grad and op.where[i] is None}
    plain = plan.rule is not None and not plan.rule.whole and not op.inplace and isinstance(result, Tensor)
    return plain and bool(plan.tapped) and len(plan.weights_at) == len(weights) and may_be_weights == {*weights}


def _weights_at(op: Op, weights: dict[int, Tensor]) -> list[tuple[int, int | str]]:
    """For each weight its position among the tensors, and its place or name among the arguments, if all are such."""
    given: list[tuple[int | str, Any]] = [*enumerate(op.args), *op.kwargs.items()]
    places = [place for place, arg in given if isinstance(arg, Tensor)]
    return [(i, places[i]) for i in weights] if len(places) == len(op.tensors) else []


def _planned(
    op: Op,
    results: Sequence[Tensor],
    weights: dict[int, Tensor],
    rules: Sequence[Rule],
    motion: Motion,
    around: Surroundings,
) -> Plan:
    tapped = tuple(i for i, r in enumerate(results) if r.is_floating_point() or r.is_complex())
    _check_results(op, [motion.results[i] for i in tapped], around)
    layouts = tuple(motion.follows(i) or (w if isinstance(w, Layout) else None) for i, w in enumerate(op.where))
    call = take_out_tensors((op.args, op.kwargs))
    # Where there are no samples it is not known where they lie, and makes no difference.
    rule = next((r for r in rules if not around.batch or _holds(r, op, call, layouts, weights)), None)
    whole = any(r.whole for r in rules)
    if rule is None and whole:
        raise PerSampleError(f"{op_name(op.func)}, in {around.place()}, has samples where none are expected.")
    where = tuple(w if isinstance(w, Layout) else None for w in motion.results)
    reached = [i for i, t in enumerate(op.tensors) if t.requires_grad and i not in weights]
    return Plan(
        op.func, call, layouts, where, tapped, reached if whole else [], rule, rules,
        rule is None and is_entry_move(op),
        kernel(op.func, weights) if reached else op.func, bool(reached), _weights_at(op, weights),
    )  # fmt: skip


def _autocast(device: str) -> tuple[str, torch.dtype] | None:
    """The type that operations are run in, if it is not that of their arguments."""
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _moved_aside(op: Op, around: Surroundings) -> Tensor:
    """The weights that samples are about to be written into, for the tensor itself will be the samples'."""
    weight = op.tensors[0]
    if weight.is_leaf or weight._base is not None or around.collector.uses(weight):
        raise PerSampleError(
            f"{op_name(op.func)}, in {around.place()}, writes samples into a tensor of {tuple(weight.shape)} that was "
            "computed from weights, and is also used otherwise. Write into a clone of it."
        )
    aside = weight.clone()
    weight.detach_()
    return aside


def _changed(rng_state: Tensor | None) -> bool:
    return rng_state is not None and not torch.equal(torch.get_rng_state(), rng_state)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return _torch.get_storage_id(a) == _torch.get_storage_id(b)


def _beneath(result: Tensor) -> Tensor:
    """What a result is a view of, if it is all of that: a linear layer on sequences gives a view of rows."""
    base = result._base
    whole = base is not None and base.numel() == result.numel() and base.is_contiguous() and result.is_contiguous()
    return base if whole and base is not None and not base.is_leaf else result


def check_apart(op: Op, around: Surroundings) -> None:
    """Refuses arguments in which the samples are not apart."""
    if not all([t.layout is torch.strided for t in op.tensors]):  # a list, which is quicker for so few
        cause = "uses weights with sparse tensors: make them dense"
        raise PerSampleError(f"{op_name(op.func)}, in {around.place()}, {cause}.")
    for where in op.where:
        if isinstance(where, Reduced):
            raise SamplesMixed(
                f"{op_name(op.func)}, in {around.place()}, uses weights on a sum over the samples ({where.cause}, in "
                f"{where.place}), as a penalty on the weights does: it is no sample's own. Leave it to the optimizer "
                "(weight_decay), or give it a backward pass of its own, outside of the recording."
            )
        if where is not None and not isinstance(where, Layout):
            raise SamplesMixed(
                f"{op_name(op.func)}, in {around.place()}, uses weights on a tensor in which the samples of the batch "
                f"are not apart: {where.cause}, in {where.place}. {REMEDY}"
            )


def _check_results(op: Op, results: Sequence[Any], around: Surroundings) -> None:
    for where in results:
        if not isinstance(where, Layout):
            cause = where.cause if where else f"{op_name(op.func)} gives something that belongs to no sample"
            raise SamplesMixed(f"The samples of the batch are mixed in {around.place()}: {cause}. {REMEDY}")


def _holds(
    rule: Rule, op: Op, call: tuple[Any, Any], layouts: Sequence[Layout | None], weights: Container[int]
) -> bool:
    """Whether a rule is for this call, and the samples lie where it expects them, and in no other arguments."""
    named = rule.bind(*call)
    if not named.keys() <= rule.known or not rule.when(*op.args, **op.kwargs):
        return False
    for name, value in named.items() if not rule.as_they_lie else ():
        for slot in find_slots(value):
            layout = layouts[slot]
            if (layout is not None) != (name in rule.batched) or (slot in weights and layout and not rule.whole):
                return False
            if layout is not None and not rule.accepts(op.tensors[slot], layout.dim):
                return False
    return True
