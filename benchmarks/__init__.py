"""Timings of persample against a plain step: `python -m benchmarks`."""
