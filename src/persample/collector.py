"""Gathers the terms of one backward pass and, when it has ended, gives each parameter its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.graph import leaves_behind
from persample.terms import Dense, Term, dense_sum

Deliver = Callable[[Tensor, Sequence[Term]], None]


class Collector:
    """`deliver(parameter, terms)` is called for each parameter at the end of each backward pass.

    A pass that fails half-way delivers nothing. What arrives for a tensor that was computed from parameters (a
    transposed weight, a weight norm) is pulled back to them.
    """

    def __init__(self, parameters: Iterable[Tensor], deliver: Deliver) -> None:
        self.parameters = {id(p): p for p in parameters}
        self.deliver = deliver
        self._arrived: dict[int, dict[int, tuple[Tensor, list[Term]]]] = {}

    def receive(self, weight: Tensor, term: Term) -> None:
        """Takes a term that a backward pass found for a parameter, or for a tensor computed from parameters."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in self._arrived:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(backward_pass))
            self._arrived[backward_pass] = {}
        self._arrived[backward_pass].setdefault(id(weight), (weight, []))[1].append(term)

    def _end(self, backward_pass: int) -> None:
        arrived = self._arrived.pop(backward_pass)
        for weight, terms in list(arrived.values()):
            if id(weight) not in self.parameters:
                for parameter, rows in self._pulled_back(weight, terms):
                    arrived.setdefault(id(parameter), (parameter, []))[1].append(Dense(rows))
        for weight, terms in arrived.values():
            if id(weight) in self.parameters:
                self.deliver(weight, terms)

    def _pulled_back(self, derived: Tensor, terms: Sequence[Term]) -> list[tuple[Tensor, Tensor]]:
        """The per-sample gradients of the parameters that `derived` was computed from."""
        leaves = leaves_behind(derived)
        foreign = [leaf for leaf in leaves if id(leaf) not in self.parameters]
        if foreign:
            raise PerSampleError(
                f"A weight of shape {tuple(derived.shape)} was computed from parameters of the model and from a tensor "
                f"of shape {tuple(foreign[0].shape)} that requires grad but is no parameter of it. Register that "
                "tensor as a parameter, or detach it."
            )
        rows = dense_sum(terms).to(derived.dtype)
        grads: tuple[Tensor | None, ...]
        try:
            grads = torch.autograd.grad(
                derived, leaves, rows, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except RuntimeError:  # a function on the way that vmap does not know
            each = [torch.autograd.grad(derived, leaves, row, retain_graph=True, allow_unused=True) for row in rows]
            grads = tuple(None if None in column else torch.stack(column) for column in zip(*each, strict=True))
        return [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
