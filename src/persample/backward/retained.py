"""Uses of weights whose gradient is read without a node of Python in the autograd graph.

A tap costs two calls of Python in each step. If the result of a use is small, that is more than the arithmetic. Torch
can keep the gradient of such a result by itself (`retain_grad`), and the collector reads it at the end of the backward
pass. Uses that have the same plan and the same shapes, as in the layers of a transformer, are then computed as one.

A use can be retained if a tap is behind its activations: the tap tells the collector that the pass has ended and that
it was for the weights. The result and the activations are kept alive until then, so large ones get a tap.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from persample import _torch
from persample.backward.recorded_use import Plan, RecordedUse
from persample.errors import PerSampleError, get_op_name

if TYPE_CHECKING:
    from persample.backward.collector import Collector

_get_shape = attrgetter("shape")

# Results with more entries get a tap.
MAX_ENTRIES = 2**16

# Activations with more entries are not copied to be computed together with those of other uses.
_MAX_STACKED_ENTRIES = 2**14


class RetainedUse:
    """A use, what it saved, and its result, which keeps its gradient.

    `node` is the autograd node of the result, or of the rows that the result is a view of.
    """

    __slots__ = ("batch", "collected_in", "node", "plan", "result", "saved", "version", "versions", "weights")

    def __init__(
        self,
        plan: Plan,
        saved: Sequence[Tensor],
        weights: dict[int, Tensor],
        batch: int,
        result: Tensor,
        node: Any,
    ) -> None:
        self.plan = plan
        self.saved = saved
        self.weights = weights
        self.batch = batch
        self.versions = [*map(_torch.get_version, saved)]
        self.result = result
        self.version = result._version
        self.node = node
        self.collected_in = 0  # the last backward pass for the weights that has reached it; they count from 1
        _torch.retain_grad(result)

    def make_use(self, collector: Collector) -> RecordedUse:
        """The use as a tap would have it."""
        return RecordedUse(self.plan, (self.result.shape,), self.weights, None, self.batch, collector)

    def check_unchanged(self) -> None:
        """Refuse what torch refuses too: a saved tensor that was changed in place."""
        for tensor, version in zip(self.saved, self.versions, strict=True):
            if tensor._version != version:
                raise PerSampleError(
                    f"A tensor of shape {tuple(tensor.shape)}, an argument of {get_op_name(self.plan.func)}, was "
                    "changed in place before the backward pass needed it. Change a copy of it."
                )

    def hook_node(self, collector: Collector) -> None:
        """Read the gradient in a hook of the result's node from now on."""
        use, saved, check, shape = self.make_use(collector), self.saved, self.check_unchanged, self.result.shape
        self.result = None  # type: ignore[assignment]  # the hook must not keep the result alive

        def receive(grads: Sequence[Tensor | None]) -> None:
            if grads[0] is None:
                return
            if torch.is_grad_enabled():
                use.refuse_second_derivative()
            if _torch.will_run_node(collector.anchor_node):
                check()
                with _torch.DisableTorchFunction():
                    use.backward(saved, [grads[0].reshape(shape)], deliver=True)

        self.node.register_prehook(receive)
        self.node = None


def find_changed(uses: Sequence[RetainedUse]) -> list[RetainedUse]:
    """The uses whose result was changed in place, so that its gradient is no longer that of the use."""
    return [retained for retained in uses if retained.result._version != retained.version]


def take_gradients(uses: Sequence[RetainedUse], collector: Collector, number: int) -> list[tuple[RetainedUse, Tensor]]:
    """The uses that the running backward pass has reached, with their gradients, which are removed from the results.

    `number` counts the backward passes.
    """
    found = []
    for retained in uses:
        result = retained.result
        grad = result.grad
        if grad is not None:
            result.grad = None
            retained.collected_in = number
            if grad.requires_grad:
                retained.make_use(collector).refuse_second_derivative()
            if [*map(_torch.get_version, retained.saved)] != retained.versions:
                retained.check_unchanged()
            found.append((retained, grad))
    return found


def group_uses(uses: Sequence[tuple[RetainedUse, Tensor]]) -> list[list[tuple[RetainedUse, Tensor]]]:
    """Groups of uses, each with its gradient, that can be computed as one."""
    groups: dict[Any, list[tuple[RetainedUse, Tensor]]] = {}
    for entry in uses:
        retained, grad = entry
        position = retained.plan.stacked_position
        key: Any = id(retained)
        if position is not None:
            saved = retained.saved
            # Kernels may differ in size with equal results.
            key = (
                id(retained.plan),
                retained.batch,
                grad.shape,
                grad.dtype,
                saved[position].dtype,
                *[tensor.shape for tensor in saved],
            )
        if key in groups:
            groups[key].append(entry)
        else:
            groups[key] = [entry]
    found = []
    for group in groups.values():
        found += [group] if len(group) == 1 or _can_stack(*group[0]) else [[entry] for entry in group]
    return found


def _can_stack(retained: RetainedUse, grad: Tensor) -> bool:
    """Whether a use is small, and the rows of a sample lie together, so that the samples of another use can follow."""
    plan = retained.plan
    assert plan.stacked_position is not None
    input = retained.saved[plan.stacked_position]
    layouts = plan.layouts[plan.stacked_position], plan.results[0]
    rows = [retained.batch * layout.inner for layout in layouts if layout is not None]
    is_small = max(input.numel(), grad.numel()) <= _MAX_STACKED_ENTRIES
    return is_small and [input.shape[0], grad.shape[0]] == rows


def stack_uses(
    group: Sequence[tuple[RetainedUse, Tensor]], collector: Collector
) -> tuple[RecordedUse, list[Tensor], Tensor]:
    """One use, its saved tensors and its gradient, with the samples of each use of a group after those of the last."""
    first = group[0][0]
    position = first.plan.stacked_position
    assert position is not None
    saved = list(first.saved)
    saved[position] = torch.cat([retained.saved[position] for retained, _ in group])
    grad = torch.cat([grad for _, grad in group])
    use = RecordedUse(first.plan, (grad.shape,), first.weights, None, first.batch * len(group), collector)
    return use, saved, grad
