"""How a call moves the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from persample.layouts.layout import Layout, Reduced, Where

# A plan for a use of weights: `persample.backward.recorded_use.Plan`, of a layer above this one.
Plan = Any


@dataclass
class Motion:
    """How a call moves the samples: where they lie in each tensor of the result.

    Attributes:
        results: where the samples lie in each tensor of the result.
        aligned: arguments that do not depend on the batch, but have rows for each sample (a state made by
            `zeros(B, H)`, a learned token that was expanded to the batch): position among the tensors, and layout.
        depends_on_values: the motion was found from the values of the arguments, so it must not be cached.
        is_tried: the motion was found by trial, so it is observed and not known.

    The other attributes are a cache of `persample.forward`, which has the same keys as motions:

        plans: plans for uses of weights, by the positions of the weights among the tensors.
        use: the plan for later calls with the same key that use parameters; None if each call must be planned.
        simple: where the samples lie in the result, if calls with the same key only return one new tensor; None if
            that is not known.
        has_own_divisor: `simple` lacks the number that the call counts or divides by.
    """

    results: tuple[Where | None, ...]
    aligned: tuple[tuple[int, Layout], ...] = ()
    depends_on_values: bool = False
    is_tried: bool = False
    plans: dict[tuple[int, ...], Plan] = field(default_factory=dict, compare=False, repr=False)
    use: Plan | None = field(default=None, compare=False, repr=False)
    simple: Layout | Reduced | None = field(default=None, compare=False, repr=False)
    has_own_divisor: bool = field(default=False, compare=False, repr=False)

    def get_aligned(self, position: int) -> Layout | None:
        """The layout of an argument in `aligned`, None if it is not there."""
        return dict(self.aligned).get(position)


def make_uniform_motion(where: Where | None, results: Sequence[Tensor]) -> Motion:
    """The motion with the same layout for each of the results."""
    return Motion(tuple(where for _ in results))
