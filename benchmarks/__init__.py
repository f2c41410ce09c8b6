"""Time and memory of persample and its peers relative to a plain step: `python -m benchmarks`."""
