"""A use of a weight, as the backward pass needs it: a tap reads the gradient of its result, which becomes terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.tree import find_slots, put_in_tensors
from persample.backward.entry_moves import compute_moved_terms
from persample.errors import ROWS_ADVICE, PerSampleError, get_op_name, raise_or_complain
from persample.layouts import Call, Layout, Owners, join_samples, make_sample_ids, place_rows, split_samples
from persample.rules import Rule, compute_generic_gradients
from persample.terms import Dense, Term, is_complex

if TYPE_CHECKING:
    from persample.backward.collector import Collector


@dataclass(frozen=True)
class Plan:
    """What all uses of a function with arguments of the same types and shapes have in common."""

    func: Callable[..., Any]
    arguments: tuple[Any, Any]  # the arguments without their tensors
    layouts: tuple[Layout | None, ...]  # of each tensor in the arguments
    results: tuple[Layout | None, ...]  # of each tensor in the result
    tapped: tuple[int, ...]  # the results that can have a gradient
    inputs: Sequence[int]  # positions of the activations whose gradient the rule computes
    rule: Rule | None  # None: the generic rule, or the rule of functions that only move entries
    rules: Sequence[Rule]  # the candidates among which `rule` was chosen
    moves: bool  # whether the function only moves entries
    kernel: Callable[..., Any]  # computes the result without gradients of the weights
    has_graph: bool  # whether activations have gradients
    weights_at: Sequence[tuple[int, int]]  # of each weight: position among the tensors, and among the arguments
    tensors_at: Sequence[int]  # of each tensor: position among the arguments; empty if one is nested

    @cached_property
    def stacked_position(self) -> int | None:
        """The position of the activation, if several uses can be computed as one with more samples; else None."""
        batched = [i for i, layout in enumerate(self.layouts) if layout is not None]
        if self.rule is None or not self.rule.stacks or len(batched) != 1:
            return None
        layouts = (self.layouts[batched[0]], *self.results)
        is_in_front = all(layout is not None and layout.is_pattern and layout.dim == 0 for layout in layouts)
        are_others_weights = len(self.weights_at) == len(self.layouts) - 1
        return batched[0] if is_in_front and are_others_weights else None

    @cached_property
    def reads_result(self) -> bool:
        """Whether the op's own backward may read its result, which then must not count as changed in place."""
        return not self.moves and (self.rule is None or self.rule.reads_result)

    @cached_property
    def positions(self) -> dict[str, tuple[int, ...]]:
        """The positions of the tensors in each argument, by the argument's name."""
        assert self.rule is not None
        return {name: tuple(find_slots(value)) for name, value in self.rule.bind(*self.arguments).items()}

    @property
    def source(self) -> str:
        """The name of the rule, for reports; a recurrent layer passes the function that it stands for."""
        first = self.arguments[0][0] if self.arguments[0] else None
        name = get_op_name(first if callable(first) else self.func).strip("_")
        return name if self.rule is not None else f"moves ({name})" if self.moves else f"generic ({name})"


@dataclass(slots=True)
class RecordedUse:
    """One call of a torch function with weights on one side and samples on the other; keeps no activation alive."""

    plan: Plan
    shapes: tuple[torch.Size, ...]  # of each tensor in the result
    weights: dict[int, Tensor]  # position among the tensors -> parameter, or a tensor computed from parameters
    autocast: tuple[str, torch.dtype] | None
    batch: int
    collector: Collector

    def refuse_second_derivative(self) -> NoReturn:
        """Raise: a backward pass with create_graph=True reached this use."""
        raise PerSampleError(
            f"{get_op_name(self.plan.func)}: a backward pass with create_graph=True reached a use of a weight. "
            "Per-sample gradients of gradients are not available in a recording, whose weights are detached. For a "
            "penalty on the norms of per-sample gradients, use persample.differentiable_norms() outside of the block. "
            f"{ROWS_ADVICE}"
            + (
                ""
                if self.collector.receiver.complain is None
                else " A monitor measures this step: end it with its stop()."
            )
        )

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], deliver: bool) -> list[Tensor | None]:
        """Compute the terms of all weights and, with `deliver`, pass them to the collector.

        Returns the gradients of `plan.inputs`.
        """
        plan = self.plan
        if self.batch == 0:
            return [None] * len(plan.inputs)
        tensors = [t.detach() if t.requires_grad else t for t in tensors]
        own_grads: list[Tensor | None] = [None] * len(plan.results)
        for i, grad in zip(plan.tapped, grads, strict=True):
            layout = plan.results[i]
            if grad is not None and layout is not None:
                own_grads[i] = grad = grad.reshape(self.shapes[i])
                if layout.ids is not None:
                    self._check_constant_rows(grad, layout)
        terms = self._compute_moved_terms(tensors, own_grads) if plan.moves else self.compute_terms(tensors, own_grads)
        source = plan.source if self.collector.sources is not None else ""
        for position, weight in self.weights.items() if deliver else ():
            if position in terms:
                self.collector.receive(weight, self._place(terms[position], position), source)
        return [self._join(terms[i], i, tensors[i].shape) if i in terms else None for i in plan.inputs]

    def _check_constant_rows(self, grad: Tensor, layout: Layout) -> None:
        """Refuse a gradient that reaches rows which belong to no sample."""
        rows = [j for j, n in enumerate(layout.ids or ()) if n < 0]
        if not rows:
            return
        is_reached = grad.index_select(layout.dim, torch.tensor(rows, device=grad.device)).any()
        cause = (
            f"{get_op_name(self.plan.func)}: the loss depends on rows {rows} of a result, which belong to no sample. "
            "They were made of constants and put beside samples in the batch dimension. Leave these rows out of the "
            "loss, or give each sample one."
        )
        trace = tracing.get_trace()
        if trace is not None:
            trace.require(~is_reached, cause)
        elif bool(is_reached):
            raise_or_complain(PerSampleError(cause), self.collector.receiver.complain)

    def _place(self, term: Term, position: int) -> Term:
        """The term; if each sample used only some rows of the weight, placed in these rows."""
        layout, weight = self.plan.layouts[position], self.weights[position]
        if not weight.is_complex() and is_complex(term):
            term = Dense(term.dense().real)
        return term if layout is None else Dense(place_rows(term.dense(), layout, weight.shape, self.batch))

    def _join(self, term: Term, position: int, shape: torch.Size) -> Tensor:
        layout = self.plan.layouts[position]
        assert layout is not None
        return join_samples(term.dense(), layout, shape, self.batch)

    def _compute_moved_terms(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[int, Term]:
        args, kwargs = put_in_tensors(self.plan.arguments, tensors)
        call = Call(self.plan.func, args, kwargs, tuple(tensors), self.plan.layouts, self.batch)
        (grad,) = grads
        if grad is None:
            return {}
        with tracing.suspend():
            owner = make_sample_ids(grad, self.plan.results[0], self.batch)
        terms = compute_moved_terms(call, self.weights, grad, owner)
        return self.compute_terms(tensors, grads) if terms is None else terms

    def compute_terms(self, tensors: Sequence[Tensor], own_grads: Sequence[Tensor | None]) -> dict[int, Term]:
        """The rule's terms, by the positions of the tensors that they belong to."""
        plan = self.plan
        if plan.rule is not None and plan.rule.as_they_lie:
            with tracing.suspend():
                owners = Owners(make_sample_ids(own_grads[0], plan.results[0], self.batch), self.batch)  # type: ignore[arg-type]
            return self._apply_rule(plan.rule, [own_grads[0] if len(own_grads) == 1 else own_grads, owners], tensors)
        whole = plan.rule is not None and plan.rule.whole  # then `tensors` includes the results
        layouts = (*plan.layouts, *plan.results) if whole else plan.layouts
        # Samples with fewer rows than others are filled up. Padding rows get zero gradient, so they add nothing.
        rows = [
            t
            if layout is None
            else split_samples(t, layout, self.batch, zeros=not (t.is_floating_point() or t.is_complex()))
            for t, layout in zip(tensors, layouts, strict=True)
        ]
        grads = [
            split_samples(grad, layout, self.batch) if grad is not None and layout is not None else None
            for grad, layout in zip(own_grads, plan.results, strict=True)
        ]
        if plan.rule is not None:
            if self.collector.positions is not None and (terms := self._compute_by_position(rows, grads)) is not None:
                return terms
            given: list[Any] = [grads[0] if len(grads) == 1 else grads]
            if whole:
                given.append(rows[len(plan.layouts) :])
            return self._apply_rule(plan.rule, given, rows)
        positions = list(self.weights)
        batched = [layout is not None for layout in plan.layouts]
        device, dtype = self.autocast or (grads[0].device.type if grads[0] is not None else "cpu", None)
        has_autocast = torch.amp.is_autocast_available(device)
        with torch.autocast(device, dtype, enabled=self.autocast is not None) if has_autocast else nullcontext():
            found = compute_generic_gradients(plan.func, plan.arguments, rows, batched, positions, grads)
        return dict(zip(positions, map(Dense, found), strict=True))

    def _compute_by_position(self, rows: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[int, Term] | None:
        """Terms with a row for each position of each sample, None if this use has no positions."""
        plan, splitter = self.plan, self.collector.positions
        assert plan.rule is not None and splitter is not None
        has_weights_of_samples = any(plan.layouts[position] is not None for position in self.weights)
        if plan.rule.whole or len(grads) != 1 or grads[0] is None or has_weights_of_samples:
            return None
        rule = plan.rule
        return splitter.compute_terms(plan, rows, grads[0], lambda grad, given: self._apply_rule(rule, [grad], given))

    def _apply_rule(self, rule: Rule, given: Sequence[Any], tensors: Sequence[Tensor]) -> dict[int, Term]:
        """The terms that a rule returns for these gradients and arguments, by the positions of the arguments."""
        args, kwargs = put_in_tensors(self.plan.arguments, tensors)
        found: dict[int, Term] = {}
        for name, term in rule.terms(*given, *args, **kwargs).items():
            positions = self.plan.positions.get(name, ())
            found.update(zip(positions, term if isinstance(term, (list, tuple)) else [term], strict=False))  # type: ignore[list-item]
        without = self.weights.keys() - found.keys()
        if without:
            missing = [name for name, positions in self.plan.positions.items() if without & {*positions}]
            raise PerSampleError(
                f"The rule of {get_op_name(self.plan.func)} returns no term for {missing}, which are weights in this "
                "call."
            )
        return found


class Tap(torch.autograd.Function):
    """The identity. Its backward sees the gradient of a use's result, together with what the use saved.

    The function of the use ran before, under ordinary autograd with its weights detached. So torch's own backward
    computes the gradients of the activations (or the rule does, if it is `whole`), and no gradient of a weight is
    computed. The last argument is the anchor, a leaf that requires grad: through it the result requires grad even if no
    activation does.
    """

    @staticmethod
    def forward(ctx: Any, use: RecordedUse, saved: Sequence[Tensor], copy: bool, *tensors: Tensor) -> Any:
        # The results come first: if a result is a view that is changed in place, autograd looks at the first tensor.
        results = tensors[: len(use.plan.tapped)]
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if copy:
            return tuple(result.clone() for result in results)
        # Marking the result as changed in place costs nothing, and lets the user change it in place too.
        ctx.mark_dirty(*results)
        return results

    @staticmethod
    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        use: RecordedUse = ctx.use
        if _torch.is_compiled_autograd_running():
            raise PerSampleError(
                "Compiled autograd runs the backward pass of a recording, and would keep nothing per sample. Call "
                "backward() inside the block, where compiled autograd is turned off, or turn it off yourself."
            )
        if torch.is_grad_enabled():
            use.refuse_second_derivative()
        # The anchor is not reached by autograd.grad(loss, inputs), which must leave no per-sample gradients.
        deliver = _torch.will_run_node(use.collector.anchor_node)
        if deliver and use.batch:  # in an empty batch nothing arrives
            use.collector.note_pass()
        input_grads: Sequence[Tensor | None] = [None] * len(use.plan.inputs)
        if (deliver or input_grads) and any(grad is not None for grad in grads):
            saved = ctx.saved_tensors  # reading them may start a recomputation, under the tracker
            with _torch.DisableTorchFunction():
                if use.collector.trace is None:
                    input_grads = use.backward(saved, grads, deliver)
                else:  # on a GPU, autograd runs in a thread that does not have the trace
                    with tracing.activate(use.collector.trace):
                        input_grads = use.backward(saved, grads, deliver)
        return None, None, None, *grads, *input_grads, None


def is_tap(node: Any) -> bool:
    """Whether a node of the autograd graph belongs to a tap."""
    return isinstance(getattr(node, "use", None), RecordedUse)
