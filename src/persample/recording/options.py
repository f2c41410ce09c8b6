"""What a recording can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients.clipping import Bound

Keep = Literal["everything", "norms", "clip"]

# Which parameters to record: names, or a predicate of name and parameter.
Selection = Iterable[str] | Callable[[str, Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `record`, checked."""

    batch_size: int | None = None
    batch_dim: BatchDim = 0
    loss_reduction: str = "mean"
    parameters: Selection | None = None
    keep_grad: bool = False
    keep: Keep = "everything"
    max_norm: float | Mapping[str, float] | None = None
    stabiliser: float | None = None
    passes: Literal[1, 2] | None = None
    memory: int = 2**30

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise PerSampleError(f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}.")
        if self.keep not in ("everything", "norms", "clip"):
            raise PerSampleError(f"keep must be 'everything', 'norms' or 'clip', got {self.keep!r}.")
        if self.passes not in (None, 1, 2) or (self.passes and self.keep != "clip"):
            raise PerSampleError(f"passes must be 1 or 2 and requires keep='clip', got {self.passes}.")
        bounds = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        if any(bound is not None and not bound > 0 for bound in bounds):
            raise PerSampleError(f"max_norm must be positive, got {self.max_norm}.")
        if (self.max_norm is not None) != (self.keep == "clip"):
            raise PerSampleError("keep='clip' requires max_norm, and max_norm requires keep='clip'.")
        if self.stabiliser is not None and not (self.keep == "clip" and self.stabiliser > 0):
            raise PerSampleError(f"stabiliser must be positive and requires keep='clip', got {self.stabiliser}.")

    @property
    def bound(self) -> Bound | None:
        """How to clip, None without `keep="clip"`."""
        if self.max_norm is None:
            return None
        return Bound(self.max_norm, self.stabiliser, self.passes, self.memory)

    def select(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The parameters of the model to record, by name."""
        trainable = get_trainable(model)
        if self.parameters is None:
            return trainable
        if callable(self.parameters):
            return {name: p for name, p in trainable.items() if self.parameters(name, p)}
        names = {self.parameters} if isinstance(self.parameters, str) else set(self.parameters)
        unknown = sorted(names - trainable.keys())
        if unknown:
            raise PerSampleError(f"parameters names '{unknown[0]}', which is not a trainable parameter of the model.")
        return {name: p for name, p in trainable.items() if name in names}


def get_trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
