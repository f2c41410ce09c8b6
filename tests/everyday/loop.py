"""A training loop, declared once with what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Batch = Any
Model = Any  # a module, or several modules in a dict

# Computes the loss of a batch, as in a user's loop. Without a result, it has called `backward` itself.
Step = Callable[[Model, Batch], Tensor | None]

SIZES = (4, 3, 5)  # of the batches: as many steps are made

RECORD, WATCH, MONITOR, SCAN, PRIVATE, ROWS = "record", "watch", "monitor", "scan", "private", "rows"
USUAL = (RECORD, MONITOR)
ALL = (RECORD, WATCH, MONITOR, SCAN, PRIVATE)


def take_sample(batch: Batch, n: int) -> Batch:
    """Sample n as a batch of one: all tensors have the samples in dimension 0."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[n : n + 1] if tensor.dim() else tensor, batch)


@dataclass(frozen=True)
class Loop:
    """A loop and its declaration.

    The rows are those of a loop over the samples ("right"). With `count`, they are the shares of a loss whose divisor
    only counts: the loss of sample n alone, times `count(sample) / count(batch)`, times the batch size.

    Attributes:
        origin: where loops like this one are published.
        name: as in the table of the docs.
        step: the loop's own code.
        make_model: makes the model; it is called with a fixed seed, with float64 as the default dtype.
        make_batch: makes a batch of this size.
        front_ends: those that the loop is run through.
        options: of `record` and `watch`.
        prepare: what the loop does with a batch before the model is called, if it combines samples (mixup).
        own: the step for the oracle, if a part of the loss belongs to no sample: the step without that part.
        count: what the divisor of the loss counts, in a batch or in a sample.
        share: the share of a sample (its first batch, of one) in the loss of a batch, if `count` cannot say it.
        take: takes sample n of a batch.
        refused: the reason in mathematics, a regular expression, for each front end that refuses the loop; "all": the
            samples are coupled, so that none of them has a loss of its own.
        is_pair: whether the model is called with two samples for each row, the first ones of all rows first.
        contributions: whether the rows only add up to the batch's gradient.
        tolerance: relative to the largest entry of a row.
    """

    origin: str
    name: str
    step: Step
    make_model: Callable[[], Model]
    make_batch: Callable[[int], Batch]
    front_ends: tuple[str, ...] = USUAL
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    own: Step | None = None
    count: Callable[[Batch], Any] | None = None
    share: Callable[[Model, Batch, Batch], Tensor] | None = None
    take: Callable[[Batch, int], Batch] = take_sample
    refused: Mapping[str, str] = field(default_factory=dict)
    is_pair: bool = False
    contributions: bool = False
    sizes: tuple[int, ...] = SIZES
    tolerance: float = 1e-8

    def __str__(self) -> str:
        return f"{self.origin}: {self.name}"

    @property
    def is_coupled(self) -> bool:
        """Whether no sample has a loss that is its own."""
        return self.contributions or "all" in self.refused

    def get_refusal(self, front_end: str) -> str:
        return self.refused.get(front_end) or self.refused.get("all", "")

    def get_options(self, size: int) -> dict[str, Any]:
        """The options of `record` for a batch of this size."""
        units = {"units": torch.arange(size).repeat(2)} if self.is_pair else {}
        return {**self.options, **units}


class Origin:
    """The loops of one origin. A call declares the decorated step as a loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loops: list[Loop] = []

    def __call__(
        self, name: str, make_model: Callable[[], Model], make_batch: Callable[[int], Batch], **declared: Any
    ) -> Callable[[Step], Step]:
        def declare(step: Step) -> Step:
            self.loops.append(Loop(self.name, name, step, make_model, make_batch, **declared))
            return step

        return declare
