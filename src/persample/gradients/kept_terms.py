"""The terms of all parameters, kept for any answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.precision import widen
from persample.errors import PerSampleError
from persample.gradients.curvature import has_both_sides
from persample.gradients.intake import Intake, RecordedBatch, add_all_over_processes
from persample.gradients.squared_norms import (
    SquaredNorms,
    check_finite,
    compact_stack,
    find_true,
    measure_stacks,
)
from persample.gradients.stack import JoinedRows, SmallStacks, Stack
from persample.terms import Dense, Term, add_samples, add_terms, find_factors, make_groups, merge_samples


class StackTable:
    """The stacks of the parameters; several parameters may have the same one. Factors must not change in place."""

    def __init__(self) -> None:
        self._by_name: dict[str, Stack] = {}
        self._joined: tuple[list[Stack], JoinedRows | None] | None = None  # what `join_small` returns

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Stack:
        return self._by_name[name]

    def add(self, stack: Stack) -> None:
        """Keep a stack in place of what its parameters had."""
        stack.note_versions()
        self._joined = None
        for name in stack.names:
            self._by_name[name] = stack

    def get_all(self) -> list[Stack]:
        """All stacks, each once."""
        stacks = list(dict.fromkeys(self._by_name.values()))
        for stack in stacks:
            stack.check_unchanged()
        return stacks

    def split(self) -> list[Stack]:
        """All stacks, one for each parameter from now on."""
        for stack in self.get_all():
            self._split(stack)
        return self.get_all()

    def _split(self, stack: Stack) -> None:
        if len(stack.names) > 1:
            for name, term in stack.split():
                self.add(Stack([name], term))

    def remove(self, name: str) -> None:
        """Forget what was found for a parameter."""
        if self.find_term(name) is not None:
            self._joined = None
            del self._by_name[name]

    def find_term(self, name: str) -> Term | None:
        """What was found for a parameter so far, None if it was not used."""
        stack = self._by_name.get(name)
        if stack is None:
            return None
        stack.check_unchanged()
        self._split(stack)
        return self._by_name[name].term

    def join_small(self) -> tuple[list[Stack], JoinedRows | None]:
        """The stacks of large terms, and the rows of the small ones in one matrix."""
        stacks = self.get_all()
        if tracing.get_trace() is not None:
            return stacks, None
        if self._joined is None:
            small = SmallStacks()
            others = [stack for stack in stacks if not small.add(stack)]
            self._joined = others, small.join(others)
        return self._joined


class PositionTerms:
    """The terms of parts of each sample, for the positions of a sequence.

    Attributes:
        parts: with a row for each position of each sample.
        rest: with a row for each sample, of uses without positions.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.parts: dict[str, Term] = {}
        self.rest: dict[str, Term] = {}

    def remove(self, name: str) -> None:
        """Forget the terms of a parameter."""
        self.parts.pop(name, None)
        self.rest.pop(name, None)

    def add(self, name: str, term: Term, batch_size: int) -> Term:
        """Keep a term; returns it with a row for each sample."""
        is_split = term.batch == batch_size * self.count
        kept = self.parts if is_split else self.rest
        kept[name] = term if name not in kept else add_terms([kept[name], term])
        if not is_split:
            return term
        samples = torch.arange(term.batch, device=next(find_factors(term)).device) // self.count
        return merge_samples(term, make_groups(samples, batch_size))


class KeptTerms(Intake):
    """Keeps the terms of all parameters."""

    keeps_rows = True

    def __init__(self, batch: RecordedBatch, positions: int | None = None) -> None:
        super().__init__(batch)
        self.positions = None if positions is None else PositionTerms(positions)
        self.stacks = StackTable()
        self.exact: set[int] = set()  # samples with rows that are added up in float64
        self.compacted: set[str] = set()  # parameters whose factors were replaced by dense gradients
        self._cleared: Tensor | None = None  # mask of the samples that were not finite, and whose rows are zero now
        self._is_cleared = False  # whether all terms that have arrived were searched for samples to clear

    # ---- filling ----

    def grow(self, batch_size: int) -> None:
        super().grow(batch_size)
        self._start_answers()
        for stack in self.stacks.split():
            self._keep(Stack(stack.names, add_samples(stack.term, batch_size)))

    def _find_need_of_whole_batch(self) -> str:
        return "positions are recorded" if self.positions is not None else super()._find_need_of_whole_batch()

    def receive(self, parameter: Tensor, term: Term) -> None:
        name = self._names.get(id(parameter))
        if self.positions is not None and name is not None:
            term = self.positions.add(name, self.notes.outside.copy_factors(term), self.rows.batch_size)
        super().receive(parameter, term)

    def receive_rows(self, name: str, term: Term) -> None:
        self._start_answers()
        before = self.stacks.find_term(name)
        self._keep(Stack([name], term if before is None else add_terms([before, term])))

    def _receive_stack(self, stack: Stack) -> None:
        self._start_answers()
        if not any(name in self.stacks for name in stack.names):
            self._keep(stack)
        else:  # of another backward pass
            for name, term in stack.split():
                self.receive_rows(name, term)

    def _keep(self, stack: Stack) -> None:
        if tracing.get_trace() is None:  # a compiled step computes its answers before anything can change
            stack.term = self.notes.outside.copy_factors(stack.term)
        self.stacks.add(stack)

    def _start_answers(self) -> None:
        """Forget what was found about samples: terms have arrived."""
        self._is_cleared = False
        self.exact.clear()

    def drop(self, parameters: Iterable[Tensor]) -> None:
        self._start_answers()
        for name in filter(None, [self._names.get(id(parameter)) for parameter in parameters]):
            self.stacks.remove(name)
            self.shared.pop(name, None)
            if self.positions is not None:
                self.positions.remove(name)
        if not self.stacks:
            self.reduction.forget()

    def finish(self) -> None:
        super().finish()
        self.notes.outside.forget_copies()

    # ---- terms ----

    def prepare_answer(self) -> None:
        """Raise if no backward pass has ended. With nonfinite="zero": set rows that are not finite to zero."""
        self.check_done()
        is_settled = self.nonfinite != "zero" or self._is_cleared
        if is_settled or not self.stacks or not self.rows.batch_size:
            return
        self._is_cleared = True
        squares = self._measure_stacks()
        squares.note_infinite()
        mask = squares.clear_nonfinite()
        if mask is not None:
            self._cleared = mask if self._cleared is None else mask | self._cleared
            for stack in self.stacks.get_all():
                self._keep(stack.clear_samples(mask))

    def get_term(self, name: str) -> Term:
        """The term of a parameter; of one that was not used, zeros."""
        if name not in self.parameters:
            raise PerSampleError(f"'{name}' is not a parameter of this recording.")
        self.prepare_answer()
        p, term = self.parameters[name], self.stacks.find_term(name)
        return Dense(p.new_zeros(()).expand(self.rows.count, *p.shape)) if term is None else term

    def get_terms(self) -> dict[str, Term]:
        """The terms of all parameters by name."""
        return {name: self.get_term(name) for name in self.parameters}

    def describe_term(self, name: str) -> str:
        return type(self.stacks[name].term).__name__ if name in self.stacks else "not used"

    def sum_stacks(
        self,
        sum_rows: Callable[[Stack | JoinedRows], dict[str, Tensor]],
        own: bool,
        stacks: Iterable[Stack],
        joined: JoinedRows | None = None,
    ) -> dict[str, Tensor]:
        """`{name: shape}`: weighted sums of the rows, of which `sum_rows` gives those of one stack."""
        found: dict[str, Tensor] = {} if joined is None else sum_rows(joined)
        for stack in stacks:
            found.update(sum_rows(stack))
        for name in self.parameters.keys() - found.keys():
            found[name] = widen(torch.zeros_like(self.parameters[name]))
        return add_all_over_processes(self, {name: found[name] for name in self.parameters}, own)

    # ---- squared norms ----

    def settle_rows(self) -> SquaredNorms:
        squares = self._measure()
        if not squares.is_late:
            self._settle(squares, squares.find_doubtful(), squares.names)
        return squares

    def settle_parts(self) -> SquaredNorms:
        squares = self._measure()
        if not squares.is_late:
            for name, doubtful in squares.find_doubtful_parts().items():
                self._settle(squares, doubtful, [name])
        return squares

    def _settle(self, squares: SquaredNorms, doubtful: list[int], names: Iterable[str]) -> None:
        squares.settle(doubtful, names, self._compute_exact_row)
        self.exact |= squares.exact
        if self.nonfinite == "raise":
            check_finite(squares.nonfinite)

    def _compute_exact_row(self, name: str, sample: int) -> Tensor:
        return self.stacks[name].compute_exact_row(name, sample)

    def find_nonfinite(self) -> set[int]:
        self.prepare_answer()
        if self.nonfinite == "zero":
            return self.list_cleared()
        squares = self._measure_stacks()
        if not squares.is_late:
            squares.settle(squares.find_doubtful(), squares.names, self._compute_exact_row)
        return squares.nonfinite

    def list_cleared(self) -> set[int]:
        """The rows that were set to zero, because they were not finite."""
        return set() if self._cleared is None else find_true(self._cleared)

    def _measure(self) -> SquaredNorms:
        """The squared norms as they are, which are refused late if they must be finite."""
        self.prepare_answer()
        squares = self._measure_stacks()
        if squares.is_late and self.nonfinite == "raise":
            squares.require_finite()
        return squares

    def _measure_stacks(self) -> SquaredNorms:
        """The squared norms as they are; keeps the dense form of terms if the norms needed it and it is smaller."""
        squares, before = SquaredNorms(self.nonfinite), [(stack, stack.term) for stack in self.stacks.get_all()]
        for stack, _ in before:
            compact_stack(stack)
        others, joined = self.stacks.join_small()
        measure_stacks(others, squares, compact=True)
        for stack, term in before:
            if stack.term is not term and has_both_sides(term) and not has_both_sides(stack.term):
                self.compacted.update(stack.names)
        if joined is not None:
            squares.add_joined(joined)
        return squares
