"""Importance sampling by gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from persample.errors import PerSampleError


class ImportanceSampler(Sampler[int]):
    """Draws examples with replacement, with probabilities that grow with their running gradient norms.

    Weighting each loss by `weights(ids)` makes the mean of the weighted gradients an unbiased estimate of the mean
    gradient of all examples. Its variance is smallest if the probabilities are proportional to the norms (Zhao and
    Zhang, 2015); the part `uniform` of the draws is uniform, which bounds the weights by `1 / uniform`.

    Args:
        size: the number of examples.
        draws: the number of draws of an epoch; by default `size`.
        uniform: the part of uniform draws, above 0 and at most 1.
        decay: the weight of the past in the running norm of an example.
        generator: the source of random numbers; by default torch's global one.

    >>> sampler = ImportanceSampler(4, uniform=0.5, generator=torch.Generator().manual_seed(0))
    >>> sampler.update(torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 1.0, 1.0, 5.0]))
    >>> sampler.probabilities
    tensor([0.1875, 0.1875, 0.1875, 0.4375], dtype=torch.float64)
    >>> sampler.weights(torch.tensor([0, 3]))
    tensor([1.3333, 0.5714])
    """

    def __init__(
        self,
        size: int,
        *,
        draws: int | None = None,
        uniform: float = 0.2,
        decay: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> None:
        if size < 1 or (draws is not None and draws < 1):
            raise PerSampleError(f"size and draws must be at least 1, got {size} and {draws}.")
        if not 0 < uniform <= 1:
            raise PerSampleError(f"uniform must be above 0 and at most 1, got {uniform}: weights would have no bound.")
        if not 0 <= decay < 1:
            raise PerSampleError(f"decay must be at least 0 and below 1, got {decay}.")
        self._draws = size if draws is None else draws
        self._uniform, self._decay, self._generator = uniform, decay, generator
        self._epoch: Tensor | None = None  # the probabilities of the last epoch
        self._norms = torch.full((size,), math.nan, dtype=torch.float64)  # NaN until an example is seen

    def update(self, ids: Tensor, norms: Tensor) -> None:
        """Take the gradient norms of some examples. Norms that are not finite are ignored.

        The norms must be those of the samples' own losses, before they are weighted.
        """
        norms = norms.detach().to("cpu", torch.float64)
        keep = norms.isfinite()
        ids, norms = ids.cpu()[keep], norms[keep]
        before = self._norms[ids]
        self._norms[ids] = torch.where(before.isnan(), norms, self._decay * before + (1 - self._decay) * norms)

    @property
    def probabilities(self) -> Tensor:
        """`(size,)`: the probability of each example in a draw. An example that was not seen counts as average."""
        seen = self._norms[~self._norms.isnan()]
        mean = seen.mean() if len(seen) else torch.tensor(1.0, dtype=torch.float64)
        scores = self._norms.nan_to_num(nan=float(mean))
        size, total = len(scores), scores.sum()
        if total <= 0:
            return torch.full_like(scores, 1 / size)
        return (1 - self._uniform) * scores / total + self._uniform / size

    def weights(self, ids: Tensor) -> Tensor:
        """The weight of each drawn example's loss: 1 / (size * probability), at the probabilities of the last epoch."""
        drawn_with = self.probabilities if self._epoch is None else self._epoch
        return (1 / (len(self._norms) * drawn_with[ids.cpu()])).to(torch.get_default_dtype()).to(ids.device)

    def __iter__(self) -> Iterator[int]:
        # The weights of an epoch must fit the probabilities that it was drawn with, also after updates.
        self._epoch = self.probabilities
        ends = self._epoch.cumsum(0)
        points = torch.rand(self._draws, generator=self._generator, dtype=torch.float64) * ends[-1]
        return iter(torch.searchsorted(ends, points, right=True).clamp(max=len(ends) - 1).tolist())

    def __len__(self) -> int:
        return self._draws
