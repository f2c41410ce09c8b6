"""Small terms of many parameters, joined: their rows in one buffer, so that one norm and one product answer for all.

The arithmetic of a small term takes less time than the calls of torch for its norm, its floor and its sum. The rows are
computed in float64, as those of doubtful samples are (`terms/rounding.py`), so they need no floor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from persample import _torch
from persample.gradients.stack import Stack
from persample.terms import Dense, Outer, Patches, Rows, Term

# A term is small if neither a factor nor its dense form has more entries.
_MAX_ENTRIES = 2**13

# Entries of all rows together.
_MAX_TOTAL = 2**17

_DTYPES = {torch.float32, torch.float64}


def find_dtype(term: Term) -> torch.dtype | None:
    """The dtype of the answers of a small term; None if it is not small, or not a simple structure of real numbers."""
    if type(term) not in (Dense, Outer, Patches, Rows):
        return None
    dtype = None
    for factor in vars(term).values():
        if not isinstance(factor, Tensor):
            continue
        if factor.numel() > _MAX_ENTRIES or factor.device.type not in ("cpu", "cuda"):
            return None
        if factor.is_floating_point() or factor.is_complex():
            if factor.dtype not in _DTYPES or dtype not in (None, factor.dtype):
                return None
            dtype = factor.dtype
    return dtype if term.batch * term.shape.numel() <= _MAX_ENTRIES else None


class SmallStacks:
    """Collects stacks of small terms, to be joined. All are of one dtype and device."""

    def __init__(self) -> None:
        self._stacks: list[Stack] = []
        self._kind: tuple[torch.dtype, torch.device] | None = None
        self._total = 0

    def add(self, stack: Stack) -> bool:
        """Take a stack if its term is small and of the same kind as those before; returns whether it was taken."""
        term = stack.term
        dtype = find_dtype(term)
        if dtype is None:
            return False
        kind = dtype, (term.values if isinstance(term, Dense) else term.grad).device  # type: ignore[attr-defined]
        total = self._total + term.batch * term.shape.numel()
        if self._kind not in (None, kind) or total > _MAX_TOTAL:
            return False
        self._kind, self._total = kind, total
        self._stacks.append(stack)
        return True

    def join(self) -> JoinedRows | None:
        """The rows of all stacks, which are released; None if there is none."""
        stacks, self._stacks = self._stacks, []
        return JoinedRows.from_stacks(stacks) if stacks else None


class JoinedRows:
    """The rows of some parameters in one matrix, in float64. Answers as a `Stack` does.

    Args:
        rows: `(batch, entries)`, the rows of all parameters side by side.
        parts: names of parameters of one shape, their shape, and the first of their columns.
        dtype: the dtype of the answers.
    """

    def __init__(
        self, rows: Tensor, parts: Sequence[tuple[Sequence[str], torch.Size, int]], dtype: torch.dtype
    ) -> None:
        self.rows = rows
        self.names = [name for names, _, _ in parts for name in names]
        self._parts = parts
        self._dtype = dtype

    @classmethod
    def from_stacks(cls, stacks: Sequence[Stack]) -> JoinedRows:
        """Compute the rows of some stacks, whose terms are small."""
        parts, blocks, end = [], [], 0
        for stack in stacks:
            term, count = stack.term, len(stack.names)
            shape = term.shape
            parts.append((stack.names, shape, end))
            blocks.append((term.compute_exact_rows(), count, size := shape.numel(), end))
            end += count * size
        batch = stacks[0].batch
        rows = blocks[0][0].new_empty((batch, end), dtype=torch.float64)
        _torch.copy_each(
            [rows.as_strided((count, batch, size), (size, end, 1), start) for _, count, size, start in blocks],
            [block.reshape(count, batch, size) for block, count, size, _ in blocks],
        )
        dtype = find_dtype(stacks[0].term)
        assert dtype is not None
        return cls(rows, parts, dtype)

    def compute_squares(self) -> Tensor:
        """`(batch,)`: the squared norms of the rows of all parameters together."""
        return torch.linalg.vector_norm(self.rows, dim=1).square().to(self._dtype)

    def compute_part_squares(self) -> Tensor:
        """`(len(names), batch)`: the squared norms of each parameter's part of the rows."""
        squares = [block.square().sum(2) for block in self._split(self.rows)]
        return torch.cat(squares).to(self._dtype)

    def _split(self, rows: Tensor) -> list[Tensor]:
        """For each part, `(count, batch, entries)`."""
        found = []
        for names, shape, start in self._parts:
            size = shape.numel()
            block = rows[:, start : start + len(names) * size]
            found.append(block.unflatten(1, (len(names), size)).transpose(0, 1))
        return found

    def compute_exact_row(self, name: str, sample: int) -> Tensor:
        """The row of a sample for one parameter, in float64."""
        for names, shape, start in self._parts:
            if name in names:
                start += names.index(name) * shape.numel()
                return self.rows[sample, start : start + shape.numel()].view(shape)
        raise KeyError(name)

    def clear_samples(self, samples: Iterable[int]) -> JoinedRows:
        """The same with rows of zeros for some samples, also if their rows are not finite."""
        index = torch.tensor(sorted(samples), dtype=torch.long, device=self.rows.device)
        return JoinedRows(self.rows.index_fill(0, index, 0), self._parts, self._dtype)

    def sum(self, weights: Tensor, exact: Collection[int] = ()) -> dict[str, Tensor]:
        """`{name: shape}`: the sum over n of weights[n] g_n for each parameter. All samples are exact here."""
        total = (weights.double() @ self.rows).to(self._dtype)
        found: dict[str, Tensor] = {}
        for names, shape, start in self._parts:
            size = shape.numel()
            part = total[start : start + len(names) * size].view(len(names), *shape)
            found.update(zip(names, part.unbind(), strict=True))
        return found
