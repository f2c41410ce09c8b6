"""Per-sample gradients for PyTorch."""

from persample.buffers import release_memory
from persample.checking import check
from persample.compiled import CompiledStep, compile
from persample.errors import PerSampleError, SamplesMixed
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads, implements_per_sample_grads
from persample.gradients import PerSampleGradients
from persample.record import record
from persample.rules import rule as register_rule
from persample.watch import Watch, watch

__all__ = [
    "CompiledStep",
    "ExpandedWeight",
    "PerSampleError",
    "PerSampleGradients",
    "SamplesMixed",
    "Watch",
    "call_for_per_sample_grads",
    "check",
    "compile",
    "implements_per_sample_grads",
    "record",
    "register_rule",
    "release_memory",
    "watch",
]
__version__ = "0.1.0"
