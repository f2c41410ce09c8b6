"""What a recording keeps for parameters: a term for one, or for several of one shape, and the rows of small terms.

The arithmetic of a small term takes less time than the calls of torch for its norm, its floor and its sum. So the rows
of small terms of all parameters are joined in one matrix: one norm and one product answer for all. They are computed in
float64, as those of doubtful samples are (`terms/rounding.py`), so they need no floor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients.clipping import add_weighted_rows
from persample.terms import Dense, Outer, Patches, Rows, Term, find_factors


@dataclass(slots=True, eq=False)
class Stack:
    """One term for some parameters of one shape: the samples of each parameter after those of the last.

    The layers of a transformer have such parameters. One call then answers for all of them.

    >>> import torch
    >>> from persample.terms import Dense
    >>> stack = Stack(["a", "b"], Dense(torch.ones(6, 4)))
    >>> stack.measure()[0].shape, stack.sum(torch.ones(3))["b"]
    (torch.Size([2, 3]), tensor([3., 3., 3., 3.]))
    """

    names: Sequence[str]
    term: Term
    _versions: list[tuple[Tensor, int]] = field(default_factory=list, init=False)

    @property
    def batch(self) -> int:
        return self.term.batch // len(self.names)

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None]:
        """`(len(names), batch)`: the squared norms, and their floors or None; see `Term.measure`.

        With `compact`, the dense form is kept if the norms needed it and it is smaller.
        """
        squares, floor, term = self.term.measure(compact=compact, summed=summed)
        self.replace_term(term)
        count = len(self.names)
        return squares.view(count, -1), None if floor is None else floor.view(count, -1)

    def replace_term(self, term: Term) -> None:
        """Keep an equal term in another form."""
        if term is not self.term:
            self.term = term
            if self._versions:
                self.note_versions()

    def compute_exact_row(self, name: str, sample: int) -> Tensor:
        """The row of a sample for one parameter, in float64."""
        return self.term.compute_exact_row(self.names.index(name) * self.batch + sample)

    def clear_samples(self, is_cleared: Tensor) -> Stack:
        """The same with rows of zeros where a mask `(batch,)` is true, also if their rows are not finite."""
        mask = is_cleared.to(next(find_factors(self.term)).device)
        return Stack(self.names, self.term.clear_samples(mask.repeat(len(self.names))))

    def sum(self, weights: Tensor, exact: Collection[int] = ()) -> dict[str, Tensor]:
        """`{name: shape}`: the sum over n of weights[n] g_n for each parameter, for samples in `exact` in float64."""
        if len(self.names) == 1 or exact:
            return {name: add_weighted_rows(term, weights, exact) for name, term in self.split()}
        return dict(zip(self.names, self.term.sum_each(weights, len(self.names)).unbind(), strict=True))

    def split(self) -> Iterator[tuple[str, Term]]:
        """Each parameter and its own term."""
        if len(self.names) == 1:
            yield self.names[0], self.term
            return
        batch = self.batch
        for i, name in enumerate(self.names):
            yield name, self.term.some(i * batch, (i + 1) * batch)

    def note_versions(self) -> None:
        """From now on, `check_unchanged` refuses factors that were changed in place."""
        self._versions = [(t, t._version) for t in find_factors(self.term)]

    def check_unchanged(self) -> None:
        """Raise if a factor was changed in place since `note_versions`."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise PerSampleError(
                    f"An activation behind the gradients of '{self.names[0]}' was changed in place after the backward "
                    "pass. Read the answers before you change it, or change a copy."
                )


# ---- joined rows ----


# A term is small if neither a factor nor its dense form has more entries for each parameter.
_MAX_ENTRIES = 2**13

# Fewer stacks are not worth a matrix, if there are others.
_MIN_STACKS = 3

# Entries of all rows together.
_MAX_TOTAL = 2**17

_KINDS = {Dense, Outer, Patches, Rows}
_DTYPES = {torch.float32, torch.float64}
_DEVICES = {"cpu", "cuda", "meta"}  # with float64


class SmallStacks:
    """Collects stacks of small terms, to be joined. All are of one dtype and device."""

    def __init__(self) -> None:
        self._stacks: list[Stack] = []
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._total = 0

    def add(self, stack: Stack) -> bool:
        """Take a stack if its term is small and of the same kind as those before; returns whether it was taken."""
        term = stack.term
        entries, count = term.batch * term.shape.numel(), len(stack.names)
        is_large = entries > count * _MAX_ENTRIES or self._total + entries > _MAX_TOTAL
        if is_large or not self._accepts(term, count):
            return False
        self._total += entries
        self._stacks.append(stack)
        return True

    def _accepts(self, term: Term, count: int) -> bool:
        """Whether a term has a simple structure, and small factors of the dtype and device of the terms before."""
        if type(term) not in _KINDS:
            return False
        dtype, device = self._dtype, self._device
        for factor in vars(term).values():
            if not isinstance(factor, Tensor):
                continue
            if factor.numel() > count * _MAX_ENTRIES or (device is not None and factor.device != device):
                return False
            device = factor.device
            own = factor.dtype
            if own is dtype or not (own.is_floating_point or own.is_complex):
                continue
            if dtype is not None or own not in _DTYPES:
                return False
            dtype = own
        if device is None or device.type not in _DEVICES:
            return False
        self._dtype, self._device = dtype, device
        return True

    def join(self, others: list[Stack] | None = None) -> JoinedRows | None:
        """The rows of all stacks, which are released; None if there are none, or so few that they join `others`."""
        if others and len(self._stacks) < _MIN_STACKS:
            others += self._stacks
            self._stacks = []
        stacks, self._stacks = sorted(self._stacks, key=lambda stack: type(stack.term) is not Dense), []
        if not stacks:
            return None
        assert self._dtype is not None
        batch, end, parts = stacks[0].batch, 0, []
        for stack in stacks:
            shape = stack.term.shape
            parts.append((stack.names, shape, size := shape.numel()))
            end += len(stack.names) * size
        rows = torch.empty((batch, end), dtype=torch.float64, device=self._device)
        start = _write_dense_rows([stack for stack in stacks if type(stack.term) is Dense], rows)
        for stack, (names, _, size) in zip(stacks, parts, strict=True):
            if type(stack.term) is not Dense:
                count = len(names)
                stack.term.write_exact_rows(rows.as_strided((count, batch, size), (size, end, 1), start))
                start += count * size
        return JoinedRows(rows, parts, self._dtype)


def _write_dense_rows(stacks: Sequence[Stack], rows: Tensor) -> int:
    """Write the rows of dense terms into the first columns of a matrix, in one copy; returns their number."""
    parts: list[Tensor] = []
    for stack in stacks:
        values = stack.term.dense()
        count, batch = len(stack.names), len(rows)
        values = values.reshape(count, batch, values.shape[1:].numel())
        parts += values.unbind()
    if not parts:
        return 0
    end = sum(part.shape[1] for part in parts)
    torch.cat(parts, 1, out=rows.narrow(1, 0, end))
    return end


class JoinedRows:
    """The rows of some parameters in one matrix, in float64. Answers as a `Stack` does.

    Args:
        rows: `(batch, entries)`, the rows of all parameters side by side.
        parts: in the order of the columns: names of parameters of one shape, their shape, and its number of entries.
        dtype: the dtype of the answers.
    """

    def __init__(
        self, rows: Tensor, parts: Sequence[tuple[Sequence[str], torch.Size, int]], dtype: torch.dtype
    ) -> None:
        self.rows = rows
        self._parts = parts
        self._dtype = dtype

    @property
    def names(self) -> list[str]:
        return [name for names, _, _ in self._parts for name in names]

    def compute_norms(self) -> Tensor:
        """`(batch,)`: the norms of the rows of all parameters together, in float64."""
        return torch.linalg.vector_norm(self.rows, dim=1)

    def find_finite(self, norms: Tensor) -> Tensor:
        """`(batch,)`: whether the squared norm of a row is finite in the dtype of the answers."""
        return norms <= torch.finfo(self._dtype).max ** 0.5  # False for NaN

    def compute_squares(self) -> Tensor:
        """`(batch,)`: the squared norms of the rows of all parameters together."""
        return self.compute_norms().square().to(self._dtype)

    def compute_part_squares(self) -> Tensor:
        """`(len(names), batch)`: the squared norms of each parameter's part of the rows."""
        sizes = [len(names) * size for names, _, size in self._parts]
        blocks = [
            block.unflatten(1, (len(names), size)).square().sum(2)
            for block, (names, _, size) in zip(self.rows.split(sizes, 1), self._parts, strict=True)
        ]
        return torch.cat(blocks, 1).mT.to(self._dtype)

    def compute_exact_row(self, name: str, sample: int) -> Tensor:
        """The row of a sample for one parameter, in float64."""
        start = 0
        for names, shape, size in self._parts:
            if name in names:
                start += names.index(name) * size
                return self.rows[sample, start : start + size].view(shape)
            start += len(names) * size
        raise KeyError(name)

    def clear_samples(self, is_cleared: Tensor) -> JoinedRows:
        """The same with rows of zeros where a mask `(batch,)` is true, also if their rows are not finite."""
        mask = is_cleared.to(self.rows.device).unsqueeze(1)
        return JoinedRows(self.rows.masked_fill(mask, 0), self._parts, self._dtype)

    def sum(self, weights: Tensor, exact: Collection[int] = ()) -> dict[str, Tensor]:
        """`{name: shape}`: the sum over n of weights[n] g_n for each parameter. All samples are exact here."""
        total = torch.mv(self.rows.t(), weights.double()).to(self._dtype)
        sizes = [len(names) * size for names, _, size in self._parts]
        found: dict[str, Tensor] = {}
        for part, (names, shape, _) in zip(total.split(sizes), self._parts, strict=True):
            if len(names) == 1:
                found[names[0]] = part.view(shape)
            else:
                found.update(zip(names, part.view(len(names), *shape).unbind(), strict=True))
        return found
