"""Per-sample gradients for PyTorch."""

from persample.errors import PerSampleError, SamplesMixed
from persample.expanded_weights import ExpandedWeight, call_for_per_sample_grads, implements_per_sample_grads

__all__ = [
    "ExpandedWeight",
    "PerSampleError",
    "SamplesMixed",
    "call_for_per_sample_grads",
    "implements_per_sample_grads",
]
__version__ = "0.1.0"
