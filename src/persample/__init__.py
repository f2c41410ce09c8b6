"""Per-sample gradients for PyTorch."""

from typing import TYPE_CHECKING, Any

from persample.checking import check
from persample.compiled import CompiledStep, compile
from persample.errors import PerSampleError, SamplesMixed
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads, implements_per_sample_grads
from persample.gradients import PerSampleGradients, release_memory
from persample.recording.record import record
from persample.recording.watch import Watch, watch
from persample.rules import register_rule

if TYPE_CHECKING:
    from persample.scanning import Scan, scan

__all__ = [
    "CompiledStep",
    "ExpandedWeight",
    "PerSampleError",
    "PerSampleGradients",
    "SamplesMixed",
    "Scan",
    "Watch",
    "call_for_per_sample_grads",
    "check",
    "compile",
    "implements_per_sample_grads",
    "record",
    "register_rule",
    "release_memory",
    "scan",
    "watch",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What needs an extra is imported when it is asked for."""
    if name in ("Scan", "scan"):
        from persample import scanning

        return getattr(scanning, name)
    raise AttributeError(f"module 'persample' has no attribute '{name}'")
