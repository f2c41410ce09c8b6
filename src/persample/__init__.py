"""Per-sample gradients for PyTorch."""

from persample.checking import check
from persample.errors import PerSampleError, SamplesMixed
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads, implements_per_sample_grads
from persample.gradients import PerSampleGradients
from persample.record import record
from persample.rules import rule as register_rule

__all__ = [
    "ExpandedWeight",
    "PerSampleError",
    "PerSampleGradients",
    "SamplesMixed",
    "call_for_per_sample_grads",
    "check",
    "implements_per_sample_grads",
    "record",
    "register_rule",
]
__version__ = "0.1.0"
