"""Collects the terms of one backward pass and delivers them by parameter when the pass has ended."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from persample import _torch
from persample._internal import tracing
from persample._internal.graph import find_leaves
from persample._internal.precision import call_in_full_precision, in_full_precision
from persample.backward.derived_weights import pull_back
from persample.backward.positions import PositionSplitter, group_by_rows
from persample.backward.recorded_use import Plan
from persample.backward.retained import RetainedUses, group_uses, stack_uses
from persample.errors import Complain
from persample.layouts import Reduced
from persample.terms import Term, add_samples

# Takes the terms that a backward pass found for a parameter.
Deliver = Callable[[Tensor, Sequence[Term]], None]

# Takes the loss that a backward pass starts from, and whether the pass reaches weights.
NoteLoss = Callable[[Reduced, bool], None]

# By the id of a weight: the weight, and its terms.
Arrived = dict[int, tuple[Tensor, list[Term]]]

# While set, recordings note in it which rules gave the terms of each weight, by the id of the weight.
asked_sources: ContextVar[dict[int, set[str]] | None] = ContextVar("persample sources", default=None)


class Receiver:
    """Takes what a recording finds. This base class passes on the terms of each parameter, and nothing else.

    Attributes:
        complain: takes refusals in place of raising them.
        note_loss: takes the loss that a backward pass starts from; None: nobody asks.
        is_early: whether the terms of a parameter are delivered as soon as all its uses have arrived, and then freed.
        takes_stacks: whether one term for several parameters is delivered as it is.
    """

    complain: Complain | None = None
    note_loss: NoteLoss | None = None
    is_early = False
    takes_stacks = False

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def deliver(self, parameter: Tensor, terms: Sequence[Term]) -> None:
        """Take the terms of a parameter."""
        self._deliver(parameter, terms)

    def deliver_stack(self, parameters: Sequence[Tensor], term: Term) -> None:
        """Take one term for several parameters: the samples of each parameter after those of the last."""
        raise NotImplementedError

    def deliver_shared(self, leaf: Tensor, shared: Tensor, is_parameter: bool) -> None:
        """Take a gradient of a parameter, or of another leaf, that belongs to no sample."""

    def finish(self) -> None:
        """Note that a backward pass has ended."""

    def note_outside(self, tensor: Tensor) -> None:
        """Note a tensor of samples from outside: its memory may change without the recording noticing."""

    def note_zeroed(self, parameter: Tensor) -> None:
        """Note that `zero_grad()` was called for a parameter."""

    def note_tried(self, func: Callable[..., Any], place: str) -> None:
        """Note a function, called in a module (in words), whose motion was found by trial."""


class UseCounts:
    """Counts the uses of weights in forward passes, so that it is known when all terms of a weight have arrived.

    Attributes:
        early: whether that is asked before the end of a backward pass.
        parameters: one for each use; not yet counted.
        factor_bytes: what the terms of all uses would keep; counted if `early`.
    """

    def __init__(self, own: Mapping[int, Tensor], early: bool) -> None:
        self.early = early
        self.parameters: list[Tensor] = []
        self.factor_bytes = 0
        self._own = own
        self._counts: Counter[int] = Counter()
        self._entangled: set[int] = set()  # parameters that are also used through a derived weight

    def expect(self, weights: Iterable[Tensor], factors: Iterable[Tensor] = ()) -> None:
        """Count a use of these weights, whose terms would keep these factors. A recomputation does not count."""
        if _torch.get_backward_pass() >= 0:
            return
        for weight in weights:
            self._counts[id(weight)] += 1
            if self.early and id(weight) not in self._own:
                self._entangled |= {id(leaf) for leaf in find_leaves(weight)}
        if self.early:
            self.factor_bytes += sum(t.nbytes for t in factors)

    def count(self, weight: Tensor) -> int:
        """The number of uses of a weight so far."""
        return self._count_all()[id(weight)]

    def is_complete(self, weight: Tensor, arrived: int) -> bool:
        """Whether so many terms are all of a parameter, in a recording that asks early."""
        key = id(weight)
        return self.early and arrived == self.count(weight) and key in self._own and key not in self._entangled

    def find_several(self) -> set[int]:
        """The ids of the weights that have several uses."""
        return {key for key, count in self._count_all().items() if count != 1} | self._entangled

    def _count_all(self) -> Counter[int]:
        self._counts.update(map(id, self.parameters))
        self.parameters.clear()
        return self._counts


class Collector:
    """Passes the terms of each parameter to its receiver at the end of each backward pass.

    A pass that fails delivers nothing. Terms of a tensor that was computed from parameters (a transposed weight, a
    weight norm) are pulled back to the parameters.

    Args:
        parameters: the parameters.
        receiver: takes what is found.
        positions: splits the terms of sequences into parts of positions.
        can_retain: whether small uses may do without a tap.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        receiver: Receiver,
        positions: PositionSplitter | None = None,
        can_retain: bool = False,
    ) -> None:
        self.parameters = {id(p): p for p in parameters}
        self.receiver = receiver
        self.anchor = torch.empty(0, requires_grad=True)  # a leaf that every tapped result depends on
        # The node is part of every pass that reaches weights. The second way works without grad mode, and takes longer.
        view = self.anchor.view_as(self.anchor)
        self.anchor_node: Any = (
            view.grad_fn.next_functions[0][0] if view.grad_fn is not None else get_gradient_edge(self.anchor).node
        )
        self.batch: int | None = None  # if it has grown
        self.retained = RetainedUses(can_retain)
        self.uses = UseCounts(self.parameters, receiver.is_early)
        self.is_pulling_back = False
        self.positions = positions
        self.sources = asked_sources.get()
        self.trace = tracing.get_trace()
        self._arrived: dict[int, Arrived] = {}
        self._shared: list[tuple[Tensor, Tensor]] = []  # weights, and their gradients that belong to no sample
        self._has_ended = False  # whether the end of the running backward pass was noted
        self._collecting: Arrived | None = None  # what has arrived in a pass that has just ended

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
        if self.uses.is_complete(weight, len(arrived[id(weight)][1])):
            call_in_full_precision(self.receiver.deliver, *arrived.pop(id(weight)))

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

    def start_batch(self, batch: int) -> None:
        """Note each backward pass that reaches the anchor, if the batch is empty: no term arrives then."""
        if batch:
            return
        own = ref(self)  # the node of the anchor keeps the function

        def note(_: Any) -> None:
            if (collector := own()) is not None:
                collector.note_pass()

        self.anchor_node.register_prehook(note)

    def end_without_tap(self) -> None:
        """After a backward pass for the weights: deliver what it found, if no tap has told that it has ended.

        Activations may require grad without a weight behind them (`requires_grad_()` in the model).
        """
        is_inside_another = _torch.get_backward_pass() >= 0  # of a reentrant checkpoint
        if not (self._has_ended or is_inside_another) and self.retained.has_gradients:
            self._deliver_all({})

    def _end(self, backward_pass: int) -> None:
        self._has_ended = True
        self._deliver_all(self._arrived.pop(backward_pass))

    @in_full_precision
    def _deliver_all(self, arrived: Arrived) -> None:
        if self.retained.has_gradients:
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
                self.receiver.deliver(weight, terms)
        self.receiver.finish()

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
        for weight, grad in shared:
            self.deliver_shared(weight, grad)

    def deliver_shared(self, weight: Tensor, grad: Tensor) -> None:
        """Deliver a gradient that belongs to no sample to the leaves that a weight was computed from."""
        is_leaf = id(weight) in self.parameters
        leaves = [weight] if is_leaf else find_leaves(weight)
        found = (grad,) if is_leaf else _torch.pull_back([weight], leaves, [grad], keep_graph=True)
        for leaf, own in zip(leaves, found, strict=True):
            self.receiver.deliver_shared(leaf, own, id(leaf) in self.parameters)

    def _pull_back(self, weight: Tensor, terms: Sequence[Term]) -> Iterable[tuple[Tensor, Term]]:
        if self.positions is None:
            return pull_back(weight, terms, self.parameters)
        groups = group_by_rows(terms)
        return itertools.chain.from_iterable(pull_back(weight, group, self.parameters) for group in groups)

    # ---- uses without a tap ----

    def prepare_backward(self) -> None:
        """Before a backward pass: it has not ended."""
        self._has_ended = False

    def _collect_retained(self, arrived: Arrived) -> None:
        several = self.uses.find_several()
        for group in group_uses(self.retained.take_gradients(self)):
            if len(group) == 1:
                ((retained, grad),) = group
                retained.make_use(self).backward(retained.saved, [grad], deliver=True)
                continue
            stacked, saved, grad = stack_uses(group, self)
            for position, term in stacked.compute_terms(saved, [grad]).items():
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
        if self.receiver.takes_stacks and is_plain and is_whole:
            self.receiver.deliver_stack(weights, term)
            return
        batch = term.batch // len(weights)
        for i, weight in enumerate(weights):
            own = term.some(i * batch, (i + 1) * batch)
            own = own if self.batch is None else add_samples(own, self.batch)
            arrived.setdefault(id(weight), (weight, []))[1].append(own)

    def _take_sources(self, derived: Tensor) -> list[str]:
        last_op = type(derived.grad_fn).__name__.partition("Backward")[0].strip("_").lower()
        return [f"{source} (through {last_op})" for source in (self.sources or {}).pop(id(derived), ())]
