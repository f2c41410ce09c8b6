"""Where the samples lie in a batch of data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from persample.batches.dims import (
    BatchDim,
    BatchSizesDiffer,
    Leaf,
    NoSamplesFound,
    choose_dim,
    find_batch_size,
    find_sample_dim,
)
from persample.ragged import GraphsShareNodes, has_edges

# ---- a batch of data ----


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tensors in `value`, nested in tuples, lists, mappings and dataclasses, and where the samples lie in them.

    `pair`: the value is `(inputs, targets)`, and a `batch_dim` for each argument is about the inputs.
    """

    value: Any
    batch_dim: BatchDim
    batch_size: int | None
    pair: bool = False

    @property
    def size(self) -> int:
        """The number of samples."""
        if self.batch_size is not None:
            return self.batch_size
        try:
            return find_batch_size(self._leaves(), "the batch")
        except (NoSamplesFound, BatchSizesDiffer):
            parts = self.value if isinstance(self.value, (tuple, list)) else [self.value]
            if has_edges((None, part) for part in parts):
                raise GraphsShareNodes() from None
            raise

    def choose_count(self, samples: int) -> int:
        """`samples`, or some more if another dimension has that size too, so that the two cannot be confused.

        >>> import torch
        >>> Batch(torch.ones(32, 4), 0, None).choose_count(4), Batch(torch.ones(3, 4), 0, None).choose_count(4)
        (5, 3)
        """
        size = self.size
        others = {
            n
            for leaf, dim in self._leaves()
            if isinstance(leaf, Tensor)
            for d, n in enumerate(leaf.shape)
            if d != self._find_dim(leaf, dim, size)
        }
        least = min(samples, size)
        return next((n for n in range(least, size + 1) if n not in others), least)

    def take_samples(self, start: int, stop: int, convert: Callable[[Tensor], Tensor]) -> Any:
        """Samples `start` to `stop` as a batch that shares no memory with this one."""
        size = self.size

        def cut(leaf: Any, dim: int | None) -> Any:
            if isinstance(leaf, PackedSequence):
                padded, lengths = pad_packed_sequence(leaf, batch_first=True)
                own = convert(padded[start:stop].detach())
                return pack_padded_sequence(own, lengths[start:stop], batch_first=True, enforce_sorted=False)
            found = self._find_dim(leaf, dim, size)
            own = leaf.detach() if found is None else leaf.detach().narrow(found, start, stop - start)
            return convert(own).clone().requires_grad_(leaf.requires_grad)

        return self._map(cut)

    def _find_dim(self, tensor: Tensor, dim: int | None, size: int) -> int | None:
        if dim is None:
            return None
        return find_sample_dim(tensor, size, dim, search=self.batch_size is not None or tensor.dim() <= dim)

    def _leaves(self) -> list[Leaf]:
        leaves: list[Leaf] = []
        self._map(lambda leaf, dim: leaves.append((leaf, dim)))
        return leaves

    def _map(self, fn: Callable[[Any, int | None], Any]) -> Any:
        if not self.pair:
            return _map_leaves(self.value, fn, self.batch_dim)
        inputs, targets = self.value
        target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return _map_leaves(inputs, fn, self.batch_dim), _map_leaves(targets, fn, target_dim)


def _map_leaves(value: Any, fn: Callable[[Any, int | None], Any], dims: BatchDim | None) -> Any:
    """`value` with each tensor and PackedSequence replaced by `fn(leaf, dim)`; everything else is the same object."""
    if isinstance(value, (Tensor, PackedSequence)):
        return fn(value, choose_dim(dims, 0, 0))
    if isinstance(value, Mapping):
        named = {key: _map_leaves(part, fn, choose_dim(dims, i, key)) for i, (key, part) in enumerate(value.items())}
        if not isinstance(value, MutableMapping):
            return named
        same = copy.copy(value)  # a BatchEncoding of transformers has attributes besides its items
        for key, part in named.items():
            same[key] = part
        return same
    if isinstance(value, (tuple, list)):
        parts = [_map_leaves(part, fn, choose_dim(dims, i, i)) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for i, name in enumerate(field.name for field in dataclasses.fields(value)):
            # object.__setattr__: the dataclass may be frozen, but this copy is not in use yet.
            object.__setattr__(made, name, _map_leaves(getattr(value, name), fn, choose_dim(dims, i, name)))
        return made
    return value
