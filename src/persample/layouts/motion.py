"""How a call moves the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from persample.layouts.layout import Layout, Where


@dataclass(frozen=True)
class Motion:
    """How a call moves the samples: where they lie in each tensor of the result.

    Attributes:
        results: where the samples lie in each tensor of the result.
        aligned: arguments that do not depend on the batch, but have rows for each sample (a state made by
            `zeros(B, H)`, a learned token that was expanded to the batch): position among the tensors, and layout.
        depends_on_values: the motion was found from the values of the arguments, so it must not be kept.
        is_tried: the motion was found by trial, so it is observed and not known.
    """

    results: tuple[Where | None, ...]
    aligned: tuple[tuple[int, Layout], ...] = ()
    depends_on_values: bool = False
    is_tried: bool = False

    def get_aligned(self, position: int) -> Layout | None:
        """The layout of an argument in `aligned`, None if it is not there."""
        return dict(self.aligned).get(position)


def make_uniform_motion(where: Where | None, results: Sequence[Tensor]) -> Motion:
    """The motion with the same layout for each of the results."""
    return Motion(tuple(where for _ in results))
