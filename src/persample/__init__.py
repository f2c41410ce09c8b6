"""Per-sample gradients for PyTorch."""

from typing import TYPE_CHECKING, Any

from persample._version import __version__
from persample.checking import check
from persample.errors import PerSampleError, SamplesMixed
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads, implements_per_sample_grads
from persample.gradients import (
    LossGradients,
    PerSampleGradients,
    StreamedClip,
    StreamedNorms,
    release_memory,
    sample_labels,
)
from persample.penalties import differentiable_norms
from persample.recording.record import record
from persample.recording.watch import Watch, watch
from persample.rules import register_rule

if TYPE_CHECKING:
    from persample.compiled import CompiledStep, compile
    from persample.scanning import Scan, scan

__all__ = [
    "CompiledStep",
    "ExpandedWeight",
    "LossGradients",
    "PerSampleError",
    "PerSampleGradients",
    "SamplesMixed",
    "Scan",
    "StreamedClip",
    "StreamedNorms",
    "Watch",
    "__version__",
    "call_for_per_sample_grads",
    "check",
    "compile",
    "differentiable_norms",
    "implements_per_sample_grads",
    "record",
    "register_rule",
    "release_memory",
    "sample_labels",
    "scan",
    "watch",
]

# Imported when they are first asked for: scanning needs an extra, compiling needs many private names of torch.
_LAZY = {"CompiledStep": "compiled", "compile": "compiled", "Scan": "scanning", "scan": "scanning"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'persample' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"persample.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
