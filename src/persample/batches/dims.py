"""The batch dimension of a tensor, and the batch size on which tensors agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from persample.errors import ROWS_ADVICE, PerSampleError

# The batch dimension: one number for all arguments, or one for each, by position or name. None: the tensors of that
# argument are the same for all samples.
BatchDim = int | Sequence[int | None] | Mapping[str | int, int | None]


# A tensor or PackedSequence, and the dimension in which its samples should lie.
Leaf = tuple[Any, int | None]


class NoSamplesFound(PerSampleError):
    """No tensor has a batch dimension."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"No tensor with a batch dimension was found in {where}. Pass the samples as a tensor, or as tensors in "
            "lists, tuples, dicts or dataclasses; batch_dim says in which dimension the samples lie."
        )


class BatchSizesDiffer(PerSampleError):
    """Two tensors have different sizes in their batch dimensions."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(
            f"The tensors of the batch have different sizes in the batch dimension: {' and '.join(map(str, sizes))}. "
            "Pass batch_size: a tensor that has no dimension of that size is then taken to be the same for all samples."
        )
        self.sizes = sizes


class WrongBatchSize(PerSampleError):
    """A tensor has another size in its batch dimension than the batch."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(
            f"An argument of the model has {found} samples in its batch dimension, and the batch has {expected}. Check "
            "batch_size and batch_dim; an argument that is the same for all samples has batch_dim None. If samples "
            f"share a dimension, as nodes of graphs do: {ROWS_ADVICE}"
        )
        self.found, self.expected = found, expected


def find_batch_size(leaves: Iterable[Leaf], where: str) -> int:
    """The number of samples, on which all leaves with a batch dimension must agree.

    Raises:
        NoSamplesFound: no leaf has a batch dimension.
        BatchSizesDiffer: the leaves disagree.
    """
    sizes: dict[int, None] = {}
    for leaf, dim in leaves:
        if isinstance(leaf, PackedSequence):
            sizes[int(leaf.batch_sizes[0])] = None
        elif isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim:
            sizes[leaf.shape[dim]] = None
    if not sizes:
        raise NoSamplesFound(where)
    if len(sizes) > 1:
        raise BatchSizesDiffer(list(sizes))
    return next(iter(sizes))


def find_sample_dim(tensor: Tensor, batch_size: int, dim: int, search: bool) -> int | None:
    """`dim` if it has the size of the batch; else, with `search`, the only other dimension of that size, or None."""
    if tensor.dim() > dim and tensor.shape[dim] == batch_size:
        return dim
    dims = [d for d, size in enumerate(tensor.shape) if size == batch_size] if search else []
    return dims[0] if len(dims) == 1 else None


def choose_dim(batch_dim: BatchDim | None, position: int | None, name: Any) -> int | None:
    """The batch dimension of one argument, or of one part of a batch; 0 if `batch_dim` does not mention it."""
    if batch_dim is None or isinstance(batch_dim, int):
        return batch_dim
    if isinstance(batch_dim, Mapping):
        return next((batch_dim[key] for key in (name, position) if key in batch_dim), 0)  # type: ignore[index]
    return batch_dim[position] if position is not None and position < len(batch_dim) else 0


def find_state_dim(tensor: Tensor, batch_size: int, dim: int) -> int | None:
    """The batch dimension of a tensor beside others: `dim`, or else the next one, or else the only one of that size.

    The next one is that of the state of a recurrent layer, `(layers, batch, features)`.

    >>> import torch
    >>> find_state_dim(torch.ones(2, 5, 5), 5, 0), find_state_dim(torch.ones(7, 3), 5, 0)
    (1, None)
    """
    found = find_sample_dim(tensor, batch_size, dim, search=False)
    if found is None and tensor.dim() > dim + 1 and tensor.shape[dim + 1] == batch_size:
        found = dim + 1
    return find_sample_dim(tensor, batch_size, dim, search=True) if found is None else found
