"""The batches of a loader: each makes one step, and each of its samples is one row of it, and not several."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from persample._internal.tree import has_attributes
from persample.isolation import Rows
from persample.private.errors import PrivateTrainingError
from persample.private.turns import Pace, Turn, Turns


class HandedOut:
    """Refuses a step with more samples than the batch that the loader has handed out, and a batch without its step.

    Each of the samples is clipped by itself, so that a sample of the loader would add several times the bound. Copies
    and augmentations, the tokens of a text, and two batches of the loader in one call are such cases.

    Attributes:
        turns: the order in which steps must take batches, if it matters.

    >>> import torch
    >>> batches = HandedOut()
    >>> batches.add([torch.zeros(8, 3), torch.zeros(8)])
    >>> batches.check(8)
    >>> batches.check(16)
    Traceback (most recent call last):
        ...
    persample.private.errors.PrivateTrainingError: The model was called with 16 samples, but the batch of the loader \
has 8...
    """

    def __init__(self) -> None:
        self._sizes: deque[tuple[float, float]] = deque()  # of the last batches
        self._sizes_of: dict[int, list[tuple[float, float]]] = {}  # by the number of the batch
        self._waiting = 0  # batches that were handed out since the last step
        self._ahead = 1  # the largest number of them so far
        self.turns: Turns | None = None
        self._last_loop: Turn | Pace | None = None  # that has taken the last batch
        self._loops: dict[int, Turn | Pace] = {}  # the loop that has taken a batch, by the number of the batch
        self._used: set[int] = set()  # the numbers of the batches that have made a step
        self._using: list[int] = []  # of those of this step

    def add(self, batch: Any, batch_dim: int = 0, number: int = 0) -> None:
        """Note the size of a batch that is handed out; `number` is that of the batch, if its rows are followed.

        A loop may transpose batches with the samples in dimension 0 for a model that has them in `batch_dim`. So their
        size in dimension 0 is noted, too.
        """
        largest, in_front = (max(_list_sizes(batch, dim), default=math.inf) for dim in (batch_dim, 0))
        self._sizes.append((largest, in_front))
        self._sizes_of.setdefault(number, []).append((largest, in_front))
        self._waiting += 1

    def check(self, batch_size: int, rows: Rows | None = None) -> None:
        """Raise if a step has more samples than the batches that it can belong to, or one of them in several rows."""
        self._ahead, self._waiting = max(self._ahead, self._waiting), 0
        while len(self._sizes) > self._ahead:
            self._sizes.popleft()
        sizes = self._sizes if rows is None else self._sizes_of.get(rows.number, self._sizes)
        largest = max((size for size, _ in sizes), default=batch_size)
        if batch_size > largest and all(batch_size != in_front for _, in_front in sizes):
            raise PrivateTrainingError(
                f"The model was called with {batch_size} samples, but the batch of the loader has {largest}: a sample "
                "of the loader would add several times max_grad_norm. Call the model with the samples of the batch, "
                "and make copies or flatten tokens inside its forward(). If K consecutive samples are augmentations of "
                "one example, pass units=K to make_private. If some of them are public or generated, call optimizer."
                "add_samples(batch) with the whole batch before the model. Do not put two batches of the loader into "
                "one step."
            )
        if rows is not None and rows.has_repeats and batch_size == len(rows.order) <= rows.size:
            raise PrivateTrainingError(
                "A sample of the loader is in several rows of the arguments of the model, each of which would be "
                "clipped by itself. Call the model with each sample once, or pass units=K if it has K augmentations."
            )

    # ---- one step for each batch ----

    def begin_loop(self) -> Turn | Pace:
        """A new loop over the loader, which is told of each batch that it takes."""
        return Pace() if self.turns is None else Turn(self.turns)

    def take(self, loop: Turn | Pace, number: int, is_part: bool) -> None:
        """Note that a loop takes a batch, or a further part of its last one."""
        self._last_loop = self._loops[number] = loop
        if not is_part:
            loop.take()

    def check_unused(self, number: int) -> None:
        """Raise if a batch was used for a step before; note that this step uses it. 0: it is not known which one."""
        if number in self._used:
            raise PrivateTrainingError(
                "This batch of the loader was used for a step before. Each step needs a Poisson sample of its own, "
                "because the accountant counts with independent ones. Take the next batch of the loader for each step. "
                "To try out whether a model can learn one batch, train it without privacy."
            )
        if number:
            self._using.append(number)

    def note_step(self) -> None:
        """Note that a step is made, before its noise is drawn; raise if a batch before it has made none."""
        using, self._using = self._using, []
        self._used.update(using)
        # Another loop, as for an evaluation, may have taken batches since. An empty batch may come to no model.
        loop = self._loops.get(using[-1]) if using else self._last_loop
        if loop is not None:
            loop.note_step()

    def forget_others(self, followed: Collection[int]) -> None:
        """Forget all batches but those of these numbers, if there are many others."""
        if len(self._loops) <= 2 * len(followed):
            return
        self._loops = {number: loop for number, loop in self._loops.items() if number in followed}
        self._sizes_of = {number: sizes for number, sizes in self._sizes_of.items() if number in followed}
        self._used.intersection_update(followed)

    def restart(self) -> None:
        """Forget the numbers of batches: they begin with 1 again."""
        for numbers in (self._sizes_of, self._loops, self._used, self._using):
            numbers.clear()


def _list_sizes(value: Any, batch_dim: int) -> Iterator[float]:
    """Numbers that may be the number of samples: sizes of tensors and arrays, and lengths of lists.

    Infinity for an object that may hold any number of samples.
    """
    if value is None or isinstance(value, (str, bytes, int, float, complex)):
        return
    if isinstance(value, Tensor) and value.is_nested:
        yield value.size(0)
    elif hasattr(value, "shape"):
        if len(value.shape):
            yield value.shape[batch_dim if len(value.shape) > batch_dim else 0]
    elif isinstance(value, (list, tuple, Mapping)):
        parts = list(value.values()) if isinstance(value, Mapping) else list(value)
        if not isinstance(value, Mapping) and len({*map(_find_kind, parts)}) == 1:  # `[x, y]` is of two kinds
            yield len(parts)
        for part in parts:
            yield from _list_sizes(part, batch_dim)
    elif has_attributes(value) and vars(value):
        yield from _list_sizes(vars(value), batch_dim)
    else:
        yield math.inf


def _find_kind(value: Any) -> tuple[type, int]:
    return type(value), value.dim() if isinstance(value, Tensor) else 0
