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
from persample.recording.rows import rows
from persample.recording.watch import Watch, watch
from persample.rules import register_rule

if TYPE_CHECKING:
    from persample.compiled import CompiledStep, compile
    from persample.monitoring import ImportanceSampler, Monitor, monitor
    from persample.scanning import Scan, evaluate, scan

__all__ = [
    "CompiledStep",
    "ExpandedWeight",
    "ImportanceSampler",
    "LossGradients",
    "Monitor",
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
    "evaluate",
    "implements_per_sample_grads",
    "monitor",
    "record",
    "register_rule",
    "release_memory",
    "rows",
    "sample_labels",
    "scan",
    "watch",
]

# Imported when they are first asked for: scanning needs an extra, compiling needs many private names of torch.
_LAZY = {
    "CompiledStep": "compiled",
    "ImportanceSampler": "monitoring",
    "Monitor": "monitoring",
    "Scan": "scanning",
    "compile": "compiled",
    "evaluate": "scanning",
    "monitor": "monitoring",
    "scan": "scanning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'persample' has no attribute '{name}'")
    from importlib import import_module

    try:
        return getattr(import_module(f"persample.{_LAZY[name]}"), name)
    except ImportError as error:  # an extra is missing: say so at use, so that `hasattr` and `dir` work without it
        return _make_missing(name, error)


def _make_missing(name: str, error: ImportError) -> Any:
    def fail(*args: Any, **options: Any) -> Any:
        raise ImportError(str(error), name=error.name) from error

    fail.__name__ = fail.__qualname__ = name
    fail.__doc__ = str(error)
    return fail


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
