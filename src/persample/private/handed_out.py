"""The number of samples in the batches of a loader: each of them may be one row of a step, and not several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from persample.batches import iterate_tensors
from persample.private.errors import PrivateTrainingError

_MOST_AHEAD = 16  # batches that a loop may load before it uses them


class HandedOut:
    """Refuses a step with more samples than the batch that the loader has handed out.

    Each of them is clipped by itself, so that a sample of the loader would add several times the bound. Copies and
    augmentations, the tokens of a text, and two batches of the loader in one call are such cases.

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
        self._sizes: deque[int] = deque(maxlen=_MOST_AHEAD)
        self._waiting = 0  # batches that were handed out since the last step
        self._ahead = 1  # the largest number of them so far

    def add(self, batch: Any, batch_dim: int = 0) -> None:
        """Note the size of a batch that is handed out. A batch without tensors and lists is not checked."""
        size = max([*_list_sizes(batch, batch_dim), *_list_lengths(batch)], default=None)
        if size is not None:
            self._sizes.append(size)
            self._waiting += 1

    def check(self, batch_size: int) -> None:
        """Raise if a step has more samples than the batches that it can belong to."""
        self._ahead, self._waiting = max(self._ahead, self._waiting), 0
        largest = max(list(self._sizes)[-self._ahead :], default=batch_size)
        if batch_size > largest:
            raise PrivateTrainingError(
                f"The model was called with {batch_size} samples, but the batch of the loader has {largest}: a sample "
                "of the loader would add several times max_grad_norm. Call the model with the samples of the batch, "
                "and make copies or flatten tokens inside its forward(). If K consecutive samples are augmentations of "
                "one example, pass units=K to make_private. Do not put two batches into one step."
            )


def _list_sizes(batch: Any, batch_dim: int) -> Iterator[int]:
    """Sizes of tensors that may be the number of samples."""
    for tensor in iterate_tensors(batch):
        if tensor.dim():
            yield tensor.shape[batch_dim if tensor.dim() > batch_dim else 0]


def _list_lengths(value: Any) -> Iterator[int]:
    """Lengths of lists that may have an item for each sample. Inputs and targets, `[x, y]`, are no such list."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _list_lengths(part)
    elif isinstance(value, (list, tuple)):
        dims = {part.dim() if isinstance(part, Tensor) else None for part in value}
        if len(dims) == 1:
            yield len(value)
        for part in value:
            yield from _list_lengths(part)
