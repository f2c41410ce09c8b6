"""Watches a training run: gradient noise, norms, hard examples, what does not learn; values and dynamics of examples.

Users call `persample.monitor`, `persample.value` and `persample.dynamics`; the callbacks of trainers are in
`persample.monitoring.huggingface` and `persample.monitoring.lightning`. The command line uses `read_run` and
`write_page`, which need an extra (`persample[scan]`).
"""

from typing import TYPE_CHECKING

from persample._internal.lazy import find_lazily
from persample.monitoring.advice import Advice
from persample.monitoring.curves import Curves
from persample.monitoring.importance import ImportanceSampler
from persample.monitoring.learning import Dynamics, dynamics
from persample.monitoring.noise_scale import NoiseScale
from persample.monitoring.run import Monitor, monitor
from persample.monitoring.values import StepValues, Values, value

if TYPE_CHECKING:
    from persample.monitoring.page import read_run as read_run
    from persample.monitoring.page import write_page as write_page

__getattr__ = find_lazily(__name__, {"page": "read_run write_page"})

__all__ = [
    "Advice",
    "Curves",
    "Dynamics",
    "ImportanceSampler",
    "Monitor",
    "NoiseScale",
    "StepValues",
    "Values",
    "dynamics",
    "monitor",
    "value",
]
