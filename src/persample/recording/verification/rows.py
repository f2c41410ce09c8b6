"""Compare the row of a sample with the gradient of that sample alone.

Outputs may agree where gradients are mixed: behind a gate that is zero, in the backward of a custom function, in a hook
on a gradient. So a verified call keeps the graph of a sample that was run alone. When the backward pass has ended, the
sample's rows of the outputs' gradients are pulled back through that graph by plain autograd. What this gives for each
parameter, added up over the calls, must be the row that was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from persample import _torch
from persample._internal.graph import is_reentrant, walk
from persample._internal.precision import to_double
from persample.errors import SamplesMixed
from persample.layouts import Layout, take_sample
from persample.recording.verification.runs import NotVerified, open_extra_passes, shorten
from persample.recording.verification.sample_calls import Call
from persample.terms import Term

# A node of the graph, and which of its results is meant.
Edge = tuple[Any, int]

# Gradients by the names of the parameters.
Row = dict[str, Tensor]

# More nodes between a loss and the outputs of a model are not looked at.
_MOST_NODES = 20_000


@dataclass
class Output:
    """An output of a call of the model, in which the samples lie in known places.

    Attributes:
        alone: the output of the sample alone, by precision, with its graph.
        is_inner: whether another output depends on it in the graph of the batch, so that its gradient includes what
            comes from that one. The results of one fused op do not depend on each other.
        gradient: the sample's rows of its gradient, when the backward pass has reached it.
    """

    layout: Layout
    alone: Tensor
    position: int
    is_inner: bool = False
    gradient: Tensor | None = None


@dataclass
class VerifiedCall:
    """A call of the model whose outputs were verified, and what is needed to compare the row of a sample.

    Attributes:
        outputs: the outputs, by where their gradients arrive in the graph. Hooks of the graph hold an output, but not
            this object: it holds nodes of the graph, and torch cannot free such a cycle.
        arguments: tensors that require grad.
        call: the arguments of the sample alone.
        inputs: copies of them that require grad, in the graph of the outputs.
        ambiguity: what is said of an argument that may hold several samples and was not divided among them, or ''.
        rounding: the eps of the least precise dtype of the run.
        remember: called when the row was compared or cannot be compared, but not if it is refused.
    """

    sample: int
    batch: int
    outputs: dict[Edge, Output]
    arguments: list[Tensor]
    call: Call
    inputs: list[Tensor]
    model: ref[nn.Module]
    ambiguity: str
    advice: str
    rounding: float
    remember: Callable[[], None] | None = None
    handles: list[Any] = field(default_factory=list)

    def pull_back(self, parameters: Mapping[str, Tensor], alone: Mapping[int, Tensor], inputs: Sequence[Tensor]) -> Row:
        """The gradients of the parameters from the sample's rows of the outputs' gradients.

        Those of the inputs are computed as well: where they are not, `group_norm` of torch 2.13 may crash.
        """
        tensors, gradients, handles = [], [], []
        for output in self.outputs.values():
            if output.gradient is not None:
                tensors.append(tensor := alone[output.position])
                gradients.append(gradient := output.gradient.to(tensor.dtype).reshape(tensor.shape))
                if output.is_inner:
                    handles.append(tensor.register_hook(lambda _, own=gradient: own))
        try:
            found = _torch.pull_back(tensors, [*parameters.values(), *inputs], gradients, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return {name: to_double(g.to_dense()) for name, g in zip(parameters, found, strict=False) if g is not None}


def _keep(
    output: Output, number: int, sample: int, batch: int, check: ref[RowCheck]
) -> Callable[[Sequence[Tensor | None]], None]:
    def keep(gradients: Sequence[Tensor | None]) -> None:
        gradient, running = gradients[number], check()
        if gradient is not None and running is not None and running.is_noting:  # else it is for inputs, as in FGSM
            with _torch.DisableTorchFunction(), torch.no_grad():
                own = take_sample(gradient, output.layout, sample, batch).clone()
                output.gradient = own if output.gradient is None else output.gradient + own

    return keep


class RowCheck:
    """Compares a row of one recording, in the first backward pass after calls that were verified.

    Args:
        parameters: the recorded parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.calls: list[VerifiedCall] = []
        self.is_noting = False  # what is delivered now belongs to the row
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._row: Row = {}
        self._has_other_rows = False  # whether there are terms of other numbers of samples than a call has

    def add(self, call: VerifiedCall) -> None:
        """Add a call that was verified, and keep the sample's rows of the gradients that arrive at its outputs."""
        for (node, number), output in call.outputs.items():
            keep = _keep(output, number, call.sample, call.batch, ref(self))
            call.handles.append(node.register_prehook(keep))
        self.calls.append(call)

    def end(self) -> None:
        """Remember that the calls were verified, and forget them: their row was compared, or cannot be compared."""
        for call in self.calls:
            if call.remember is not None:
                call.remember()
        self.forget()

    def forget(self) -> None:
        """Forget the calls. Other calls like them will be verified again."""
        for call in self.calls:
            for handle in call.handles:
                handle.remove()
            call.outputs.clear()
        self.calls, self.is_noting, self._row, self._has_other_rows = [], False, {}, False

    # ---- what is recorded ----

    def note(self, parameters: Sequence[Tensor], terms: Sequence[Term]) -> None:
        """Note the row in terms of one parameter, or of several: the samples of each after those of the last."""
        call = self.calls[0]
        for place, parameter in enumerate(parameters):
            if (name := self._names.get(id(parameter))) is None:
                continue
            start = place * call.batch + call.sample
            with _torch.DisableTorchFunction(), torch.no_grad():
                for term in terms:
                    self._has_other_rows |= term.batch != len(parameters) * call.batch
                    if self._has_other_rows:  # calls with parts of the batch
                        return
                    own = to_double(term.some(start, start + 1).dense()[0])
                    self._row[name] = self._row[name] + own if name in self._row else own

    # ---- the backward pass ----

    def begin(self, roots: Iterable[Tensor], anchor: Any, uses: set[int]) -> None:
        """Before a backward pass from `roots`: see whether its gradients reach weights through the outputs alone.

        `anchor` is the node behind each tap; `uses` are the numbers of the nodes of uses without a tap.
        """
        ends = [(t.grad_fn, t.output_nr) for t in roots if t.grad_fn is not None]
        arguments = [t for call in self.calls for t in call.arguments]
        ends += [(t.grad_fn, t.output_nr) for t in arguments if t.grad_fn is not None]
        outputs = {edge for call in self.calls for edge in call.outputs}
        is_given = any(id(t) in self._names for t in arguments)
        if is_given or _reaches(ends, anchor, uses, outputs):
            raise NotVerified(
                "the loss or an argument uses weights in other ways than by the outputs of verified calls"
            )
        if any(call.sample != self.calls[0].sample for call in self.calls):
            raise NotVerified("the calls of the model have different samples")
        self.is_noting = True

    def compare(self) -> str:
        """After the backward pass: compare the row that was recorded with that of the sample alone.

        Raises:
            SamplesMixed: the row differs.
            NotVerified: no gradient has arrived, or the sample alone has none.
        """
        calls = [call for call in self.calls if any(o.gradient is not None for o in call.outputs.values())]
        if self._has_other_rows:
            raise NotVerified("the calls of the model have parts of the batch")
        if not calls:
            raise NotVerified("no gradient has reached the outputs of the model")
        pairs = self._pair(_add(map(self._pull_back, calls)))
        differing = self._find_differing(pairs, max(call.rounding for call in calls))
        if differing and (name := self._find_mixed(pairs, differing, calls)) is not None:
            self._refuse(name, *pairs[name], differing[name])
        return f"row {calls[0].sample} is the gradient of the sample alone"

    def _pull_back(self, call: VerifiedCall, precisely: bool = False) -> Row:
        """The row of a call by plain autograd."""
        try:
            if (model := call.model()) is None:
                raise NotVerified("the model is gone")
            with open_extra_passes(model) as runs:
                if precisely:
                    outputs, weights = runs.run_in_double(call.call)
                    wide = {name: weights.get(id(p), p) for name, p in self.parameters.items()}
                    return call.pull_back(wide, outputs, runs.inputs)
                return call.pull_back(
                    self.parameters, {o.position: o.alone for o in call.outputs.values()}, call.inputs
                )
        except (NotVerified, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotVerified(f"the backward pass of sample {call.sample} alone raises {shorten(error)}") from error

    def _pair(self, expected: Row) -> dict[str, tuple[Tensor, Tensor]]:
        """By name: the row that was recorded, and that of the sample alone."""
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.numel() and (name in self._row or name in expected):
                zero = to_double(parameter.new_zeros(())).expand(parameter.shape)
                found[name] = self._row.get(name, zero), expected.get(name, zero)
        return found

    def _find_differing(self, pairs: Mapping[str, tuple[Tensor, Tensor]], rounding: float) -> dict[str, float]:
        """By name: the differences of rows, relative to their scale, that may be more than rounding; largest first."""
        largest = max((_find_largest(row) for pair in pairs.values() for row in pair), default=0.0)
        negligible = max(100 * rounding, rounding**0.75) * largest  # a layer may enlarge rounding errors
        found = {}
        for name, (own, alone) in pairs.items():
            scale, difference = max(_find_largest(own), _find_largest(alone)), _find_largest(own - alone)
            if not math.isfinite(difference):
                raise NotVerified("gradients are not finite")
            if difference > negligible and difference > rounding**0.5 / 4 * scale:
                found[name] = difference / scale
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _find_mixed(
        self, pairs: Mapping[str, tuple[Tensor, Tensor]], differing: Mapping[str, float], calls: Sequence[VerifiedCall]
    ) -> str | None:
        """The parameter whose row differs by more than that of the sample alone differs from the row in float64.

        Small differences count for the largest one only: the row of the sample alone may be right by chance.
        """
        for call in calls:
            if call.ambiguity:
                raise NotVerified(call.ambiguity)
        loose = max(call.rounding for call in calls) ** 0.25
        try:
            precise = _add(self._pull_back(call, precisely=True) for call in calls)
        except NotVerified:  # the model computes in one dtype only
            return next((name for name, relative in differing.items() if relative > loose), None)
        for place, (name, relative) in enumerate(differing.items()):
            own, alone = pairs[name]
            noise = alone - precise[name] if name in precise else alone
            if (place == 0 or relative > loose) and _find_largest(own - alone) > 10 * _find_largest(noise):
                return name
        return None

    def _refuse(self, name: str, own: Tensor, alone: Tensor, relative: float) -> None:
        call = self.calls[0]
        raise SamplesMixed(
            f"The gradient of a sample depends on the other samples, although its outputs do not: the row of sample "
            f"{call.sample} for '{name}', in its batch of {call.batch}, differs by up to "
            f"{_find_largest(own - alone):.3g} from the gradient of the same sample alone (relative to the size "
            f"of its entries: {relative:.2g}). The cause may be samples that meet behind a factor that is zero, the "
            "backward of a custom autograd.Function, a hook on a gradient, or a rule of your own. "
            f"{call.advice} The option verify=False turns this check off."
        )


def _find_largest(row: Tensor) -> float:
    """The largest entry, in absolute value."""
    return float(row.abs().max())


def _add(rows: Iterable[Row]) -> Row:
    total: Row = {}
    for row in rows:
        for name, gradient in row.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _reaches(ends: Iterable[Edge], anchor: Any, uses: set[int], stops: set[Edge]) -> bool:
    """Whether a graph, searched from `ends` but not behind `stops`, has the anchor, a use or a reentrant checkpoint."""
    waiting, seen = [edge for edge in ends if edge not in stops], set()
    while waiting:
        node, _ = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node is anchor or is_reentrant(node) or _torch.get_node_number(node) in uses or len(seen) > _MOST_NODES:
            return True
        waiting += [edge for edge in node.next_functions if edge[0] is not None and edge not in stops]
    return False


def make_outputs(found: Iterable[tuple[Tensor, Layout, Tensor, int]]) -> dict[Edge, Output]:
    """The outputs of a call: from each tensor of the batch, its layout, that of a sample alone, and its position."""
    outputs: dict[Edge, Output] = {}
    for tensor, layout, alone, position in found:
        edge = get_gradient_edge(tensor)
        key = edge.node, edge.output_nr
        _torch.forget_gradient_hooks(alone)  # those of the model's own code have run when the gradient is kept
        outputs.setdefault(key, Output(layout, alone, position))
    if len(outputs) > 1:
        behind = {edge for node in walk(node for node, _ in outputs) for edge in node.next_functions}
        for key in behind & outputs.keys():
            outputs[key].is_inner = True
    return outputs
