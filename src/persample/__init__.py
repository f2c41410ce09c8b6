"""Per-sample gradients for PyTorch."""

from typing import TYPE_CHECKING, Any

from persample._version import __version__

if TYPE_CHECKING:
    from persample.checking import check
    from persample.compiled import CompiledStep, compile
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
    from persample.monitoring import Dynamics, ImportanceSampler, Monitor, Values, dynamics, monitor, value
    from persample.penalties import differentiable_norms
    from persample.recording import Watch, record, rows, watch
    from persample.rules import register_rule
    from persample.scanning import Scan, evaluate, replay, scan

__all__ = [
    "CompiledStep",
    "Dynamics",
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
    "Values",
    "Watch",
    "__version__",
    "call_for_per_sample_grads",
    "check",
    "compile",
    "differentiable_norms",
    "dynamics",
    "evaluate",
    "implements_per_sample_grads",
    "monitor",
    "record",
    "register_rule",
    "release_memory",
    "replay",
    "rows",
    "sample_labels",
    "scan",
    "value",
    "watch",
]

# The module of each public name. It is imported when the name is first asked for: torch takes seconds, which
# `persample --help` should not wait for, and scanning needs an extra.
_MODULES = {
    "CompiledStep": "compiled",
    "Dynamics": "monitoring",
    "ExpandedWeight": "expanded_weights",
    "ImportanceSampler": "monitoring",
    "LossGradients": "gradients",
    "Monitor": "monitoring",
    "PerSampleError": "errors",
    "PerSampleGradients": "gradients",
    "SamplesMixed": "errors",
    "Scan": "scanning",
    "StreamedClip": "gradients",
    "StreamedNorms": "gradients",
    "Values": "monitoring",
    "Watch": "recording",
    "call_for_per_sample_grads": "expanded_weights",
    "check": "checking",
    "compile": "compiled",
    "differentiable_norms": "penalties",
    "dynamics": "monitoring",
    "evaluate": "scanning",
    "implements_per_sample_grads": "expanded_weights",
    "monitor": "monitoring",
    "record": "recording",
    "register_rule": "rules",
    "release_memory": "gradients",
    "replay": "scanning",
    "rows": "recording",
    "sample_labels": "gradients",
    "scan": "scanning",
    "value": "monitoring",
    "watch": "recording",
}

# If their extra is missing, the error comes at use, so that `hasattr` and `dir` work without it.
_EXTRAS = {"monitoring", "scanning"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'persample' has no attribute '{name}'")
    from importlib import import_module

    try:
        value = getattr(import_module(f"persample.{_MODULES[name]}"), name)
    except ImportError as error:
        if _MODULES[name] not in _EXTRAS:
            raise
        return _make_missing(name, error)
    return globals().setdefault(name, value)


def _make_missing(name: str, error: ImportError) -> Any:
    def fail(*args: Any, **options: Any) -> Any:
        raise ImportError(str(error), name=error.name) from error

    fail.__name__ = fail.__qualname__ = name
    fail.__doc__ = str(error)
    return fail


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
