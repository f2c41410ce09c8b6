"""What there is to know of how an op moves the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from persample.layouts.layout import Layout, Reduced, Where


@dataclass
class Motion:
    """Where the samples lie in each tensor of a result, and in those arguments that were thought to hold none.

    `following` maps the position of such an argument (a state made by `zeros(B, H)`, a learned token expanded to the
    batch) to its layout: its rows turned out to go with the samples. `by_values`: it is known of these values only.
    """

    results: tuple[Where | None, ...]
    following: tuple[tuple[int, Layout], ...] = ()
    by_values: bool = False
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # what else is known of such calls
    # Set once it is known that calls of this kind do nothing but to give one tensor, where the samples lie so; or that
    # they use weights by this plan, if these are parameters.
    simple: Layout | Reduced | None = field(default=None, compare=False, repr=False)
    use: Any = field(default=None, compare=False, repr=False)

    def follows(self, position: int) -> Layout | None:
        return dict(self.following).get(position)


def everywhere(where: Where | None, results: Sequence[Tensor]) -> Motion:
    """The same for all results."""
    return Motion(tuple(where for _ in results))
