"""Reads the gradient of a use's result out of the backward pass, and turns it into the terms of the use's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persample.collector import Collector
from persample.errors import PerSampleError, op_name
from persample.layout import Layout, place, samples
from persample.rules.generic import generic
from persample.rules.registry import Rule
from persample.terms import Dense, Term
from persample.tree import filled


@dataclass(frozen=True)
class Use:
    """One call of a torch function with weights on one side and samples on the other; it keeps no activation alive."""

    func: Callable[..., Any]
    call: tuple[Any, Any]  # the emptied arguments
    layouts: tuple[Layout | None, ...]  # of each tensor in the arguments
    results: tuple[Layout | None, ...]  # of each tensor in the result
    tapped: tuple[int, ...]  # which of these can have a gradient
    weights: dict[int, Tensor]  # position among the tensors -> parameter, or what was computed from parameters
    rule: Rule | None  # None: the generic rule
    batch: int
    collector: Collector

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Hands the terms of all weights to the collector."""
        rows = [
            t if layout is None else samples(t, layout, self.batch)
            for t, layout in zip(tensors, self.layouts, strict=True)
        ]
        grad_rows: list[Tensor | None] = [None] * len(self.results)
        for i, grad in zip(self.tapped, grads, strict=True):
            layout = self.results[i]
            if grad is not None and layout is not None:
                grad_rows[i] = samples(grad, layout, self.batch)
        for position, term in self._terms(rows, grad_rows):
            layout = self.layouts[position]
            if layout is not None:  # each sample used its own rows of this weight
                shape = self.weights[position].shape
                term = Dense(place(term.dense(), layout, shape, self.batch))
            self.collector.receive(self.weights[position], term)

    def _terms(self, rows: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[int, Term]]:
        positions = list(self.weights)
        if self.rule is None:
            batched = [layout is not None for layout in self.layouts]
            found = generic(self.func, self.call, rows, batched, positions, grads)
            return [(i, Dense(values)) for i, values in zip(positions, found, strict=True)]
        args, kwargs = filled(self.call, rows)
        terms = self.rule.terms(grads[0] if len(grads) == 1 else grads, *args, **kwargs)
        named = self.rule.bind(*self.call)
        matched: list[tuple[int, Term]] = []
        for name, term in terms.items():
            slots, parts = named.get(name), term
            if not isinstance(parts, (list, tuple)):
                slots, parts = [slots], [parts]
            matched += [(s.position, t) for s, t in zip(slots, parts, strict=True) if s is not None and t is not None]
        return [(i, term) for i, term in matched if i in self.weights]


class Tap(torch.autograd.Function):
    """The identity. Its backward sees the gradient of a use's result, together with what the use had saved.

    The function itself ran before, under ordinary autograd with its weights detached: its own backward gives the
    gradients of the activations, and no gradient of a weight is computed. `anchor` is a leaf that requires grad and never
    receives one: through it the result requires grad even where no activation does.
    """

    @staticmethod
    def forward(ctx: Any, use: Use, saved: Sequence[Tensor], copy: bool, *results_and_anchor: Tensor) -> Any:
        # In this order: where the result is a view that was changed in place, autograd takes the first tensor for it.
        *results, ctx.anchor = results_and_anchor
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if copy:
            return tuple(result.clone() for result in results)
        # Passing it on as changed in place costs nothing, and lets the user change it in place too.
        ctx.mark_dirty(*results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise PerSampleError(
                f"{op_name(ctx.use.func)}: a backward pass with create_graph=True reached a use of the model's weights. "
                "Per-sample gradients of gradients (a gradient penalty, for example) are not available."
            )
        accumulate = torch.autograd.graph.get_gradient_edge(ctx.anchor).node
        if torch._C._will_engine_execute_node(accumulate):  # not so in autograd.grad(loss, inputs)
            saved = ctx.saved_tensors  # which may set off a recomputation, under the tracker
            with torch._C.DisableTorchFunction():
                ctx.use.backward(saved, grads)
        return None, None, None, *grads, None
