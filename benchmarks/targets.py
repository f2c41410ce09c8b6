"""What is to be reached, in one place."""

from __future__ import annotations

# Time over that of a plain forward and backward, on 2 cores: workload -> quantity -> at most.
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

# Peak memory over that of a plain step: engine -> quantity -> at most.
MEMORY: dict[str, dict[str, float]] = {
    "ours": {"norms": 1.15, "clip": 1.5},
    "ours, 2 passes": {"clip": 1.15},
}

# Peak memory of dense rows, beyond what a plain step takes, over the size of the rows themselves: at most.
DENSE_MEMORY = 1.25
