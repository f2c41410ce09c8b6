"""The expanded-weights interface: `call_for_per_sample_grads`, the tensor behind it, and its extension point."""

from persample.expanded_weights.call import call_for_per_sample_grads
from persample.expanded_weights.helpers import (
    forward_helper,
    implements_per_sample_grads,
    is_batch_first,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from persample.expanded_weights.tensor import ExpandedWeight
from persample.rules import HANDLED_FUNCTIONS

__all__ = [
    "HANDLED_FUNCTIONS",
    "ExpandedWeight",
    "call_for_per_sample_grads",
    "forward_helper",
    "implements_per_sample_grads",
    "is_batch_first",
    "set_grad_sample_if_exists",
    "standard_kwargs",
    "sum_over_all_but_batch_and_last_n",
    "unpack_expanded_weight_or_tensor",
]
