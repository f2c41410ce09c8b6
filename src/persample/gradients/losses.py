"""Rows for each sample and each of several losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients.base import OfRecording, answer
from persample.gradients.kept_terms import KeptTerms
from persample.gradients.matrix import PerSampleGradients


class LossGradients(OfRecording):
    """The gradients of several losses of the same batch: `record(model, losses=["a", "b"])`.

    The backward passes in the block are those of the losses, in their order. `grads["a"]` has all answers for one loss;
    the methods here compare the losses.

    >>> import persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, losses=["first", "second"]) as grads:
    ...     out = model(torch.randn(5, 3))
    ...     out[:, 0].square().mean().backward(retain_graph=True)
    ...     out.sin().sum(1).mean().backward()
    >>> grads["first"].norms().shape, grads.gram().shape, grads.conflicts().shape
    (torch.Size([5]), torch.Size([5, 2, 2]), torch.Size([2, 2]))
    """

    def __init__(self, losses: Sequence[str], intakes: Sequence[KeptTerms]) -> None:
        super().__init__(intakes[0])
        self.losses, self._grads = list(losses), [PerSampleGradients(intake) for intake in intakes]
        self._intakes = intakes

    @property
    def _passes(self) -> int:
        """The number of backward passes that have ended."""
        return sum(intake.is_backward_done for intake in self._intakes)

    def __repr__(self) -> str:
        return f"LossGradients({self._passes} of {len(self.losses)} backward passes: {', '.join(self.losses)})"

    # ---- answers ----

    def __getitem__(self, name: str) -> PerSampleGradients:
        """The gradients of one loss."""
        if name not in self.losses:
            raise PerSampleError(f"'{name}' is not one of the losses {self.losses}.")
        self._check_complete()
        return self._grads[self.losses.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.losses)

    def __len__(self) -> int:
        return len(self.losses)

    def _check_complete(self) -> None:
        if self._passes < len(self.losses):
            raise PerSampleError(
                f"{self._passes} of {len(self._grads)} backward passes have reached the weights: a recording "
                f"with losses={self.losses} needs one for each, in this order, with retain_graph=True for all but the "
                "last."
            )

    def _compare(self, compare: Callable[[PerSampleGradients, PerSampleGradients], Tensor]) -> list[list[Tensor]]:
        """A symmetric comparison of each pair of losses."""
        self._check_complete()
        found: list[list[Any]] = [[None] * len(self) for _ in self.losses]
        for i, first in enumerate(self._grads):
            for j in range(i + 1):
                found[i][j] = found[j][i] = compare(first, self._grads[j])
        return found

    @answer
    def gram(self) -> Tensor:
        """`(rows, losses, losses)`: the inner products of the gradients of the losses, for each sample."""
        found = self._compare(lambda first, second: first.inner(second))
        return torch.stack([torch.stack(row, -1) for row in found], 1)

    @answer
    def mean_gram(self) -> Tensor:
        """`(losses, losses)`: the inner products of the mean gradients of the losses, in float64."""
        self._check_complete()
        means = [torch.cat([part.double().flatten() for part in grads.mean().values()]) for grads in self._grads]
        matrix = torch.stack(means)
        return matrix @ matrix.mT

    def cosines(self) -> Tensor:
        """`(rows, losses, losses)`: the cosines of the angles between the gradients of the losses; 0 for zeros."""
        gram = self.gram()
        norms = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        scales = (norms[:, :, None] * norms[:, None, :]).clamp(min=torch.finfo(gram.dtype).tiny)
        return (gram / scales).clamp(-1, 1)

    def conflicts(self) -> Tensor:
        """`(losses, losses)`: the share of the samples for which the gradients of two losses point apart."""
        return (self.gram() < 0).double().mean(0)

    @answer
    def mean(self, weights: Tensor) -> dict[str, Tensor]:
        """`{name: shape}`: the weighted sum of the mean gradients, with a weight for each loss."""
        self._check_complete()
        if weights.shape != (len(self),):
            raise PerSampleError(f"mean() needs a weight for each of {len(self)} losses, got {tuple(weights.shape)}.")
        means = [grads.mean() for grads in self._grads]
        return {
            name: sum((float(w) * mean[name] for w, mean in zip(weights, means, strict=True)), torch.zeros(()))
            for name in self.names
        }
