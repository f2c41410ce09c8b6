"""Recordings that keep what a function makes of each parameter's term, such as inner products, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from persample.gradients.base import NotKept
from persample.gradients.intake import RecordedBatch
from persample.gradients.stack import Stack
from persample.gradients.streamed import StreamedGradients
from persample.gradients.streamed_norms import Streamed
from persample.terms import Term

# From the name of a parameter and its term: what is kept, and the sum of rows that `keep_grad` adds to `p.grad`.
Reduce = Callable[[str, Term], tuple[Any, Tensor]]


class ReducedIntake(Streamed):
    """Keeps what a function makes of the terms, before they are scaled."""

    kept = "what a function made of the terms"

    def __init__(self, batch: RecordedBatch, reduce: Reduce) -> None:
        super().__init__(batch)
        self._reduce = reduce
        self.found: dict[str, Any] = {}
        self._sums: dict[str, Tensor] = {}

    def _receive_stack(self, stack: Stack) -> None:
        self.note_used(stack)
        for name, term in stack.split():
            self.found[name], self._sums[name] = self._reduce(name, term)

    def add_rows(self, parameter: Tensor, term: Term) -> Tensor:
        total = self._sums.pop(self._names.get(id(parameter), ""), None)
        return super().add_rows(parameter, term) if total is None else total

    def settle_rows(self) -> NoReturn:
        raise NotKept(f"This recording has kept {self.kept}, and no norms.")

    def find_nonfinite(self) -> NoReturn:
        self.settle_rows()


class ReducedTerms(StreamedGradients):
    """What the function `reduce` made of the terms: `watch(model, receive, reduce=...)`."""

    _intake: ReducedIntake

    @property
    def has_shared(self) -> bool:
        """Whether the loss has a part that belongs to no sample."""
        return bool(self._intake.shared)

    @property
    def found(self) -> dict[str, Any]:
        """What is kept, by the name of the parameter; parameters that were not used are missing."""
        self._intake.check_done()
        return self._intake.found
