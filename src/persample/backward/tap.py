"""Reads the gradient of a use's result out of the backward pass, and turns it into the terms of the use's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.tree import find_slots, put_in_tensors
from persample.backward.collector import Collector
from persample.backward.entry_moves import compute_moved_terms
from persample.errors import PerSampleError, op_name
from persample.layouts import Op
from persample.layouts.layout import Layout, Owners, joined, place, sample_ids, samples
from persample.rules.generic import compute_generic_gradients
from persample.rules.registry import Rule
from persample.terms import Dense, Term, is_complex


@dataclass(frozen=True)
class Plan:
    """What is the same for all uses of a function with arguments of the same kinds and shapes."""

    func: Callable[..., Any]
    call: tuple[Any, Any]  # the arguments, with slots in place of tensors
    layouts: tuple[Layout | None, ...]  # of each tensor in the arguments
    results: tuple[Layout | None, ...]  # of each tensor in the result
    tapped: tuple[int, ...]  # which of these can have a gradient
    inputs: Sequence[int]  # the positions of activations whose gradient the rule gives
    rule: Rule | None  # None: the generic rule, or that of moves
    rules: Sequence[Rule]  # among which it was chosen
    moves: bool
    kernel: Callable[..., Any]  # what computes the result without gradients of the weights
    reached: bool  # whether activations have gradients
    weights_at: Sequence[tuple[int, int | str]]  # the weights' positions among the tensors, and where they are given

    @cached_property
    def reads_result(self) -> bool:
        """Whether the op's own backward may read its result, which must then not count as changed in place."""
        return not self.moves and (self.rule is None or self.rule.reads_result)

    @cached_property
    def named(self) -> dict[str, tuple[int, ...]]:
        """The positions of the tensors in each argument, by its name."""
        assert self.rule is not None
        return {name: tuple(find_slots(value)) for name, value in self.rule.bind(*self.call).items()}

    @property
    def source(self) -> str:
        """The name of the rule, for reports; a layer of a recurrent net is called with the function it stands for."""
        first = self.call[0][0] if self.call[0] else None
        name = op_name(first if callable(first) else self.func).strip("_")
        return name if self.rule is not None else f"moves ({name})" if self.moves else f"generic ({name})"


@dataclass(slots=True)
class Use:
    """One call of a torch function with weights on one side and samples on the other; it keeps no activation alive."""

    plan: Plan
    shapes: tuple[torch.Size, ...]  # of each tensor in the result
    weights: dict[int, Tensor]  # position among the tensors -> parameter, or what was computed from parameters
    autocast: tuple[str, torch.dtype] | None
    batch: int
    collector: Collector
    anchor_node: Any

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], deliver: bool) -> list[Tensor | None]:
        """Hands the terms of all weights to the collector, if they are wanted; gives the gradients of `inputs`."""
        plan = self.plan
        if self.batch == 0:
            return [None] * len(plan.inputs)
        tensors = [t.detach() for t in tensors]
        own_grads: list[Tensor | None] = [None] * len(plan.results)
        for i, grad in zip(plan.tapped, grads, strict=True):
            layout = plan.results[i]
            if grad is not None and layout is not None:
                own_grads[i] = grad = grad.reshape(self.shapes[i])
                if layout.ids is not None:
                    self._check_nobodys_rows(grad, layout)
        terms = self._moved_terms(tensors, own_grads) if plan.moves else self._terms(tensors, own_grads)
        source = plan.source if self.collector.sources is not None else ""
        for position, weight in self.weights.items() if deliver else ():
            if position in terms:
                self.collector.receive(weight, self._placed(terms[position], position), source)
        return [self._joined(terms[i], i, tensors[i].shape) if i in terms else None for i in plan.inputs]

    def _check_nobodys_rows(self, grad: Tensor, layout: Layout) -> None:
        rows = [j for j, n in enumerate(layout.ids or ()) if n < 0]
        if not rows:
            return
        reached = grad.index_select(layout.dim, torch.tensor(rows, device=grad.device)).any()
        cause = (
            f"{op_name(self.plan.func)}: the loss depends on rows {rows} of a result, which belong to no sample: they "
            "were made of constants and put beside samples along the batch. Leave them out, or give one to each."
        )
        trace = tracing.get_trace()
        if trace is not None:
            trace.require(~reached, cause)
        elif bool(reached):
            raise PerSampleError(cause)

    def _placed(self, term: Term, position: int) -> Term:
        """The term, in the rows of the weight that each sample used where not all of them used all."""
        layout, weight = self.plan.layouts[position], self.weights[position]
        if not weight.is_complex() and is_complex(term):
            term = Dense(term.dense().real)
        return term if layout is None else Dense(place(term.dense(), layout, weight.shape, self.batch))

    def _joined(self, term: Term, position: int, shape: torch.Size) -> Tensor:
        layout = self.plan.layouts[position]
        assert layout is not None
        return joined(term.dense(), layout, shape, self.batch)

    def _moved_terms(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[int, Term]:
        args, kwargs = put_in_tensors(self.plan.call, tensors)
        op = Op(self.plan.func, args, kwargs, tuple(tensors), self.plan.layouts, self.batch)
        (grad,) = grads
        if grad is None:
            return {}
        with tracing.suspend():
            owner = sample_ids(grad, self.plan.results[0], self.batch)
        terms = compute_moved_terms(op, self.weights, grad, owner)
        return self._terms(tensors, grads) if terms is None else terms

    def _terms(self, tensors: Sequence[Tensor], own_grads: Sequence[Tensor | None]) -> dict[int, Term]:
        """The rule's terms by the positions of the tensors they belong to."""
        plan = self.plan
        if plan.rule is not None and plan.rule.as_they_lie:
            with tracing.suspend():
                owners = Owners(sample_ids(own_grads[0], plan.results[0], self.batch), self.batch)  # type: ignore[arg-type]
            return self._matched(plan.rule, [own_grads[0] if len(own_grads) == 1 else own_grads, owners], tensors)
        whole = plan.rule is not None and plan.rule.whole  # then the results are there too
        layouts = (*plan.layouts, *plan.results) if whole else plan.layouts
        # Where samples have fewer rows than others, zeros for the gradients make the others' rows of no account.
        rows = [
            t if layout is None else samples(t, layout, self.batch, zeros=not (t.is_floating_point() or t.is_complex()))
            for t, layout in zip(tensors, layouts, strict=True)
        ]
        grads = [
            samples(grad, layout, self.batch) if grad is not None and layout is not None else None
            for grad, layout in zip(own_grads, plan.results, strict=True)
        ]
        if plan.rule is not None:
            given: list[Any] = [grads[0] if len(grads) == 1 else grads]
            if whole:
                given.append(rows[len(plan.layouts) :])
            return self._matched(plan.rule, given, rows)
        positions = list(self.weights)
        batched = [layout is not None for layout in plan.layouts]
        device, dtype = self.autocast or (grads[0].device.type if grads[0] is not None else "cpu", None)
        with torch.autocast(device, dtype, enabled=self.autocast is not None):
            found = compute_generic_gradients(plan.func, plan.call, rows, batched, positions, grads)
        return dict(zip(positions, map(Dense, found), strict=True))

    def _matched(self, rule: Rule, given: Sequence[Any], tensors: Sequence[Tensor]) -> dict[int, Term]:
        """What a rule gives for these gradients and arguments, by the positions of the arguments."""
        args, kwargs = put_in_tensors(self.plan.call, tensors)
        matched: dict[int, Term] = {}
        for name, term in rule.terms(*given, *args, **kwargs).items():
            positions = self.plan.named.get(name, ())
            matched.update(zip(positions, [term] if isinstance(term, Term) else term, strict=False))
        if not self.weights.keys() <= matched.keys():
            without = self.weights.keys() - matched.keys()
            missing = [name for name, positions in self.plan.named.items() if without & {*positions}]
            raise PerSampleError(
                f"The rule of {op_name(self.plan.func)} gives no term for {missing}, which are weights."
            )
        return matched


class Tap(torch.autograd.Function):
    """The identity. Its backward sees the gradient of a use's result, together with what the use had saved.

    The function itself ran before, under ordinary autograd with its weights detached: its own backward gives the
    gradients of the activations (or the rule does, if it is `whole`), and no gradient of a weight is computed. The last
    of the tensors is an anchor, a leaf that requires grad and never receives one: through it the result requires grad
    even where no activation does.
    """

    @staticmethod
    def forward(ctx: Any, use: Use, saved: Sequence[Tensor], copy: bool, *tensors: Tensor) -> Any:
        # In this order: where the result is a view that was changed in place, autograd takes the first tensor for it.
        results = tensors[: len(use.plan.tapped)]
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if copy:
            return tuple(result.clone() for result in results)
        # Passing it on as changed in place costs nothing, and lets the user change it in place too.
        ctx.mark_dirty(*results)
        return results

    @staticmethod
    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if _torch.is_compiled_autograd_running():
            raise PerSampleError(
                "Compiled autograd runs this backward pass of a recording, which keeps nothing per sample there. Call "
                "backward inside the block, where it is turned off, or turn it off."
            )
        if torch.is_grad_enabled():
            raise PerSampleError(
                f"{op_name(ctx.use.plan.func)}: a backward pass with create_graph=True reached a use of a weight. "
                "Per-sample gradients of gradients (a gradient penalty, for example) are not available."
            )
        wanted = _torch.will_run_node(ctx.use.anchor_node)  # not so in autograd.grad(loss, inputs)
        input_grads: Sequence[Tensor | None] = [None] * len(ctx.use.plan.inputs)
        if (wanted or input_grads) and any(grad is not None for grad in grads):
            saved = ctx.saved_tensors  # which may set off a recomputation, under the tracker
            with _torch.DisableTorchFunction():
                input_grads = ctx.use.backward(saved, grads, wanted)
        return None, None, None, *grads, *input_grads, None
