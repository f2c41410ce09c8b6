"""Collects the terms of one backward pass and delivers them by parameter when the pass has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar

from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.graph import find_leaves
from persample.backward.derived_weights import pull_back
from persample.terms import Term

# Takes the terms that a backward pass found for a parameter.
Deliver = Callable[[Tensor, Sequence[Term]], None]

# While set, recordings note in it which rules gave the terms of each weight, by the id of the weight.
asked_sources: ContextVar[dict[int, set[str]] | None] = ContextVar("persample sources", default=None)


def _do_nothing() -> None:
    pass


class Collector:
    """Calls `deliver(parameter, terms)` for each parameter at the end of each backward pass, and then `finished()`.

    A pass that fails delivers nothing. Terms of a tensor that was computed from parameters (a transposed weight, a
    weight norm) are pulled back to the parameters. With `early`, a parameter's terms are delivered as soon as all its
    uses have arrived, so that they can be freed.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        deliver: Deliver,
        finished: Callable[[], None] = _do_nothing,
        early: bool = False,
    ) -> None:
        self.parameters = {id(p): p for p in parameters}
        self.deliver = deliver
        self.finished = finished
        self.early = early
        self.factor_bytes = 0  # what the terms of all uses would keep
        self.is_pulling_back = False
        self.sources = asked_sources.get()
        self.trace = tracing.get_trace()
        self._use_counts: defaultdict[int, int] = defaultdict(int)
        self._entangled: set[int] = set()  # parameters that are also used through a derived weight
        self._arrived: dict[int, dict[int, tuple[Tensor, list[Term]]]] = {}

    # ---- the forward pass ----

    def expect_bytes(self, factor_bytes: int) -> None:
        """Add the size of what the terms of a use would keep. A recomputation does not count."""
        if _torch.get_backward_pass() < 0:
            self.factor_bytes += factor_bytes

    def expect(self, weights: Iterable[Tensor]) -> None:
        """Count a use of these weights. A recomputation does not count."""
        if _torch.get_backward_pass() >= 0:
            return
        for weight in weights:
            self._use_counts[id(weight)] += 1
            if self.early and id(weight) not in self.parameters:
                self._entangled |= {id(leaf) for leaf in find_leaves(weight)}

    def count_uses(self, weight: Tensor) -> int:
        """The number of uses of a weight so far."""
        return self._use_counts[id(weight)]

    # ---- the backward pass ----

    def receive(self, weight: Tensor, term: Term, source: str = "a rule of your own") -> None:
        """Take a term that a backward pass found for a parameter, or for a tensor computed from parameters."""
        if self.sources is not None:
            self.sources.setdefault(id(weight), set()).add(source)
        backward_pass = _torch.get_backward_pass()
        if backward_pass not in self._arrived:
            _torch.call_after_backward(lambda: self._end(backward_pass))
            self._arrived[backward_pass] = {}
        arrived = self._arrived[backward_pass]
        arrived.setdefault(id(weight), (weight, []))[1].append(term)
        is_complete = len(arrived[id(weight)][1]) == self._use_counts[id(weight)]
        if self.early and is_complete and id(weight) in self.parameters and id(weight) not in self._entangled:
            self.deliver(*arrived.pop(id(weight)))

    def _end(self, backward_pass: int) -> None:
        arrived = self._arrived.pop(backward_pass)
        self.is_pulling_back = True
        try:
            for weight, terms in list(arrived.values()):
                if id(weight) not in self.parameters:
                    sources = self._take_sources(weight)
                    for parameter, term in pull_back(weight, terms, self.parameters):
                        arrived.setdefault(id(parameter), (parameter, []))[1].append(term)
                        if self.sources is not None:
                            self.sources.setdefault(id(parameter), set()).update(sources)
        finally:
            self.is_pulling_back = False
        for weight, terms in arrived.values():
            if id(weight) in self.parameters:
                self.deliver(weight, terms)
        self.finished()

    def _take_sources(self, derived: Tensor) -> list[str]:
        last_op = type(derived.grad_fn).__name__.partition("Backward")[0].strip("_").lower()
        return [f"{source} (through {last_op})" for source in (self.sources or {}).pop(id(derived), ())]
