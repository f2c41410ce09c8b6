"""Watches a training run: gradient noise, norms by layer, hard examples; advice on batch size and bound.

Users call `persample.monitor`; the callbacks of trainers are in `persample.monitoring.huggingface` and
`persample.monitoring.lightning`. The command line uses `page`. Only the page needs an extra (`persample[scan]`).
"""

from persample.monitoring.advice import Advice
from persample.monitoring.importance import ImportanceSampler
from persample.monitoring.noise_scale import NoiseScale
from persample.monitoring.run import Monitor, monitor

__all__ = ["Advice", "ImportanceSampler", "Monitor", "NoiseScale", "monitor"]
