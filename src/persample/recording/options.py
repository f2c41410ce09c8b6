"""What can be asked of a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from persample.errors import PerSampleError

# One dim for all arguments, or one for each, by position or name; None: its tensors are the same for all samples.
BatchDim = int | Sequence[int | None] | Mapping[str | int, int | None]

Chosen = Iterable[str] | Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Options:
    """What a recording is asked for; see `record`."""

    batch_size: int | None = None
    batch_dim: BatchDim = 0
    loss_reduction: str = "mean"
    parameters: Chosen | None = None
    keep_grad: bool = False
    keep: Literal["everything", "norms", "clip"] = "everything"
    max_norm: float | Mapping[str, float] | None = None
    stabiliser: float | None = None
    passes: Literal[1, 2] | None = None
    memory: int = 2**30

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise PerSampleError(f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}")
        if self.keep not in ("everything", "norms", "clip"):
            raise PerSampleError(f"keep must be 'everything', 'norms' or 'clip', got {self.keep!r}")
        if self.passes not in (None, 1, 2) or (self.passes and self.keep != "clip"):
            raise PerSampleError(f"passes is 1 or 2 and goes with keep='clip', got {self.passes}")
        bounds = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        if any(bound is not None and not bound > 0 for bound in bounds):
            raise PerSampleError(f"max_norm must be positive, got {self.max_norm}")
        if (self.max_norm is not None) != (self.keep == "clip"):
            raise PerSampleError("max_norm goes with keep='clip', and keep='clip' with a max_norm")
        if self.stabiliser is not None and not (self.keep == "clip" and self.stabiliser > 0):
            raise PerSampleError(f"stabiliser is positive and goes with keep='clip', got {self.stabiliser}")


def trainable_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by their names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def chosen(trainable: Mapping[str, Tensor], parameters: Chosen | None) -> Mapping[str, Tensor]:
    """The parameters that are to be recorded."""
    if parameters is None:
        return trainable
    if callable(parameters):
        return {name: p for name, p in trainable.items() if parameters(name, p)}
    names = [parameters] if isinstance(parameters, str) else list(parameters)
    for name in names:
        if name not in trainable:
            raise PerSampleError(f"'{name}' is no trainable parameter of the model")
    wanted = set(names)
    return {name: p for name, p in trainable.items() if name in wanted}
