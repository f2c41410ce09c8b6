"""Time and memory of persample and its peers against a plain step: `python -m benchmarks`."""
