"""Sums over the samples: the loss that a backward pass starts from, and weights beside a sum.

`backward()` may be called anywhere, with any number of losses. So each sum over the samples has a hook. In a backward
pass, the hook of a loss runs before those of the sums that the loss was computed from.

Weights stand beside a sum in `exp(-s) * loss + s` with learned variances, or in a penalty on the weights. A weight that
multiplies a sum multiplies each sample's part, and its own gradient has a row for each of these parts. What is added to
a sum belongs to no sample: its gradient is kept apart, for `grads.shared()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample.backward import Collector, NoteLoss
from persample.errors import SamplesMixed, get_op_name
from persample.forward.known import ForwardPass, KnownTensors
from persample.layouts import Call, NoParts, Reduced, Summed, Where
from persample.terms import Dense

_KEY = "persample: sum over the samples"
_MAX_DEPTH = 3  # nodes that one torch function leaves between its result and its argument


class _Sum:
    """A sum over the samples in the autograd graph: where it comes from, and the last pass that went through it."""

    __slots__ = ("inner_of", "is_statistic", "layout", "sources")

    def __init__(self, layout: Reduced, sources: list[_Sum]) -> None:
        self.layout = layout
        self.sources = sources
        self.inner_of = -1  # the backward pass in which it is a part of another sum
        self.is_statistic = False  # whether samples were combined with it: then no pass starts from it


def watch_sum(tensor: Tensor, layout: Reduced, anchor_node: Any, note_loss: NoteLoss) -> None:
    """Call `note_loss` in backward passes that start from `tensor`."""
    node = _torch.find_node(tensor)
    found = _Sum(layout, list(_iterate_sources(node, _MAX_DEPTH)))
    node.metadata[_KEY] = found  # the graph keeps it, and nothing else does

    def note(grads: Sequence[Tensor]) -> None:
        current = _torch.get_backward_pass()
        if found.inner_of != current and not found.is_statistic:
            note_loss(found.layout, _torch.will_run_node(anchor_node))
        for source in found.sources:
            source.inner_of = current

    node.register_prehook(note)


def mark_statistic(tensor: Tensor) -> None:
    """Note that samples are combined with a sum over the samples, as in a batch norm: it is no loss."""
    node = _torch.find_node(tensor)
    found = None if node is None else node.metadata.get(_KEY)
    if found is not None:
        found.is_statistic = True


def _iterate_sources(node: Any, depth: int) -> Iterator[_Sum]:
    """The nearest sums over the samples that a node was computed from."""
    for source, _ in node.next_functions:
        if source is not None and source.next_functions:
            found = source.metadata.get(_KEY)
            if found is not None:
                yield found
            elif depth:
                yield from _iterate_sources(source, depth - 1)


# ---- weights beside a sum ----


def is_beside_sum(call: Call) -> bool:
    """Whether a call combines weights with sums over the samples, and with nothing else that depends on the batch."""
    return all(where is None or isinstance(where, Reduced) for where in call.where) and call.facts.keeps_sums


def make_summed(call: Call, known: KnownTensors) -> Summed:
    """How a call is about to make a sum over the samples; `made` is to be set."""
    versions = tuple([0 if t.is_inference() else t._version for t in call.tensors])
    return Summed(call, versions, tuple(map(known.summed.get, call.tensors)))


def note_sum(
    result: Tensor, where: Where | None, call: Call, forward: ForwardPass, summed: Summed | None = None
) -> None:
    """Keep how a sum was made, if a weight can multiply it; `summed` is given if the call changes its arguments."""
    if type(where) is Reduced and result.requires_grad and forward.counted.holds_divisors:
        known = forward.known
        known.summed[result] = replace(summed or make_summed(call, known), made=where)


def run_beside_sum(call: Call, weights: dict[int, Tensor], forward: ForwardPass) -> Any:
    """Run such a call. The caller finds the layout of the result."""
    collector = forward.collector
    if not call.facts.is_bilinear:
        tensors = enumerate(call.tensors)
        tapped = [_Apart.apply(t.detach(), [t], collector, collector.anchor) if i in weights else t for i, t in tensors]
        args, kwargs = call.fill(tapped)
        return call.func(*args, **kwargs)
    is_first = isinstance(call.where[0], Reduced)
    if len(call.tensors) != 2 or len(weights) != 1 or (call.facts.is_division and not is_first):
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {forward.place()}, is not linear in a sum over the samples. Multiply each "
            "sample's loss before it is added up."
        )
    ((position, weight),) = weights.items()
    parts, rest = _find_parts(call, 1 - position, forward)
    collector.uses.expect([weight])
    args, kwargs = call.fill([t.detach() if i == position else t for i, t in enumerate(call.tensors)])
    result = call.func(*args, **kwargs)
    detached = [tensor.detach() for tensor in call.tensors]
    product = _Product(call.with_tensors(detached), position, weight, parts, rest, collector)
    return _Factor.apply(result, product, collector.anchor)


def _find_parts(call: Call, position: int, forward: ForwardPass) -> tuple[Tensor, Tensor | None]:
    """`(batch, *shape)`: each sample's part of the sum that a weight is multiplied with; what belongs to no sample."""
    summed = forward.known.summed.get(call.tensors[position])
    try:
        if summed is None:
            raise NoParts("it was not seen how the sum was computed")
        with torch.no_grad(), _torch.DisableTorchFunction():
            parts, whole = summed.compute_parts(), call.tensors[position].detach()
            rest = whole - parts.sum(0)
            rounding = torch.finfo(whole.dtype).eps ** 0.75 * torch.maximum(parts.abs().sum(0), whole.abs())
            return parts, rest if bool((rest.abs() > rounding).any()) else None
    except NoParts as reason:
        if call.batch == 1:
            return call.tensors[position].detach().unsqueeze(0), None
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {forward.place()}, multiplies a sum over the samples by a weight, whose "
            f"gradient needs each sample's part of the sum: {reason}. Multiply the losses before they are added up."
        ) from None


class _Apart(torch.autograd.Function):
    """The identity. Its backward keeps the gradient of a weight apart from those of the samples."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: list[Tensor], collector: Collector, anchor: Tensor) -> Tensor:
        ctx.weight, ctx.collector = weight[0], collector
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if _torch.will_run_node(ctx.collector.anchor_node):
            ctx.collector.receive_shared(ctx.weight, grads[0])
        return None, None, None, None


@dataclass(frozen=True)
class _Product:
    """A weight, at a position of a call, that multiplies a sum over the samples."""

    call: Call
    position: int
    weight: Tensor
    parts: Tensor  # of the sum, `(batch, *shape)`
    rest: Tensor | None  # of the sum, which belongs to no sample
    collector: Collector

    def differentiate(self, part: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the weight, if the sum consists of this part."""
        with torch.enable_grad():
            weight = self.weight.detach().requires_grad_()
            tensors = (part, weight) if self.position else (weight, part)
            (result,) = self.call.run([tensor.clone() for tensor in tensors])  # it may change one in place
            return _torch.pull_back([result], [weight], [grad])[0]


class _Factor(torch.autograd.Function):
    """The identity, on the product of a weight and a sum over the samples. Its backward finds the weight's rows."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, product: _Product, anchor: Tensor) -> Tensor:
        ctx.product = product
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        product: _Product = ctx.product
        collector, (grad,) = product.collector, grads
        if _torch.will_run_node(collector.anchor_node):
            with _torch.DisableTorchFunction():
                rows = torch.stack([product.differentiate(part, grad) for part in product.parts])
                collector.receive(product.weight, Dense(rows), "factor of the loss")
                if product.rest is not None:
                    collector.receive_shared(product.weight, product.differentiate(product.rest, grad))
        return grad, None, None
