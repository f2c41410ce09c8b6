"""Rows for each sample and each of several losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients.base import answer
from persample.gradients.explanation import Explanation, TriedFunctions
from persample.gradients.kept_terms import KeptTerms
from persample.gradients.matrix import PerSampleGradients
from persample.layouts import Reduced
from persample.terms import Term


class LossIntake:
    """The intakes of several losses of one forward pass: each backward pass fills that of the next loss.

    Attributes:
        passes: the number of backward passes that have ended.
    """

    is_early = is_first_of_two = False  # as `Intake` has them

    def __init__(self, losses: Sequence[str], make: Callable[[], KeptTerms]) -> None:
        self.losses = list(losses)
        self.intakes = [make() for _ in losses]
        self.rows, self.notes = self.intakes[0].rows, self.intakes[0].notes
        self.passes = 0

    def grow(self, batch_size: int) -> None:
        """Add samples to the batch: a forward pass has got another part of it."""
        if self.passes:
            raise PerSampleError(
                "This forward pass gets another part of the batch than the last one, after a backward pass of one of "
                "the losses: pass samples= with the tensor that has one row for each sample."
            )
        for intake in self.intakes:
            intake.grow(batch_size)

    @property
    def _current(self) -> KeptTerms:
        if self.is_complete:
            raise PerSampleError(
                f"A recording with losses={self.losses} has had a backward pass for each of them, and another one has "
                "begun. Name all losses, or add them up before backward()."
            )
        return self.intakes[self.passes]

    def receive(self, parameter: Tensor, term: Term) -> None:
        """Take what a backward pass found for a parameter."""
        self._current.receive(parameter, term)

    def receive_stack(self, parameters: Sequence[Tensor], term: Term) -> None:
        """Take one term for several parameters."""
        self._current.receive_stack(parameters, term)

    def receive_shared(self, parameter: Tensor, grad: Tensor) -> None:
        """Take a gradient of a parameter that belongs to no sample."""
        self._current.receive_shared(parameter, grad)

    def note_loss(self, loss: Reduced, reaches_weights: bool = True) -> None:
        """Take how the loss that the running backward pass starts from combines the samples."""
        self._current.note_loss(loss, reaches_weights)

    def finish(self) -> None:
        """Note that a backward pass, or a pass inside it, has ended."""
        self._current.finish()

    def end_pass(self) -> None:
        """Note that the backward pass of a loss has ended: the next one is of the next loss."""
        self.passes += 1

    @property
    def is_complete(self) -> bool:
        """Whether the backward passes of all losses have ended."""
        return self.passes >= len(self.intakes)

    @property
    def has_positions(self) -> bool:
        """Whether the recording splits gradients into parts for each position."""
        return self.intakes[0].has_positions

    def run_backward(self, run: Callable[..., Any], anchor: Tensor, factor_bytes: int) -> None:
        """Run a call of `loss.backward()`."""
        run()

    def note_sum(self, parameter: Tensor, term: Term, total: Tensor) -> None:
        """Note the sum over the samples of a parameter's term, before it is scaled."""

    def note_outside(self, tensor: Tensor) -> None:
        """Note a tensor from outside: its memory may change without the recording noticing."""
        self.notes.outside.add(tensor)


class LossGradients:
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

    def __init__(self, intake: LossIntake) -> None:
        self.losses, self._intake = intake.losses, intake
        self._grads = [PerSampleGradients(own) for own in intake.intakes]

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self._grads[0].batch_size

    @property
    def row_count(self) -> int:
        """The number of rows of each loss."""
        return self._grads[0].row_count

    @property
    def names(self) -> list[str]:
        """The names of the recorded parameters."""
        return self._grads[0].names

    @property
    def verification(self) -> str:
        """Whether samples were compared with the batch."""
        return self._intake.notes.verification

    @property
    def row_verification(self) -> str:
        """Whether a row was compared with the gradient of the sample alone."""
        return self._intake.notes.row_verification

    @property
    def tried(self) -> TriedFunctions:
        """The functions whose motion was found by trial."""
        return self._intake.notes.tried

    def explain(self) -> Explanation:
        """What was kept for each parameter by the first loss."""
        return self._grads[0].explain()

    def __repr__(self) -> str:
        return f"LossGradients({self._intake.passes} of {len(self.losses)} backward passes: {', '.join(self.losses)})"

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
        if not self._intake.is_complete:
            raise PerSampleError(
                f"{self._intake.passes} of {len(self._grads)} backward passes have reached the weights: a recording "
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
