"""A batch, and its samples one by one or a few at a time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from persample.errors import PerSampleError
from persample.recording.options import BatchDim

# What is made of a tensor (or PackedSequence) of the batch, given the dim in which its samples should lie.
OfLeaf = Callable[[Any, int | None], Any]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tensors in `value`, in tuples, lists, mappings and dataclasses, and where the samples lie in them.

    `pair`: it is `(inputs, targets)`, and a `batch_dim` for each argument is about the inputs.
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
        sizes: dict[int, None] = {}

        def note(leaf: Any, dim: int | None) -> None:
            if isinstance(leaf, PackedSequence):
                sizes[int(leaf.batch_sizes[0])] = None
            elif dim is not None and leaf.dim() > dim:
                sizes[leaf.shape[dim]] = None

        self._mapped(note)
        if len(sizes) == 1:
            return next(iter(sizes))
        if not sizes:
            raise PerSampleError(f"No tensor with samples was found in the batch, a {type(self.value).__name__}.")
        raise PerSampleError(
            f"The tensors of the batch disagree on the number of samples: {' and '.join(map(str, sizes))} along the "
            "dim of the batch. Give batch_size; tensors that have it nowhere are the same for all samples."
        )

    def few(self, samples: int) -> int:
        """How many samples to take for `samples`: some more where that is also the size of another dim.

        >>> import torch
        >>> Batch(torch.ones(32, 4), 0, None).few(4), Batch(torch.ones(3, 4), 0, None).few(4)
        (5, 3)
        """
        size, others = self.size, set[int]()

        def note(leaf: Any, dim: int | None) -> None:
            if isinstance(leaf, Tensor):
                others.update(n for d, n in enumerate(leaf.shape) if d != self._dim_in(leaf, dim, size))

        self._mapped(note)
        least = min(samples, size)
        return next((n for n in range(least, size + 1) if n not in others), least)

    def part(self, start: int, stop: int, convert: Callable[[Tensor], Tensor]) -> Any:
        """The samples from `start` to `stop` as a batch of their own, which shares no memory with this one."""
        size = self.size

        def cut(leaf: Any, dim: int | None) -> Any:
            if isinstance(leaf, PackedSequence):
                padded, lengths = pad_packed_sequence(leaf, batch_first=True)
                own = convert(padded[start:stop].detach())
                return pack_padded_sequence(own, lengths[start:stop], batch_first=True, enforce_sorted=False)
            found = self._dim_in(leaf, dim, size)
            own = leaf.detach() if found is None else leaf.detach().narrow(found, start, stop - start)
            return convert(own).clone().requires_grad_(leaf.requires_grad)

        return self._mapped(cut)

    def _dim_in(self, tensor: Tensor, dim: int | None, size: int) -> int | None:
        """As in a recording: another dim than that of the batch if it is the only one of that size, and must be."""
        if dim is None or (tensor.dim() > dim and tensor.shape[dim] == size):
            return dim
        if self.batch_size is None and tensor.dim() > dim:
            return None
        others = [d for d, n in enumerate(tensor.shape) if n == size]
        return others[0] if len(others) == 1 else None

    def _mapped(self, fn: OfLeaf) -> Any:
        if not self.pair:
            return _mapped(self.value, fn, self.batch_dim)
        inputs, targets = self.value
        target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return _mapped(inputs, fn, self.batch_dim), _mapped(targets, fn, target_dim)


def _mapped(value: Any, fn: OfLeaf, dims: BatchDim | None) -> Any:
    """`value` with each tensor t in it replaced by `fn(t, dim)`; all else is the same object."""
    if isinstance(value, (Tensor, PackedSequence)):
        return fn(value, _dim_of(dims, 0, 0))
    if isinstance(value, Mapping):
        named = {key: _mapped(part, fn, _dim_of(dims, i, key)) for i, (key, part) in enumerate(value.items())}
        if not isinstance(value, MutableMapping):
            return named
        same = copy.copy(value)  # one of transformers' has attributes too
        for key, part in named.items():
            same[key] = part
        return same
    if isinstance(value, (tuple, list)):
        parts = [_mapped(part, fn, _dim_of(dims, i, i)) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for i, name in enumerate(field.name for field in dataclasses.fields(value)):
            # also for a frozen one: it is a copy of ours, still in the making
            object.__setattr__(made, name, _mapped(getattr(value, name), fn, _dim_of(dims, i, name)))
        return made
    return value


def _dim_of(dims: BatchDim | None, position: int, key: Any) -> int | None:
    if dims is None or isinstance(dims, int):
        return dims
    if isinstance(dims, Mapping):
        return next((dims[k] for k in (key, position) if k in dims), 0)
    assert isinstance(dims, Sequence)
    return dims[position] if position < len(dims) else 0
