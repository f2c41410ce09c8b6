"""Per-sample gradients for PyTorch."""

from persample.errors import PerSampleError, SamplesMixed
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads, implements_per_sample_grads
from persample.gradients import PerSampleGradients
from persample.record import record

__all__ = [
    "ExpandedWeight",
    "PerSampleError",
    "PerSampleGradients",
    "SamplesMixed",
    "call_for_per_sample_grads",
    "implements_per_sample_grads",
    "record",
]
__version__ = "0.1.0"
