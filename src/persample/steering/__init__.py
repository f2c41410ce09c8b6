"""Steers a training run by the gradients of its examples: which to train on, how to sum them, how many to take.

Users import from here: `select` and `weighted_sum` choose examples of a pool; `normalise`, `trim`, `median_of_means`
and `avoid_conflicts` are weights of sums of rows; `AccumulationScheduler` sets the batch size by the noise scale.
"""

from persample.steering.accumulation import AccumulationScheduler
from persample.steering.aggregation import avoid_conflicts, median_of_means, normalise, trim
from persample.steering.selection import select, weighted_sum

__all__ = [
    "AccumulationScheduler",
    "avoid_conflicts",
    "median_of_means",
    "normalise",
    "select",
    "trim",
    "weighted_sum",
]
