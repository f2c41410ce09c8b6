"""Recordings that keep one answer: terms are reduced when they arrive, and freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients.base import NotKept
from persample.gradients.intake import Intake, RecordedBatch
from persample.gradients.squared_norms import SquaredNorms, compact_stack, measure_stacks
from persample.gradients.stack import Stack
from persample.terms import Term, find_factors

# Entries of factors that are measured together.
_MAX_WAITING = 2**20


class Streamed(Intake):
    """Keeps the squared norms by parameter, and what a subclass adds: `kept`, in words."""

    is_early = True
    kept: str

    def __init__(self, batch: RecordedBatch) -> None:
        super().__init__(batch)
        self.squares = SquaredNorms(batch.nonfinite)
        self._used: set[str] = set()  # the parameters that have squared norms

    def receive_rows(self, name: str, term: Term) -> None:
        self._receive_stack(Stack([name], term))

    def note_used(self, stack: Stack) -> None:
        """Note that the parameters of a stack have norms; refuse a second one."""
        if not self._used.isdisjoint(stack.names):
            self.refuse_second_pass()
        self._used.update(stack.names)

    def measure_and_settle(self, stacks: Sequence[Stack], summed: bool = False, least: float = 0.0) -> None:
        """Keep reliable squared norms of terms that will not be kept. Below `least`, they need not be reliable."""
        own = SquaredNorms(self.nonfinite)
        measure_stacks(stacks, own, summed=summed)
        if not own.is_late:
            kept = {name: stack for stack in stacks for name in stack.names}
            found = own.find_doubtful_parts(dict.fromkeys(own.names, least) if least else None)
            for name, doubtful in found.items():
                own.settle(doubtful, [name], kept[name].compute_exact_row)
        self.squares.extend(own)

    def describe_term(self, name: str) -> str:
        return "norms only" if name in self._used else "not used"

    def settle_rows(self) -> SquaredNorms:
        self.check_done()
        if self.nonfinite == "raise":
            self.squares.require_finite()
        self.clear_nonfinite()
        return self.squares

    def settle_parts(self) -> SquaredNorms:
        return self.settle_rows()

    def find_nonfinite(self) -> set[int]:
        return self.squares.nonfinite

    def clear_nonfinite(self) -> Tensor | None:
        """Set the squared norms of samples that are left out to zero; returns their mask, None if there are none."""
        return self.squares.clear_nonfinite() if self.nonfinite == "zero" else None

    def refuse_second_pass(self) -> NoReturn:
        raise PerSampleError(
            f"A second backward pass reached weights in a recording that keeps {self.kept} only: the norm of a sum of "
            "two passes cannot be computed from the two norms. Add the losses before backward(), or record with "
            "keep='everything'."
        )


class NormsIntake(Streamed):
    """Keeps the norms."""

    kept = "norms"

    def __init__(self, batch: RecordedBatch) -> None:
        super().__init__(batch)
        self._squared_sums: dict[str, Tensor] = {}  # by name: of the sum of the rows, before they are scaled
        self._has_sums = False
        self._waiting: list[Stack] = []  # small terms, which are measured together at the end of the pass
        self._waiting_entries = 0
        self._receivers: list[Callable[[Stack], None]] = []

    def pass_terms_to(self, receive: Callable[[Stack], None]) -> None:
        """Call a function with each term that arrives from now on."""
        self._receivers.append(receive)

    def _receive_stack(self, stack: Stack) -> None:
        self.note_used(stack)
        if self._receivers:
            compact_stack(stack)
        entries = sum(factor.numel() for factor in find_factors(stack.term))
        self._waiting.append(stack)
        self._waiting_entries += entries
        if self._waiting_entries > _MAX_WAITING:
            self._measure_waiting()
        if self.rows.split is not None and self._has_sums:  # the rows are not those of the samples that are here
            for name, total in stack.sum(torch.ones(self.rows.count, device=self.rows.device)).items():
                self._squared_sums[name] = total.abs().square().sum(dtype=torch.float64)
        for receive in self._receivers:
            receive(stack)

    def add_rows(self, parameter: Tensor, term: Term) -> Tensor:
        """The sum over the samples of a parameter's term, before it is scaled. Only its norm is kept."""
        found, rows, name = super().add_rows(parameter, term), self.rows, self._names.get(id(parameter))
        self._has_sums = True
        if name is not None and rows.split is None:
            has_means = rows.units is not None and rows.units.reduction == "mean"  # rows do not add up to `found`
            total = rows.merge(term).sum(torch.ones(rows.count, device=found.device)) if has_means else found
            self._squared_sums[name] = total.abs().square().sum(dtype=torch.float64)
        return found

    def finish(self) -> None:
        """Note that a backward pass has ended: the norms are complete."""
        super().finish()
        self._measure_waiting()
        self.squares.note_nonfinite()

    def _measure_waiting(self) -> None:
        waiting, self._waiting, self._waiting_entries = self._waiting, [], 0
        self.measure_and_settle(waiting)

    def compute_norm_of_sum(self) -> Tensor:
        """The norm of the sum of the rows of this process."""
        self.check_done()
        if not self._has_sums:
            raise NotKept("This recording has not added up the rows. Record with keep_grad=True, or keep='everything'.")
        if self.nonfinite == "raise":
            self.squares.require_finite()
        if self.nonfinite == "zero" and self.squares.nonfinite:
            raise NotKept(
                f"The sum that this recording has kept contains {len(self.squares.nonfinite)} {self.rows.kind} that "
                "are not finite. Record with keep='everything' to leave them out."
            )
        total = sum(self._squared_sums.values(), torch.zeros((), dtype=torch.float64, device=self.rows.device))
        return total.sqrt() * self.scale
