"""Canaries: samples that are added to the data, and gradients that are added to the released sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from persample import _torch
from persample.errors import PerSampleError


class GradientCanaries:
    """Gradients of unit norm that are orthogonal to each other: random signs on disjoint random sets of coordinates.

    All directions together take a few numbers per parameter, and a step costs about as much as drawing its noise.
    """

    def __init__(self, parameters: Sequence[Tensor], count: int, generator: torch.Generator) -> None:
        total = sum(p.numel() for p in parameters)
        if count > total:
            raise PerSampleError(
                f"The model has {total} parameters, too few for {count} canaries. Pass a smaller count."
            )
        device = parameters[0].device
        owners = torch.randperm(total, generator=generator) % count
        signs = torch.randint(2, (total,), generator=generator) * 2.0 - 1.0
        self._owners = owners.to(device)
        self._entries = (signs / owners.bincount(minlength=count).sqrt()[owners]).to(device)
        self._count = count

    def add_up(self, chosen: Tensor) -> Tensor:
        """The sum of the chosen canaries, as one vector for all parameters."""
        return self._entries * chosen.to(self._entries)[self._owners]

    def project(self, vector: Tensor) -> Tensor:
        """The inner product of a vector with each canary."""
        products = torch.zeros(self._count, dtype=torch.float64, device=vector.device)
        return products.index_add_(0, self._owners, (self._entries * vector).double()).cpu()


class WatchedData(Dataset[Any]):
    """The first `size` samples of a dataset, and canaries. It notes which samples are loaded, in their order.

    Further attributes are those of the dataset.
    """

    def __init__(self, dataset: Any, size: int, canaries: Sequence[Any] = ()) -> None:
        self._dataset, self._size, self._canaries = dataset, size, canaries
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self._size + len(self._canaries)

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, int):
            return self._dataset[i]
        self.loaded.append(i)
        return self._dataset[i] if i < self._size else self._canaries[i - self._size]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:  # that of the dataset would not be noted
        return [self[i] for i in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while a copy is made, there is no dataset yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


def make_samples(dataset: Any, count: int, generator: torch.Generator) -> list[Any]:
    """Samples that no other sample explains: inputs of noise, with labels or tokens of random examples.

    Tensors of floating-point numbers become normal noise with the deviation of an example. Everything else is taken
    from another random example if it has the same shape.
    """
    picks = torch.randint(len(dataset), (count, 2), generator=generator).tolist()
    return [_disguise(dataset[i], dataset[j], generator) for i, j in picks]


def _disguise(example: Any, other: Any, generator: torch.Generator) -> Any:
    leaves, structure = _torch.pytree.tree_flatten(example)
    others, other_structure = _torch.pytree.tree_flatten(other)
    if structure != other_structure:
        others = leaves
    return _torch.pytree.tree_unflatten(
        [_replace(leaf, like, generator) for leaf, like in zip(leaves, others, strict=True)], structure
    )


def _replace(leaf: Any, other: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, Tensor):
        return other
    if leaf.is_floating_point():
        scale = leaf.float().std().item() if leaf.numel() > 1 else 1.0
        return (torch.randn(leaf.shape, generator=generator) * (scale or 1.0)).to(leaf)
    return other if isinstance(other, Tensor) and other.shape == leaf.shape else leaf
