"""Examples that cannot be scanned: what is wrong with them, and batches without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample import _torch
from persample.scanning.errors import UnreadableExample

LABEL_KEYS = ("label", "labels", "target", "targets", "y")
UNREADABLE = "cannot be read"  # the fault of an example


@dataclass(frozen=True)
class Unreadable:
    """Stands for an example that its dataset cannot return."""

    reason: str


def say_why_unreadable(error: Exception) -> str:
    """What an example's dataset said, in one line."""
    cause = error.__cause__ if isinstance(error, UnreadableExample) and error.__cause__ else error
    return " ".join(str(cause).split())[:200] or type(cause).__name__


@dataclass(frozen=True)
class Screen:
    """What an example must be like. Without a number of classes or a shape, any will do."""

    classes: int | None = None
    ignored: int | None = None  # a label that the loss ignores
    shape: str | None = None

    def find_fault(self, example: Any, labels: Tensor | None = None) -> tuple[str, str] | None:
        """What is wrong with an example, and the details; None if nothing is. `labels` are those of the example."""
        if isinstance(example, Unreadable):
            return UNREADABLE, example.reason
        if not _is_finite(example):
            return "the inputs contain NaN or infinity", ""
        labels = find_own_labels(example) if labels is None else labels
        if self.classes is not None and labels is not None:
            bad = labels[((labels < 0) | (labels >= self.classes)) & (labels != self.ignored)]
            if len(bad):
                return f"the label is not from 0 to {self.classes - 1}", str(int(bad[0]))
        if self.shape is not None and (shape := describe_shapes(example)) != self.shape:
            return f"the shape differs from the usual {self.shape}", shape
        return None


@dataclass(frozen=True)
class Sifted:
    """The batch of the good ones among some examples. `kept` are their places; `faults` says why others are left out.

    The batch is None if no example is good.
    """

    batch: Any
    kept: Sequence[int]
    faults: Mapping[int, str]


@dataclass(frozen=True)
class Sieve:
    """Collates examples without the bad ones. A loader can call it in its workers."""

    collate: Callable[[list[Any]], Any]
    screen: Screen | None = None

    def __call__(self, examples: Sequence[Any]) -> Sifted:
        faults = {}
        for k, example in enumerate(examples) if self.screen is not None else ():
            if (found := self.screen.find_fault(example)) is not None:  # type: ignore[union-attr]
                faults[k] = ": ".join(filter(None, found))
        kept = [k for k in range(len(examples)) if k not in faults]
        return Sifted(self.collate([examples[k] for k in kept]) if kept else None, kept, faults)


def find_own_labels(example: Any) -> Tensor | None:
    """The class labels in an example that is not collated yet: in a pair, or under a usual key of a dict.

    >>> find_own_labels((torch.ones(3), 2)), find_own_labels({"text": "fine"})
    (tensor([2]), None)
    """
    found: Any = None
    if isinstance(example, Mapping):
        found = next((example[key] for key in LABEL_KEYS if key in example), None)
    elif isinstance(example, (tuple, list)) and len(example) == 2:
        found = example[1]
    if not isinstance(found, (int, np.integer, np.ndarray, Tensor)) or isinstance(found, bool):
        return None
    labels = torch.as_tensor(found)
    return None if labels.is_floating_point() or labels.dtype == torch.bool else labels.flatten()


def describe_shapes(example: Any) -> str:
    """The shapes of all tensors of an example."""
    tensors = [part for part in _torch.pytree.tree_leaves(example) if hasattr(part, "shape")]
    shapes = [str(tuple(part.shape)) for part in tensors if len(part.shape)]
    return ", ".join(shapes)


def _is_finite(example: Any) -> bool:
    tensors = [part for part in _torch.pytree.tree_leaves(example) if isinstance(part, Tensor)]
    return all(bool(part.isfinite().all()) for part in tensors if part.is_floating_point())
