"""Gathers the terms of one backward pass and, when it has ended, gives each parameter its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from persample import _torch
from persample._internal.graph import find_leaves
from persample.backward.derived_weights import pull_back_term
from persample.errors import PerSampleError
from persample.terms import Dense, Term, add_terms, sum_dense

Deliver = Callable[[Tensor, Sequence[Term]], None]

# While it is set, recordings that are begun say there which rules gave the terms of each weight, by the weight's id.
asked_sources: ContextVar[dict[int, set[str]] | None] = ContextVar("asked sources", default=None)


def _nothing() -> None:
    pass


class Collector:
    """`deliver(parameter, terms)` is called for each parameter at the end of each backward pass, and then `finished()`.

    A pass that fails half-way delivers nothing. What arrives for a tensor that was computed from parameters (a
    transposed weight, a weight norm) is pulled back to them. With `early`, a parameter's terms are delivered as soon as
    those of all its uses are there, so that they can be freed.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        deliver: Deliver,
        finished: Callable[[], None] = _nothing,
        early: bool = False,
    ) -> None:
        self.parameters = {id(p): p for p in parameters}
        self.deliver = deliver
        self.finished = finished
        self.early = early
        self.factor_bytes = 0  # what all terms would keep
        self.pulling_back = False
        self.sources = asked_sources.get()
        self._uses: defaultdict[int, int] = defaultdict(int)
        self._entangled: set[int] = set()
        self._arrived: dict[int, dict[int, tuple[Tensor, list[Term]]]] = {}

    def pulls_back(self) -> bool:
        """Whether gradients are being pulled back to parameters now."""
        return self.pulling_back

    def expect_bytes(self, factor_bytes: int) -> None:
        """Says how much the terms of a use in the forward pass would keep."""
        if _torch.get_backward_pass() < 0:
            self.factor_bytes += factor_bytes

    def expect(self, weights: Iterable[Tensor]) -> None:
        """Says that a use of these weights is part of the forward pass (not of its recomputation)."""
        if _torch.get_backward_pass() >= 0:
            return
        for weight in weights:
            self._uses[id(weight)] += 1
            if self.early and id(weight) not in self.parameters:
                self._entangled |= {id(leaf) for leaf in find_leaves(weight)}

    def uses(self, weight: Tensor) -> int:
        """How many uses of a weight there have been."""
        return self._uses[id(weight)]

    def receive(self, weight: Tensor, term: Term, source: str = "a rule of your own") -> None:
        """Takes a term that a backward pass found for a parameter, or for a tensor computed from parameters."""
        if self.sources is not None:
            self.sources.setdefault(id(weight), set()).add(source)
        backward_pass = _torch.get_backward_pass()
        if backward_pass not in self._arrived:
            _torch.call_after_backward(lambda: self._end(backward_pass))
            self._arrived[backward_pass] = {}
        arrived = self._arrived[backward_pass]
        arrived.setdefault(id(weight), (weight, []))[1].append(term)
        complete = len(arrived[id(weight)][1]) == self._uses[id(weight)]
        if self.early and complete and id(weight) in self.parameters and id(weight) not in self._entangled:
            self.deliver(*arrived.pop(id(weight)))

    def _end(self, backward_pass: int) -> None:
        arrived = self._arrived.pop(backward_pass)
        self.pulling_back = True
        try:
            for weight, terms in list(arrived.values()):
                if id(weight) not in self.parameters:
                    sources = self._sources_of_derived(weight)
                    for parameter, term in self._pulled_back(weight, terms):
                        arrived.setdefault(id(parameter), (parameter, []))[1].append(term)
                        if self.sources is not None:
                            self.sources.setdefault(id(parameter), set()).update(sources)
        finally:
            self.pulling_back = False
        for weight, terms in arrived.values():
            if id(weight) in self.parameters:
                self.deliver(weight, terms)
        self.finished()

    def _sources_of_derived(self, derived: Tensor) -> list[str]:
        last_op = type(derived.grad_fn).__name__.partition("Backward")[0].strip("_").lower()
        return [f"{s} (through {last_op})" for s in (self.sources or {}).pop(id(derived), ())]

    def _pulled_back(self, derived: Tensor, terms: Sequence[Term]) -> list[tuple[Tensor, Term]]:
        """The terms of the parameters that `derived` was computed from."""
        found = pull_back_term(derived, add_terms(terms))
        if found is not None and id(found[0]) in self.parameters:
            return [found]
        leaves = find_leaves(derived)
        foreign = [leaf for leaf in leaves if id(leaf) not in self.parameters]
        if foreign:
            raise PerSampleError(
                f"A weight of shape {tuple(derived.shape)} was computed from parameters of the model and from a tensor "
                f"of shape {tuple(foreign[0].shape)} that requires grad but is no parameter of it. Register that "
                "tensor as a parameter, or detach it."
            )
        rows = sum_dense(terms).to(derived.dtype)
        grads: tuple[Tensor | None, ...]
        try:
            grads = torch.autograd.grad(
                derived, leaves, rows, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except RuntimeError:  # a function on the way that vmap does not know
            each = [torch.autograd.grad(derived, leaves, row, retain_graph=True, allow_unused=True) for row in rows]
            grads = tuple(None if None in column else torch.stack(column) for column in zip(*each, strict=True))
        return [(leaf, Dense(grad)) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
