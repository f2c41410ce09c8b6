"""Squared norms that rounding cannot make too small, and the samples whose gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import PerSampleError
from persample.gradients.joined import JoinedRows

# What happens to samples whose gradient is not finite.
NonFinite = Literal["raise", "zero", "keep"]

# Computes the row of a sample for a parameter in float64, from the name and the sample.
ComputeRow = Callable[[str, int], Tensor]


class SquaredNorms:
    """The squared norm of each sample's part for each parameter, with floors (`terms/rounding.py`).

    A sample is *doubtful* if its squared norm is below its floor or not finite. Then its rows are computed in float64.
    Norms are before the rows are scaled. Parameters that are not used have none.

    Attributes:
        exact: samples whose rows have to be computed in float64, in sums as well.
        nonfinite: samples whose gradient is not finite.
    """

    def __init__(self, nonfinite: NonFinite) -> None:
        self.exact: set[int] = set()
        self.nonfinite: set[int] = set()
        self._mode = nonfinite
        self._names: list[str] = []
        self._parts: list[Tensor] = []  # each `(some parameters, batch)`, in the order of the names
        self._floors: list[Tensor | None] = []
        self._joined: dict[int, JoinedRows] = {}  # by position: parts that have one row for all their parameters
        self._total: Tensor | None = None
        self._settled: dict[int, dict[str, float]] = {}  # by sample and parameter: squared norms from rows in float64

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, names: Sequence[str], squares: Tensor, floor: Tensor | None) -> None:
        """Take the squared norms of some parameters, `(len(names), batch)`."""
        self._total = None
        self._names += names
        self._parts.append(squares)
        self._floors.append(floor)

    def add_joined(self, joined: JoinedRows) -> None:
        """Take the squared norms of small terms. Those of each parameter's part are computed if they are needed."""
        self._joined[len(self._parts)] = joined
        self.add(joined.names, joined.compute_squares().unsqueeze(0), None)

    @property
    def names(self) -> list[str]:
        """The parameters that have squared norms."""
        return self._names

    def add_up(self) -> Tensor:
        """`(batch,)`: the squared norm of the whole row. In a compiled step, where it is doubtful, an upper bound."""
        if self._total is None:
            if len(self._parts) == len(self._joined) == 1:
                return self._parts[0][0]
            # Rounding can leave a part slightly below zero.
            self._total = torch.cat(self._parts).clamp_(min=0).sum(0)
            floor = self._add_floors() if tracing.get_trace() is not None else None
            if floor is not None:
                self._total = self._total.maximum(floor)
        return self._total

    def _add_floors(self) -> Tensor | None:
        floors = [floor for floor in self._floors if floor is not None]
        return torch.cat(floors).sum(0) if floors else None

    def _list_parts(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """`{name: (squared norms, floor)}`, each `(batch,)`."""
        found: list[tuple[Tensor, Tensor | None]] = []
        for i, (parts, floors) in enumerate(zip(self._parts, self._floors, strict=True)):
            if i in self._joined:
                parts = self._joined[i].compute_part_squares()
            own_floors = [None] * len(parts) if floors is None else floors.unbind()
            found += zip(parts.unbind(), own_floors, strict=True)
        return dict(zip(self._names, found, strict=True))

    def compute_norms(self) -> Tensor:
        """`(batch,)`: the norms of the whole rows."""
        norms = self.add_up().sqrt()
        for n, settled in self._settled.items():
            squares = [
                settled[name] if name in settled else max(0.0, float(part[n]))
                for name, (part, _) in self._list_parts().items()
            ]
            norms[n] = math.sqrt(sum(squares))
        return norms

    def compute_part_norms(self) -> dict[str, Tensor]:
        """`{name: (batch,)}`: the norms of each parameter's part. In a compiled step, where doubtful, upper bounds."""
        found = {}
        for name, (part, floor) in self._list_parts().items():
            part = part.clamp(min=0)
            if tracing.get_trace() is not None and floor is not None:
                part = part.maximum(floor)
            norms = part.sqrt()
            for n, settled in self._settled.items():
                if name in settled:
                    norms[n] = math.sqrt(settled[name])
            found[name] = norms
        return found

    def find_doubtful(self, least: float | Tensor | None = None) -> list[int]:
        """The samples whose whole row is doubtful. Below the squared norm `least`, rounding does not matter."""
        return _find_below(self.add_up(), self._add_floors(), least) if self._parts else []

    def find_doubtful_parts(self, names: Iterable[str], least: Mapping[str, float] | None = None) -> list[int]:
        """The samples whose row is doubtful for one of these parameters alone."""
        found: set[int] = set()
        parts = self._list_parts()
        for name in names:
            part, floor = parts[name]
            found.update(_find_below(part, floor, least[name] if least else None))
        return sorted(found)

    def settle(self, doubtful: Sequence[int], names: Iterable[str], compute_row: ComputeRow) -> None:
        """Compute the squared norms of doubtful samples from their rows, and sort out those that are not finite.

        With nonfinite="zero", a sample whose squared norm has overflowed counts as not finite.
        """
        if not doubtful:
            return
        names, parts = list(names), self._list_parts()
        for n in doubtful:
            if self._mode == "zero" and not all(float(parts[name][0][n]) < torch.inf for name in names):
                self.nonfinite.add(n)
                continue
            settled, is_finite = self._settled.setdefault(n, {}), True
            for name in names:
                norm = float(torch.linalg.vector_norm(compute_row(name, n)))
                settled[name] = norm * norm
                is_finite &= norm <= torch.finfo(parts[name][0].dtype).max  # False for NaN
            (self.exact if is_finite else self.nonfinite).add(n)

    def list_settled(self, name: str) -> list[int]:
        """The samples whose squared norm for a parameter was computed from the row."""
        return sorted(n for n, settled in self._settled.items() if name in settled)

    def note_nonfinite(self) -> None:
        """Note samples that are not finite, or have overflowed, for a parameter that was not settled."""
        for n in _find_below(self.add_up(), None, None) if self._parts else ():
            settled = self._settled.get(n, {})
            parts = self._list_parts().items()
            if not all(name in settled or float(part[n]) < torch.inf for name, (part, _) in parts):
                self.exact.discard(n)
                self.nonfinite.add(n)

    def clear(self, samples: Iterable[int]) -> None:
        """Set the squared norms of these samples to zero."""
        index = sorted(samples)
        if index:
            self._total = None
            self._parts = [part.index_fill(1, torch.tensor(index, device=part.device), 0) for part in self._parts]
            self._joined = {i: joined.clear_samples(index) for i, joined in self._joined.items()}
            for n in index:
                self._settled.pop(n, None)


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


def require_finite(total: Tensor) -> None:
    """In a compiled step: have each run raise if a sample's squared norm is not finite."""
    trace = tracing.get_trace()
    if trace is not None:
        trace.require(
            (total < torch.inf).all(), "The gradient of a sample is not finite, or too large to compute its norm."
        )


def _find_below(squares: Tensor, floor: Tensor | None, least: float | Tensor | None) -> list[int]:
    """The samples whose squared norm is not finite, or is below its floor and above `least`.

    Reads one number from the device, unless some are found.
    """
    if not squares.numel():
        return []
    if floor is None and math.isfinite(float(squares.sum())):
        return []
    margin = squares * 0  # NaN if not finite
    if floor is not None:
        margin = margin + (squares if least is None else squares.clamp(min=least)) - floor
    return [] if float(margin.min()) >= 0 else [int(n) for n in (~(margin >= 0)).nonzero().squeeze(1).tolist()]
