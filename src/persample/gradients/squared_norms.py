"""Squared norms that rounding cannot make too small, and the samples whose gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from persample import _torch
from persample._internal import host
from persample._internal.precision import widen
from persample.errors import PerSampleError
from persample.gradients.clipping import bound_inverse_norms
from persample.gradients.stack import JoinedRows, Stack
from persample.terms import Dense, Outer, Patches, Term, add_lost_squares, compute_row_norms

# What happens to samples whose gradient is not finite.
NonFinite = Literal["raise", "zero", "keep"]

# Computes the row of a sample for a parameter in float64, from the name and the sample.
ComputeRow = Callable[[str, int], Tensor]


class SquaredNorms:
    """The squared norm of each sample's part for each parameter, with floors (`terms/rounding.py`).

    A sample is *doubtful* if its squared norm is below its floor or not finite. Then its rows are computed in float64.
    Where decisions are late (`_internal/host.py`), its floor takes the place of its squared norm: an upper bound.
    Norms are before the rows are scaled. Parameters that are not used have none.

    Attributes:
        exact: samples whose rows have to be computed in float64, in sums as well.
        names: the parameters that have squared norms.
    """

    def __init__(self, nonfinite: NonFinite) -> None:
        self.exact: set[int] = set()
        self._nonfinite: set[int] = set()
        self._mode = nonfinite
        self.names: list[str] = []
        self._parts: list[Tensor] = []  # each `(some parameters, batch)`, in the order of the names
        self._floors: list[Tensor | None] = []
        self._can_be_negative = False
        self._joined: dict[int, JoinedRows] = {}  # by position: parts that have one row for all their parameters
        self._total: Tensor | None = None
        self._settled: dict[int, dict[str, float]] = {}  # by sample and parameter: squared norms from rows in float64
        self._is_cleared: Tensor | None = None  # decided late: the samples that were not finite and are cleared

    def add(self, names: Sequence[str], squares: Tensor, floor: Tensor | None, can_be_negative: bool = True) -> None:
        """Take the squared norms of some parameters, `(len(names), batch)`; by rounding, below 0 perhaps."""
        self._can_be_negative |= can_be_negative
        self._total = None
        self.names += names
        self._parts.append(squares)
        self._floors.append(floor)

    def extend(self, other: SquaredNorms) -> None:
        """Take the squared norms of other parameters, and what was decided about their samples."""
        self._can_be_negative |= other._can_be_negative
        self._joined |= {i + len(self._parts): joined for i, joined in other._joined.items()}
        self._total = None
        self.names += other.names
        self._parts += other._parts
        self._floors += other._floors
        self.exact |= other.exact
        self._nonfinite |= other._nonfinite
        for n, settled in other._settled.items():
            self._settled.setdefault(n, {}).update(settled)

    def add_joined(self, joined: JoinedRows) -> None:
        """Take the squared norms of small terms. Those of each parameter's part are computed if they are needed."""
        self._joined[len(self._parts)] = joined
        self.add(joined.names, joined.compute_squares().unsqueeze(0), None, can_be_negative=False)

    @property
    def is_late(self) -> bool:
        """Whether what is doubtful or not finite is decided on the device, without a number that Python reads."""
        return bool(self._parts) and host.decides_late(self._parts[0].device)

    @property
    def nonfinite(self) -> set[int]:
        """The samples whose gradient is not finite."""
        if self._is_cleared is not None:
            return self._nonfinite | find_true(self._is_cleared)
        return find_true(self.find_nonfinite_mask()) if self.is_late else self._nonfinite

    def note_cleared(self, is_cleared: Tensor) -> None:
        """Note the mask of samples that are not finite, before their squared norms, which are zero, are added."""
        self._is_cleared = is_cleared

    def note_infinite(self) -> None:
        """Note the samples whose squared norm is not finite; where decisions are late, there is nothing to note."""
        if not self.is_late:
            self._nonfinite |= set(_find_below(self.add_up(), None, None))

    def find_nonfinite_mask(self) -> Tensor:
        """`(batch,)`: the samples whose squared norm is not finite."""
        return ~(self.add_up() < torch.inf)

    def require_finite(self) -> None:
        """Raise if the gradient of a sample is not finite: now, or late."""
        if not self.is_late:
            check_finite(self.nonfinite)
        elif self.names:
            host.require((self.add_up() < torch.inf).all(), NOT_FINITE)

    def add_up(self) -> Tensor:
        """`(batch,)`: the squared norm of the whole row. Decided late, an upper bound where it is doubtful."""
        if self._total is None:
            parts = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
            if self._can_be_negative:
                parts = parts.clamp(min=0)
            self._total = parts[0] if len(parts) == 1 else parts.sum(0)
            floor = self._add_floors() if self.is_late else None
            if floor is not None:
                total = self._total
                host.expect(lambda: (total >= floor).all(), _BOUNDED)
                self._total = total.maximum(floor)
        return self._total

    def _add_floors(self) -> Tensor | None:
        floors = [floor for floor in self._floors if floor is not None]
        joined = floors[0] if len(floors) == 1 else torch.cat(floors) if floors else None
        return None if joined is None else joined[0] if len(joined) == 1 else joined.sum(0)

    def _list_part_matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """The squared norms and the floors, each `(some parameters, batch)`, in the order of the names."""
        joined = self._joined
        parts = [joined[i].compute_part_squares() if i in joined else part for i, part in enumerate(self._parts)]
        return list(zip(parts, self._floors, strict=True))

    def _list_parts(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """`{name: (squared norms, floor)}`, each `(batch,)`."""
        found: list[tuple[Tensor, Tensor | None]] = []
        for parts, floors in self._list_part_matrices():
            own_floors = [None] * len(parts) if floors is None else floors.unbind()
            found += zip(parts.unbind(), own_floors, strict=True)
        return dict(zip(self.names, found, strict=True))

    def compute_norms(self) -> Tensor:
        """`(batch,)`: the norms of the whole rows."""
        norms = self.add_up().sqrt()
        for n, settled in self._settled.items():
            squares = [
                settled[name] if name in settled else max(0.0, float(part[n]))
                for name, (part, _) in self._list_parts().items()
            ]
            norms[n] = torch.tensor(sum(squares), dtype=torch.float64).sqrt()  # infinity if float32 cannot hold it
        return norms

    def compute_clip_weights(self, max_norm: float, scale: float) -> Tensor:
        """`(batch,)`: what bounds the norms of the rows by `max_norm`, after each was multiplied by `scale`."""
        inverse = self.compute_norms().reciprocal_() if self._settled else self.add_up().rsqrt()
        return bound_inverse_norms(inverse, max_norm, scale)

    def compute_part_norms(self, least: Mapping[str, float] | None = None) -> dict[str, Tensor]:
        """`{name: (batch,)}`: the norms of each parameter's part. Decided late, where doubtful, upper bounds.

        An upper bound below the squared norm `least` does not matter.
        """
        found = {}
        for name, (part, floor) in self._list_parts().items():
            part = part.clamp(min=0)
            if floor is not None and self.is_late:
                bounded, allowed = part.maximum(floor), -1.0 if least is None else least[name]
                host.expect(partial(_is_reliable, part, bounded, allowed), _BOUNDED)
                part = bounded
            norms = part.sqrt()
            for n, settled in self._settled.items():
                if name in settled:
                    norms[n] = torch.tensor(settled[name], dtype=torch.float64).sqrt()
            found[name] = norms
        return found

    def find_doubtful(self, least: float | Tensor | None = None) -> list[int]:
        """The samples whose whole row is doubtful. Below the squared norm `least`, rounding does not matter."""
        return _find_below(self.add_up(), self._add_floors(), least) if self._parts else []

    def find_doubtful_parts(self, least: Mapping[str, float] | None = None) -> dict[str, list[int]]:
        """By parameter: the samples whose row is doubtful for it alone. Below `least`, rounding does not matter."""
        found: dict[str, list[int]] = {}
        start = 0
        for squares, floors in self._list_part_matrices():
            names = self.names[start : start + len(squares)]
            start += len(names)
            bounds = None if least is None or floors is None else squares.new_tensor([least[name] for name in names])
            for index in _find_below(squares, floors, None if bounds is None else bounds.unsqueeze(1)):
                i, n = divmod(index, squares.shape[1])
                found.setdefault(names[i], []).append(n)
        return found

    def settle(self, doubtful: Sequence[int], names: Iterable[str], compute_row: ComputeRow) -> None:
        """Compute the squared norms of doubtful samples from their rows, and sort out those that are not finite.

        With nonfinite="zero", a sample whose squared norm has overflowed counts as not finite.
        """
        if not doubtful:
            return
        names, parts = list(names), self._list_parts()
        for n in doubtful:
            if self._mode == "zero" and not all(float(parts[name][0][n]) < torch.inf for name in names):
                self._nonfinite.add(n)
                continue
            settled, is_finite = self._settled.setdefault(n, {}), True
            for name in names:
                norm = float(torch.linalg.vector_norm(compute_row(name, n)))
                settled[name] = norm * norm
                is_finite &= norm <= torch.finfo(parts[name][0].dtype).max  # False for NaN
            (self.exact if is_finite else self._nonfinite).add(n)

    def list_settled(self, name: str) -> list[int]:
        """The samples whose squared norm for a parameter was computed from the row."""
        return sorted(n for n, settled in self._settled.items() if name in settled)

    def note_nonfinite(self) -> None:
        """Note samples that are not finite, or have overflowed, for a parameter that was not settled."""
        if self.is_late:
            return
        for n in _find_below(self.add_up(), None, None) if self._parts else ():
            settled = self._settled.get(n, {})
            parts = self._list_parts().items()
            if not all(name in settled or float(part[n]) < torch.inf for name, (part, _) in parts):
                self.exact.discard(n)
                self._nonfinite.add(n)

    def clear_nonfinite(self) -> Tensor | None:
        """Set the squared norms of samples that are not finite to zero; returns their mask, None if there are none."""
        if self.is_late:
            if self._is_cleared is None:
                self._clear(self.find_nonfinite_mask())
        elif self._nonfinite:
            self._clear(make_mask(self._nonfinite, self._parts[0]))
        return self._is_cleared

    def _clear(self, is_cleared: Tensor) -> None:
        self._total, self._is_cleared = None, is_cleared
        self._parts = [part.masked_fill(is_cleared, 0) for part in self._parts]
        if self.is_late:
            self._floors = [None if floor is None else floor.masked_fill(is_cleared, 0) for floor in self._floors]
        self._joined = {i: joined.clear_samples(is_cleared) for i, joined in self._joined.items()}
        for n in self._nonfinite:
            self._settled.pop(n, None)


NOT_FINITE = "The gradient of a sample is not finite, or too large to compute its norm."

_BOUNDED = (
    "In the last step, the contributions to the gradient of a sample cancelled, so that rounding could make its norm "
    "too small. An upper bound took its place, so the sample was clipped to less than the bound. From now on, the rows "
    "of such samples are computed in float64, for which each answer waits for the device."
)


def find_true(mask: Tensor) -> set[int]:
    """The indices at which a mask `(batch,)` is true; reads it."""
    return {n for n, is_true in enumerate(host.read_numbers(mask)) if is_true}


def make_mask(samples: Iterable[int], like: Tensor) -> Tensor:
    """A mask of these samples, for a tensor whose last dimension is the batch."""
    mask = torch.zeros(like.shape[-1], dtype=torch.bool, device=like.device)
    mask[sorted(samples)] = True
    return mask


def check_finite(nonfinite: Iterable[int]) -> None:
    """Raise if there are samples whose gradient is not finite."""
    samples = sorted(nonfinite)
    if samples:
        shown = ", ".join(map(str, samples[:5])) + (", ..." if len(samples) > 5 else "")
        raise PerSampleError(
            f"The gradients of {len(samples)} samples are not finite: of sample {shown} in the batch. They contain "
            "infinities or NaN, or their squared norms are too large for the dtype. Remove the samples from the data, "
            "or pass nonfinite='zero' to leave them out, or nonfinite='keep' to get their norms as they are."
        )


def _is_reliable(squares: Tensor, bounded: Tensor, least: float) -> Tensor:
    """Whether no squared norm above `least` was replaced by an upper bound."""
    return ~((bounded > squares) & (bounded > least)).any()


def _find_below(squares: Tensor, floor: Tensor | None, least: float | Tensor | None) -> list[int]:
    """The samples whose squared norm is not finite, or is below its floor and above `least`."""
    margin = squares
    if floor is not None:
        margin = (squares if least is None else squares.clamp(min=least)) - floor
    lowest = 0.0 if floor is not None else -math.inf
    numbers = host.read_numbers(margin)
    if math.isfinite(sum(numbers)) and min(numbers, default=0.0) >= lowest:
        return []
    return [n for n, number in enumerate(numbers) if not lowest <= number < math.inf]


# Terms of these classes whose norms are products of norms of factors.
_PLAIN = {Dense, Outer}


def measure_stacks(stacks: Iterable[Stack], squares: SquaredNorms, compact: bool = False, summed: bool = True) -> None:
    """Add the squared norms of some stacks to `squares`; the arguments are those of `Stack.measure`."""
    groups: dict[Any, list[tuple[Stack, Sequence[Tensor]]]] = {}
    for stack in stacks:
        if compact:
            compact_stack(stack)
        factors = _find_norm_factors(stack.term)
        if factors:
            key = len(factors), factors[-1].device, *(factor.dtype for factor in factors)
            groups.setdefault(key, []).append((stack, factors))
        else:
            squares.add(stack.names, *stack.measure(compact, summed))
    norms = _Norms()
    sides = [
        [norms.add(side) for side in zip(*(factors for _, factors in group), strict=True)] for group in groups.values()
    ]
    for group, numbers in zip(groups.values(), sides, strict=True):
        names = [name for stack, _ in group for name in stack.names]
        found, *others = map(norms.get_squares, numbers)
        for other in others:
            length = max(max(stack.term.shape) for stack, _ in group)
            found = add_lost_squares(found * other, found, other, length)
        squares.add(names, found.view(len(names), -1), None, can_be_negative=False)


def compact_stack(stack: Stack) -> None:
    """Keep the dense form of a term if its norms need it and it is smaller."""
    if type(stack.term) in (Outer, Patches):  # others find out in `measure`
        stack.replace_term(stack.term.compact())


def _find_norm_factors(term: Term) -> Sequence[Tensor]:
    """Tensors `(batch, ...)`: the norm of a row is the product of the norms of their rows. Empty if there are none."""
    if type(term) is Dense:
        return (term.values,)
    return (term.input, term.grad) if type(term) is Outer and term.positions == 1 else ()


class _Norms:
    """The norms of the rows of tensors. Tensors in the same memory share them, as those of a bias and its weight."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # by place in memory
        self._norms: list[Tensor] = []  # each `(batch,)`
        self._squares: Sequence[Tensor] = ()
        self._all = torch.empty(0)

    def add(self, tensors: Iterable[Tensor]) -> list[int]:
        """Compute the norms of the rows of some tensors; returns the number of each."""
        return [self._add(tensor) for tensor in tensors]

    def _add(self, tensor: Tensor) -> int:
        place = (
            _torch.find_storage_id(tensor) or id(tensor),
            tensor.storage_offset(),
            tensor.dtype,
            *[(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1],
        )
        if place not in self._numbers:
            self._numbers[place] = len(self._norms)
            self._norms.append(compute_row_norms(widen(tensor)))
        return self._numbers[place]

    def get_squares(self, numbers: Sequence[int]) -> Tensor:
        """The squared norms of some tensors, one after the other; after all were added."""
        norms, sizes = self._norms, [len(norms) for norms in self._norms]
        if len({(own.dtype, own.device) for own in norms}) > 1:
            return torch.cat([norms[i] for i in numbers]).square()
        if not self._squares:
            self._all = (torch.cat(norms) if len(norms) > 1 else norms[0]).square()
            self._squares = self._all.split(sizes)
        first, count = numbers[0], len(numbers)
        if list(numbers) == list(range(first, first + count)):
            return self._all.narrow(0, sum(sizes[:first]), sum(sizes[first : first + count]))
        return torch.cat([self._squares[i] for i in numbers])
