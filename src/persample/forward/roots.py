"""Find the loss that a backward pass starts from, and how it combines the samples.

`backward()` may be called anywhere, with any number of losses. So each sum over the samples has a hook. In a backward
pass, the hook of a loss runs before those of the sums that the loss was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from persample import _torch
from persample.layouts import Reduced

# Called with the loss that a backward pass starts from, and whether the pass reaches weights.
NoteLoss = Callable[[Reduced, bool], None]

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
    node: Any = tensor.grad_fn
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
    node: Any = tensor.grad_fn
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
