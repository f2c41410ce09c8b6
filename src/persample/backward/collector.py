"""Collects the terms of one backward pass and delivers them by parameter when the pass has ended."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from persample import _torch
from persample._internal import tracing
from persample._internal.graph import find_leaves
from persample.backward.derived_weights import pull_back
from persample.backward.positions import PositionSplitter, group_by_rows
from persample.backward.recorded_use import Plan
from persample.backward.retained import RetainedUse, group_uses, stack_uses, take_gradients
from persample.errors import Complain
from persample.terms import Term, add_samples

# Takes the terms that a backward pass found for a parameter.
Deliver = Callable[[Tensor, Sequence[Term]], None]

# Takes one term for several parameters: the samples of each parameter after those of the last.
DeliverStack = Callable[[Sequence[Tensor], Term], None]

# By the id of a weight: the weight, and its terms.
Arrived = dict[int, tuple[Tensor, list[Term]]]

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
        deliver_stack: DeliverStack | None = None,
        deliver_shared: Callable[[Tensor, Tensor], None] | None = None,
        complain: Complain | None = None,
        positions: PositionSplitter | None = None,
    ) -> None:
        self.parameters = {id(p): p for p in parameters}
        self.deliver = deliver
        self.finished = finished
        self.early = early
        self.deliver_stack = deliver_stack
        self.deliver_shared = deliver_shared  # takes gradients of parameters that belong to no sample
        self.anchor = torch.empty(0, requires_grad=True)  # a leaf that every tapped result depends on
        # The node is part of every pass that reaches weights. The second way works without grad mode, and takes longer.
        view = self.anchor.view_as(self.anchor)
        self.anchor_node: Any = (
            view.grad_fn.next_functions[0][0] if view.grad_fn is not None else get_gradient_edge(self.anchor).node
        )
        self.batch: int | None = None  # if it has grown
        self.retained: list[RetainedUse] = []
        self.used_parameters: list[Tensor] = []  # one for each use in the first run of a forward pass; not yet counted
        self.factor_bytes = 0  # what the terms of all uses would keep
        self.is_pulling_back = False
        self.complain = complain  # takes refusals in place of raising them
        self.positions = positions  # splits the terms of sequences into parts of positions
        self.sources = asked_sources.get()
        self.trace = tracing.get_trace()
        self._use_counts: defaultdict[int, int] = defaultdict(int)
        self._entangled: set[int] = set()  # parameters that are also used through a derived weight
        self._arrived: dict[int, Arrived] = {}
        self._shared: list[tuple[Tensor, Tensor]] = []  # weights, and their gradients that belong to no sample
        self._has_ended = False  # whether the end of the running backward pass was noted
        self._collecting: Arrived | None = None  # what has arrived in a pass that has just ended

    # ---- the forward pass ----

    def expect_bytes(self, factor_bytes: int) -> None:
        """Add the size of what the terms of a use would keep. A recomputation does not count."""
        if _torch.get_backward_pass() < 0:
            self.factor_bytes += factor_bytes

    def expect(self, weights: Iterable[Tensor]) -> None:
        """Count a use of these weights, unless it is a recomputation."""
        if _torch.get_backward_pass() >= 0:
            return
        for weight in weights:
            self._use_counts[id(weight)] += 1
            if self.early and id(weight) not in self.parameters:
                self._entangled |= {id(leaf) for leaf in find_leaves(weight)}

    def count_uses(self, weight: Tensor) -> int:
        """The number of uses of a weight so far."""
        return self._get_use_counts()[id(weight)]

    def _get_use_counts(self) -> defaultdict[int, int]:
        """The number of uses of each weight so far, by its id."""
        used, counts = self.used_parameters, self._use_counts
        for parameter in used:
            counts[id(parameter)] += 1
        used.clear()
        return counts

    def grow(self, batch: int) -> None:
        """Add samples to the batch: terms of earlier passes have fewer."""
        self.batch = batch

    # ---- the backward pass ----

    def receive(self, weight: Tensor, term: Term, source: str = "a rule of your own") -> None:
        """Take a term that a backward pass found for a parameter, or for a tensor computed from parameters."""
        if self.sources is not None:
            self.sources.setdefault(id(weight), set()).add(source)
        if self.batch is not None:
            term = add_samples(term, self.batch)
        arrived = self.note_pass() if self._collecting is None else self._collecting
        arrived.setdefault(id(weight), (weight, []))[1].append(term)
        is_complete = len(arrived[id(weight)][1]) == self._get_use_counts()[id(weight)]
        if self.early and is_complete and id(weight) in self.parameters and id(weight) not in self._entangled:
            self.deliver(*arrived.pop(id(weight)))

    def receive_shared(self, weight: Tensor, grad: Tensor) -> None:
        """Take a gradient that belongs to no sample, such as that of a penalty on the weights."""
        self.note_pass()
        self._shared.append((weight, grad))

    def note_pass(self) -> Arrived:
        """Deliver what arrives in the running backward pass when it has ended; returns what has arrived so far."""
        backward_pass = _torch.get_backward_pass()
        arrived = self._arrived.get(backward_pass)
        if arrived is None:
            _torch.call_after_backward(lambda: self._end(backward_pass))
            arrived = self._arrived[backward_pass] = {}
        return arrived

    def end_without_tap(self) -> None:
        """After a backward pass for the weights: deliver what it found, if no tap has told that it has ended.

        Activations may require grad without a weight behind them (`requires_grad_()` in the model).
        """
        is_inside_another = _torch.get_backward_pass() >= 0  # of a reentrant checkpoint
        if not (self._has_ended or is_inside_another) and any(retained.grads for retained in self.retained):
            self._deliver_all({})

    def _end(self, backward_pass: int) -> None:
        self._has_ended = True
        self._deliver_all(self._arrived.pop(backward_pass))

    def _deliver_all(self, arrived: Arrived) -> None:
        if self.retained:
            self._collecting = arrived
            try:
                with _torch.DisableTorchFunction(), torch.no_grad():
                    self._collect_retained(arrived)
            finally:
                self._collecting = None
        with self.pull_back():
            self._deliver_all_shared()
            for weight, terms in list(arrived.values()):
                if id(weight) not in self.parameters:
                    sources = self._take_sources(weight)
                    for parameter, term in self._pull_back(weight, terms):
                        arrived.setdefault(id(parameter), (parameter, []))[1].append(term)
                        if self.sources is not None:
                            self.sources.setdefault(id(parameter), set()).update(sources)
        for weight, terms in arrived.values():
            if id(weight) in self.parameters:
                self.deliver(weight, terms)
        self.finished()

    @contextmanager
    def pull_back(self) -> Iterator[None]:
        """Inside the block, gradients of parameters are the recording's own."""
        was_pulling_back, self.is_pulling_back = self.is_pulling_back, True
        try:
            yield
        finally:
            self.is_pulling_back = was_pulling_back

    def _deliver_all_shared(self) -> None:
        shared, self._shared = self._shared, []
        if self.deliver_shared is None:
            return
        for weight, grad in shared:
            is_parameter = id(weight) in self.parameters
            leaves = [weight] if is_parameter else [leaf for leaf in find_leaves(weight) if id(leaf) in self.parameters]
            found = (grad,) if is_parameter else torch.autograd.grad(weight, leaves, grad, retain_graph=True)
            for parameter, own in zip(leaves, found, strict=True):
                self.deliver_shared(parameter, own)

    def _pull_back(self, weight: Tensor, terms: Sequence[Term]) -> Iterable[tuple[Tensor, Term]]:
        if self.positions is None:
            return pull_back(weight, terms, self.parameters)
        groups = group_by_rows(terms)
        return itertools.chain.from_iterable(pull_back(weight, group, self.parameters) for group in groups)

    # ---- uses without a tap ----

    def prepare_backward(self) -> None:
        """Before a backward pass: it has not ended."""
        self._has_ended = False

    def forget_gradients(self, is_graph_kept: bool) -> None:
        """After a backward pass: forget gradients that were not for the weights, and uses whose graph is freed."""
        for retained in self.retained:
            retained.grads.clear()
        if not is_graph_kept:  # other forward passes in the block have graphs of their own
            self.retained = [retained for retained in self.retained if not retained.is_collected]

    def refuse_second_derivatives(self) -> None:
        """After a pass with create_graph=True: raise if it has reached a use, whose weights are detached."""
        for retained in self.retained:
            if retained.grads:
                retained.make_use(self).refuse_second_derivative()

    def release(self) -> None:
        """Read each gradient in a hook of its own from now on: the recording ends."""
        for retained in self.retained:
            retained.hook_node(self)
        self.retained = []

    def _collect_retained(self, arrived: Arrived) -> None:
        several = {key for key, count in self._get_use_counts().items() if count != 1} | self._entangled
        for group in group_uses(take_gradients(self.retained, self)):
            if len(group) == 1:
                ((retained, grad),) = group
                retained.make_use(self).backward(retained.saved, [grad], deliver=True)
                continue
            stacked, saved, grad = stack_uses(group, self)
            for position, term in stacked.compute_terms(saved, grad).items():
                if position in stacked.weights:
                    weights = [retained.weights[position] for retained, _ in group]
                    self._receive_stack(weights, term, stacked.plan, arrived, several)

    def _receive_stack(
        self, weights: Sequence[Tensor], term: Term, plan: Plan, arrived: Arrived, several: set[int]
    ) -> None:
        """Take one term for several weights: deliver it as it is, if none of them is among those with other uses."""
        if self.sources is not None:
            for weight in weights:
                self.sources.setdefault(id(weight), set()).add(plan.source)
        ids = [id(weight) for weight in weights]
        is_plain = several.isdisjoint(ids) and all(map(self.parameters.__contains__, ids))
        is_whole = self.batch is None or term.batch == len(weights) * self.batch
        if self.deliver_stack is not None and is_plain and is_whole:
            self.deliver_stack(weights, term)
            return
        batch = term.batch // len(weights)
        for i, weight in enumerate(weights):
            own = term.some(i * batch, (i + 1) * batch)
            own = own if self.batch is None else add_samples(own, self.batch)
            arrived.setdefault(id(weight), (weight, []))[1].append(own)

    def _take_sources(self, derived: Tensor) -> list[str]:
        last_op = type(derived.grad_fn).__name__.partition("Backward")[0].strip("_").lower()
        return [f"{source} (through {last_op})" for source in (self.sources or {}).pop(id(derived), ())]
