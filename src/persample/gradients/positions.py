"""The part of each sample's gradient that each position of a sequence contributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from persample.gradients.matrix import PerSampleGradients


class TopPositions(NamedTuple):
    """The positions with the largest values of each sample, `(batch, k)`, and the values."""

    values: Tensor
    positions: Tensor


class PositionGradients:
    """The result of `grads.by_position()`: a row for each position of each sample.

    The part of position t is what the gradients of the layers' outputs at position t contribute to the gradient of the
    sample. The parts of all positions, and the rest, add up to the row of the sample.

    Attributes:
        count: the number of positions.
        rest: the parameters with a part that belongs to no position, such as those of a layer after the pooling.
    """

    def __init__(
        self,
        count: int,
        parts: PerSampleGradients,
        rest_rows: PerSampleGradients,
        rest: list[str],
        scale: float,
    ) -> None:
        self.count, self.rest = count, rest
        self._parts, self._rest, self._scale = parts, rest_rows, scale

    def norms(self) -> Tensor:
        """`(batch, positions)`: the norm of each part."""
        return self._fold(self._parts.norms())

    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """`(batch, positions)`: the inner product of each part with a direction `{name: shape}`."""
        return self._fold(self._parts.dot(direction))

    def top(self, k: int, direction: Mapping[str, Tensor] | None = None) -> TopPositions:
        """The k positions of each sample with the largest norms, or the largest inner products with a direction."""
        values = self.norms() if direction is None else self.dot(direction)
        return TopPositions(*values.topk(min(k, self.count), dim=1))

    def dense(self) -> dict[str, Tensor]:
        """`{name: (batch, positions, *shape)}`: the parts themselves, which take much memory."""
        return {name: self._fold(part) for name, part in self._parts.dense().items()}

    def rest_norms(self) -> Tensor:
        """`(batch,)`: the norm of the part of each sample's gradient that belongs to no position."""
        return self._rest.norms() * self._scale

    def rest_dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """`(batch,)`: the inner product of that part with a direction."""
        return self._rest.dot(direction) * self._scale

    def rest_dense(self) -> dict[str, Tensor]:
        """`{name: (batch, *shape)}`: that part itself."""
        return {name: part * self._scale for name, part in self._rest.dense().items()}

    def _fold(self, rows: Tensor) -> Tensor:
        return (rows * self._scale).unflatten(0, (-1, self.count))

    def __repr__(self) -> str:
        rest = f", without a position: {self.rest}" if self.rest else ""
        return f"PositionGradients({self.count} positions{rest})"
