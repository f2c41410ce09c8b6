"""Reads the gradient of a use's result out of the backward pass, and turns it into the terms of the use's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.collector import Collector
from persample.errors import PerSampleError, op_name
from persample.layout import Layout, Owners, joined, place, sample_ids, samples
from persample.motion import Op
from persample.rules.generic import generic
from persample.rules.moves import moved_terms
from persample.rules.registry import Rule
from persample.terms import Dense, Term, is_complex
from persample.tree import filled, slots_in


@dataclass(frozen=True)
class Use:
    """One call of a torch function with weights on one side and samples on the other; it keeps no activation alive."""

    func: Callable[..., Any]
    call: tuple[Any, Any]  # the emptied arguments
    layouts: tuple[Layout | None, ...]  # of each tensor in the arguments
    results: tuple[Layout | None, ...]  # of each tensor in the result
    shapes: tuple[torch.Size, ...]  # of each tensor in the result
    tapped: tuple[int, ...]  # which of these can have a gradient
    weights: dict[int, Tensor]  # position among the tensors -> parameter, or what was computed from parameters
    inputs: Sequence[int]  # the positions of activations whose gradient the rule gives
    rule: Rule | None  # None: the generic rule, or that of moves
    moves: bool
    autocast: tuple[str, torch.dtype] | None
    batch: int
    collector: Collector

    @property
    def source(self) -> str:
        """The name of the rule, for reports; a layer of a recurrent net is called with the function it stands for."""
        first = self.call[0][0] if self.call[0] else None
        name = op_name(first if callable(first) else self.func).strip("_")
        return name if self.rule is not None else f"moves ({name})" if self.moves else f"generic ({name})"

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], deliver: bool) -> list[Tensor | None]:
        """Hands the terms of all weights to the collector, if they are wanted; gives the gradients of `inputs`."""
        if self.batch == 0:
            return [None] * len(self.inputs)
        tensors = [t.detach() for t in tensors]
        own_grads: list[Tensor | None] = [None] * len(self.results)
        for i, grad in zip(self.tapped, grads, strict=True):
            layout = self.results[i]
            if grad is not None and layout is not None:
                own_grads[i] = grad.reshape(self.shapes[i])
                self._check_nobodys_rows(own_grads[i], layout)  # type: ignore[arg-type]
        terms = self._moved_terms(tensors, own_grads) if self.moves else self._terms(tensors, own_grads)
        source = self.source if self.collector.sources is not None else ""
        for position, weight in self.weights.items() if deliver else ():
            if position in terms:
                self.collector.receive(weight, self._placed(terms[position], position), source)
        return [self._joined(terms[i], i, tensors[i].shape) if i in terms else None for i in self.inputs]

    def _check_nobodys_rows(self, grad: Tensor, layout: Layout) -> None:
        rows = [j for j, n in enumerate(layout.ids or ()) if n < 0]
        if rows and bool(grad.index_select(layout.dim, torch.tensor(rows, device=grad.device)).any()):
            raise PerSampleError(
                f"{op_name(self.func)}: the loss depends on rows {rows} of a result, which belong to no sample: they "
                "were made of constants and put beside samples along the batch. Leave them out, or give one to each."
            )

    def _placed(self, term: Term, position: int) -> Term:
        """The term, in the rows of the weight that each sample used where not all of them used all."""
        layout, weight = self.layouts[position], self.weights[position]
        if is_complex(term) and not weight.is_complex():
            term = Dense(term.dense().real)
        return term if layout is None else Dense(place(term.dense(), layout, weight.shape, self.batch))

    def _joined(self, term: Term, position: int, shape: torch.Size) -> Tensor:
        layout = self.layouts[position]
        assert layout is not None
        return joined(term.dense(), layout, shape, self.batch)

    def _moved_terms(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[int, Term]:
        args, kwargs = filled(self.call, tensors)
        op = Op(self.func, args, kwargs, tuple(tensors), self.layouts, self.batch)
        (grad,) = grads
        if grad is None:
            return {}
        return moved_terms(op, self.weights, grad, sample_ids(grad, self.results[0], self.batch))

    def _terms(self, tensors: Sequence[Tensor], own_grads: Sequence[Tensor | None]) -> dict[int, Term]:
        """The rule's terms by the positions of the tensors they belong to."""
        # Where samples have fewer rows than others, zeros for the gradients make the others' rows of no account.
        rows = [
            t if layout is None else samples(t, layout, self.batch, zeros=not (t.is_floating_point() or t.is_complex()))
            for t, layout in zip(tensors, self.layouts, strict=True)
        ]
        grads = [
            samples(grad, layout, self.batch) if grad is not None and layout is not None else None
            for grad, layout in zip(own_grads, self.results, strict=True)
        ]
        positions = list(self.weights)
        if self.rule is None:
            batched = [layout is not None for layout in self.layouts]
            device, dtype = self.autocast or (grads[0].device.type if grads[0] is not None else "cpu", None)
            with torch.autocast(device, dtype, enabled=self.autocast is not None):
                found = generic(self.func, self.call, rows, batched, positions, grads)
            return dict(zip(positions, map(Dense, found), strict=True))
        if self.rule.as_they_lie:
            rows, grads = list(tensors), list(own_grads)
        args, kwargs = filled(self.call, rows)
        given: list[Any] = [grads[0] if len(grads) == 1 else grads]
        if self.rule.as_they_lie:
            given.append(Owners(sample_ids(given[0], self.results[0], self.batch), self.batch))
        terms = self.rule.terms(*given, *args, **kwargs)
        named = self.rule.bind(*self.call)
        matched: dict[int, Term] = {}
        for name, term in terms.items():
            matched |= zip(slots_in(named.get(name)), [term] if isinstance(term, Term) else term, strict=False)
        missing = [name for name, value in named.items() if {*slots_in(value)} & (self.weights.keys() - matched.keys())]
        if missing:
            raise PerSampleError(f"The rule of {op_name(self.func)} gives no term for {missing}, which are weights.")
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
        results, ctx.anchor = tensors[: len(use.tapped)], tensors[-1]
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if copy:
            return tuple(result.clone() for result in results)
        # Passing it on as changed in place costs nothing, and lets the user change it in place too.
        ctx.mark_dirty(*results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise PerSampleError(
                f"{op_name(ctx.use.func)}: a backward pass with create_graph=True reached a use of a weight. "
                "Per-sample gradients of gradients (a gradient penalty, for example) are not available."
            )
        accumulate = torch.autograd.graph.get_gradient_edge(ctx.anchor).node
        wanted = torch._C._will_engine_execute_node(accumulate)  # not so in autograd.grad(loss, inputs)
        input_grads: Sequence[Tensor | None] = [None] * len(ctx.use.inputs)
        if (wanted or input_grads) and any(grad is not None for grad in grads):
            saved = ctx.saved_tensors  # which may set off a recomputation, under the tracker
            with torch._C.DisableTorchFunction():
                input_grads = ctx.use.backward(saved, grads, wanted)
        return None, None, None, *grads, *input_grads, None
