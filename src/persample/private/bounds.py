"""How the gradients of samples are clipped, and the bounds of single parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from persample.gradients import LEAST_BOUND
from persample.private.errors import PrivateTrainingError

KINDS = ("flat", "per_layer", "automatic")
AUTOMATIC_STABILISER = 0.01  # from Bu et al. (2023); its value has little effect on their results


class Bounds:
    """The kind of clipping, the names of the parameters, and with "per_layer" their bounds.

    Args:
        kind: "flat", "per_layer" or "automatic", see `PrivateOptimizer`.
        module: the module whose parameters are clipped.
        params: the trainable parameters of the optimizer.
        given: the bound, or with "per_layer" those of the parameters, in the order of `params`.

    Attributes:
        total: the bound of the whole gradient of a sample.

    >>> model = nn.Linear(3, 2)
    >>> Bounds("per_layer", model, list(model.parameters()), [3.0, 4.0]).total
    5.0
    """

    def __init__(self, kind: str, module: nn.Module, params: Sequence[Tensor], given: float | Sequence[float]) -> None:
        if kind not in KINDS:
            raise PrivateTrainingError(f"clipping must be one of {KINDS}, got {kind!r}")
        self._kind = kind
        self._names = {id(p): name for name, p in module.named_parameters()}
        self.list_names(params)
        self._by_id: dict[int, float] = {}
        if kind == "per_layer":
            self._by_id = _map_bounds(params, given)
            self.total = math.hypot(*self._by_id.values())
        elif isinstance(given, (int, float)):
            self.total = given
        else:
            raise PrivateTrainingError(f"clipping={kind!r} requires one number as max_grad_norm, got {given}")

    def list_names(self, params: Sequence[Tensor]) -> list[str]:
        """The names of parameters."""
        if any(id(p) not in self._names for p in params):
            raise PrivateTrainingError("The optimizer has parameters that do not belong to the module.")
        return [self._names[id(p)] for p in params]

    def get_name(self, p: Tensor) -> str:
        """The name of a parameter."""
        return self._names[id(p)]

    def rename(self, around: nn.Module) -> None:
        """Use the names that the parameters have in a module around the module."""
        self._names = {id(p): name for name, p in around.named_parameters()}

    def make_options(self, bound: float, loss_divisor: float) -> Mapping[str, Any]:
        """Options of `record` for a bound of the whole gradient, of rows of which each is divided by `loss_divisor`."""
        bound = bound / loss_divisor
        scale = math.hypot(*self._by_id.values())
        by_name = {self._names[key]: part * bound / scale for key, part in self._by_id.items()}
        return {
            "max_norm": by_name or bound,
            "stabiliser": AUTOMATIC_STABILISER / loss_divisor if self._kind == "automatic" else None,
        }


def _map_bounds(params: Sequence[Tensor], bounds: float | Sequence[float]) -> dict[int, float]:
    """Bound of each parameter by its id."""
    if isinstance(bounds, (int, float)) or len(bounds) != len(params):
        raise PrivateTrainingError(
            "clipping='per_layer' requires a list as max_grad_norm, with one bound for each of the "
            f"{len(params)} trainable parameters of the optimizer, got {bounds}"
        )
    if not min(bounds, default=LEAST_BOUND) >= LEAST_BOUND:
        raise PrivateTrainingError(f"Each of the bounds must be at least {LEAST_BOUND}, got {min(bounds)}.")
    return {id(p): float(bound) for p, bound in zip(params, bounds, strict=True)}
