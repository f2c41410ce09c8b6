"""Uses of weights whose gradient is read without a node of Python in the autograd graph.

A tap costs two calls of Python in each step. If the result of a use is small, that is more than the arithmetic. The
autograd node of such a result gets a hook that appends the gradient to a list, which needs no call of Python, and the
collector reads the lists at the end of the backward pass. Uses that have the same plan and the same shapes, as in the
layers of a transformer, are then computed as one.

A use can be retained if a tap is behind its activations: the tap tells the collector that the pass has ended and that
it was for the weights. The gradient and the activations are kept alive until then, so large ones get a tap.

The hook of the node owns the use, so that a use is freed with its graph, as a tap is: the outputs of a call may be
dropped without a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample.backward.recorded_use import Plan, RecordedUse
from persample.errors import PerSampleError, get_op_name

if TYPE_CHECKING:
    from persample.backward.collector import Collector

# Results with more entries get a tap.
MAX_ENTRIES = 2**16

# Activations with more entries are not copied to be computed together with those of other uses.
_MAX_STACKED_ENTRIES = 2**16


class RetainedUse(list[Tensor | None]):
    """A use, and what it saved. As a list: the gradients of its result, for each pass that has reached it.

    The node is that of `result`: the result of the use, or the rows that it is a view of. In-place changes of the
    result come after it. Its hook is `append`, which keeps the use; the use must not keep the node.
    """

    def __init__(
        self,
        plan: Plan,
        saved: Sequence[Tensor],
        weights: dict[int, Tensor],
        batch: int,
        shape: torch.Size,
        result: Tensor,
        carrier: Tensor,
    ) -> None:
        self.plan, self.weights, self.batch, self.shape = plan, weights, batch, shape
        self.saved, self.versions = saved, [tensor._version for tensor in saved]
        self.is_collected = False  # whether the running backward pass was for the weights and has reached it
        node, hooks = result.grad_fn, _torch.NodeHooks()
        self.node_number = _torch.get_node_number(node)
        hooks[0] = self.append
        hooks.add_to(node, carrier)
        self.result, self._hooks = ref(result), ref(hooks)
        self._prehook: RemovableHandle | None = None

    def make_use(self, collector: Collector) -> RecordedUse:
        """The use as a tap would have it."""
        return RecordedUse(self.plan, (self.shape,), self.weights, None, self.batch, collector)

    def check_unchanged(self) -> None:
        """Refuse what torch refuses too: a saved tensor that was changed in place."""
        for tensor, version in zip(self.saved, self.versions, strict=True):
            if tensor._version != version:
                raise PerSampleError(
                    f"A tensor of shape {tuple(tensor.shape)}, an argument of {get_op_name(self.plan.func)}, was "
                    "changed in place before the backward pass needed it. Change a copy of it."
                )

    def read_after_hooks(self) -> None:
        """Read the gradient after the hooks of the result, also those that are added later."""
        result, hooks = self.result(), self._hooks()
        node = None if result is None else _torch.find_node(result)
        if hooks and node is not None and _torch.get_node_number(node) == self.node_number:
            moved = _torch.NodeHooks(hooks)
            hooks.clear()
            if self._prehook is not None:  # moved once before: other hooks have come since
                self._prehook.remove()
            self._prehook = node.register_prehook(lambda grads: moved[0](grads[0]))
            self._hooks = ref(moved)

    def hook_node(self, collector: Collector) -> None:
        """Read the gradient in a hook of the result's node from now on."""
        use, saved, check, shape = self.make_use(collector), self.saved, self.check_unchanged, self.shape

        def receive(grad: Tensor | None) -> None:
            if grad is None:
                return
            if torch.is_grad_enabled():
                use.refuse_second_derivative()
            if _torch.will_run_node(collector.anchor_node):
                check()
                with _torch.DisableTorchFunction():
                    use.backward(saved, [grad.reshape(shape)], deliver=True)

        self.read_after_hooks()
        if (hooks := self._hooks()) is not None:  # else the graph was freed
            hooks[0] = receive


class RetainedUses:
    """The uses of a recording that have no tap.

    Attributes:
        is_open: whether uses are added: a tap is behind the activations of each.
        carrier: brings hooks to their nodes.
    """

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self._uses: list[ref[RetainedUse]] = []
        self.carrier = torch.empty(0)

    def add(self, retained: RetainedUse) -> None:
        """Add a use, which lives as long as its graph."""
        self._uses.append(ref(retained))

    def read_after_hooks(self, tensors: Iterable[Tensor]) -> None:
        """Before hooks are added to some tensors, or a pass ends at them: read the gradients of uses after hooks."""
        ids = {id(tensor) for tensor in tensors}
        for retained in self.list_alive() if ids else ():
            if id(retained.result()) in ids:
                retained.read_after_hooks()

    def list_alive(self) -> list[RetainedUse]:
        """The uses that a backward pass can still reach."""
        return [retained for reference in self._uses if (retained := reference()) is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has reached a use."""
        return any(map(len, self.list_alive()))

    def forbid(self) -> None:
        """Put a tap on each use from now on: a tap may be missing behind its activations."""
        self.is_open = False

    def take_gradients(self, collector: Collector) -> list[tuple[RetainedUse, Tensor]]:
        """The uses that the running backward pass has reached, with their gradients, which are not kept any longer."""
        found = []
        for retained in self.list_alive():
            if not len(retained):
                continue
            grad = retained[-1]
            retained.clear()
            if grad is not None:
                retained.is_collected = True
                if grad.requires_grad:
                    retained.make_use(collector).refuse_second_derivative()
                if [tensor._version for tensor in retained.saved] != retained.versions:
                    retained.check_unchanged()
                found.append((retained, grad if grad.shape == retained.shape else grad.reshape(retained.shape)))
        return found

    def forget_gradients(self, is_graph_kept: bool) -> None:
        """After a backward pass: forget gradients that were not for the weights, and uses whose graph is freed."""
        kept = []
        for retained in self.list_alive():
            retained.clear()
            if retained.is_collected and not is_graph_kept:
                retained.saved, retained.weights, retained.versions = (), {}, []  # the nodes can live longer
            else:  # other forward passes in the block have graphs of their own
                retained.is_collected = False
                kept.append(ref(retained))
        self._uses = kept

    def refuse_second_derivatives(self, collector: Collector) -> None:
        """After a pass with create_graph=True: raise if it has reached a use, whose weights are detached."""
        for retained in self.list_alive():
            if len(retained):
                retained.make_use(collector).refuse_second_derivative()

    def release(self, collector: Collector) -> None:
        """Read each gradient in a hook of its own from now on: the recording ends."""
        for retained in self.list_alive():
            retained.hook_node(collector)
        self._uses = []


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
