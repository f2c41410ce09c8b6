"""What a scan keeps of the gradients of a batch. Each term is reduced when it arrives, and freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from persample.gradients import Projection, Stack
from persample.terms import Term


class ComputedTerms:
    """What a function computes from the term of each parameter."""

    def __init__(self, compute: Callable[[str, Term], Any]) -> None:
        self._compute = compute
        self.values: dict[str, Any] = {}

    def receive(self, stack: Stack) -> None:
        """Take the term of one parameter, or of several. A pass that is repeated replaces the results."""
        for name, term in stack.split():
            if term.shape.numel():
                self.values[name] = self._compute(name, term)


class ReducedRows:
    """The projections of rows, their inner products with a direction, and their sum; each only if it is wanted."""

    def __init__(
        self,
        count: int,
        device: torch.device,
        projection: Projection | None,
        direction: Mapping[str, Tensor] | None = None,
        with_sum: bool = False,
    ) -> None:
        self._count, self._projection, self._direction = count, projection, direction
        self._weights = torch.ones(count, device=device) if with_sum else None
        self._parts: dict[str, Tensor] = {}
        self._dots: dict[str, Tensor] = {}
        self.total: dict[str, Tensor] = {}

    def receive(self, stack: Stack) -> None:
        """Take the term of one parameter, or of several."""
        if self._weights is not None:
            self.total.update(stack.sum(self._weights))
        for name, term in stack.split() if self._projection or self._direction else ():
            if self._projection and term.shape.numel():
                self._parts[name] = self._projection.project_term(name, term)
            if self._direction:
                self._dots[name] = term.dot(self._direction[name])

    def project(self) -> Tensor:
        """`(count, dim)`: the projections of the rows."""
        if self._projection is None:
            raise ValueError("No projection was asked for.")
        return self._projection.assemble(self._parts, self._count)

    def dot(self) -> Tensor:
        """`(count,)`: the inner products of the rows with the direction, in float64."""
        if not self._dots:
            return torch.zeros(self._count)
        # Sorted, because the order in which terms arrive differs between the first pass and later ones.
        return torch.stack([self._dots[name].double() for name in sorted(self._dots)]).sum(0)
