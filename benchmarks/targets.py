"""Targets: upper bounds for the time and memory of persample."""

from __future__ import annotations

# Time of a step as a ratio to a plain forward and backward, on 2 cores: workload -> quantity -> upper bound.
TIME: dict[str, dict[str, float]] = {
    "MLP": {"dense": 8, "norms": 0.9, "clip": 1.1},
    "CNN": {"dense": 1.25, "norms": 1.2, "clip": 1.25},
    "ResNet": {"dense": 1.5, "norms": 1.25, "clip": 1.3},
    "depthwise": {"dense": 1.1, "norms": 1.1, "clip": 1.15},
    "GPT T 64": {"dense": 1.1, "norms": 0.95, "clip": 1.05},
    "GPT T 512": {"dense": 1.02, "norms": 1.0, "clip": 1.03},
    "LSTM": {"dense": 2.5, "norms": 2, "clip": 2},
    "bag of words": {"dense": 15, "norms": 1.5, "clip": 1.7},
}

# Peak memory as a ratio to a plain step: engine -> quantity -> upper bound.
MEMORY: dict[str, dict[str, float]] = {
    "ours": {"norms": 1.15, "clip": 1.5},
    "ours, 2 passes": {"clip": 1.15},
}

# Dense rows: upper bound of (peak memory - peak memory of a plain step) / size of the rows.
DENSE_MEMORY = 1.25

# Time of a private training step as a ratio to a plain training step: workload -> upper bound.
PRIVATE_TIME = {"GPT T 64": 1.15, "CNN": 1.25, "MLP": 1.4}

# Time of the clipped sum with changing shapes and in the first step, and host time, over plain steps, on one thread.
VARIED_TIME = {"varied shapes": 1.6, "first step": 2.5}
HOST_TIME = {"MLP": 2.0, "ResNet, 66 parameters": 1.8, "GPT, 12 layers": 1.8}

# Resident memory of the first two steps of a process, clipped sum over plain steps: workload -> upper bound.
FIRST_STEPS_MEMORY = {"GPT T 64": 1.3, "CNN": 1.5, "bag of words": 2.0}

# A GPT-2 with 124 million parameters: time and peak memory of a step as ratios to a plain step.
LARGE_TIME = {"norms": 0.95, "clip": 1.15, 'keep="clip"': 1.15, "private": 1.2, "first private step": 1.5}
LARGE_MEMORY = {"norms": 1.1, "clip": 1.1, 'keep="clip"': 1.1, "private": 1.1}
