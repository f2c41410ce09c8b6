"""Processor time and memory of correlated noise: drawn again, or kept. `python -m benchmarks.correlated`.

Noise that is kept has a copy of the parameters in float32 for each earlier step of the band.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import torch

from persample.private import BandedInverse, BandedMatrix
from persample.private.correlated import CorrelatedNoise, make_noise
from persample.private.noise import Noise
from persample.private.strategies import Strategy


class RingNoise(CorrelatedNoise):
    """Keeps the independent noise of the last steps instead of drawing it again."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy.taps)
        self._ring: deque[torch.Tensor] = deque(maxlen=len(self._taps))

    def add_to(self, totals: list[torch.Tensor], std: float) -> None:  # type: ignore[override]
        (total,) = totals
        self._draws += 1
        fresh = torch.zeros_like(total)
        self._add_draw([fresh], 1.0, self._draws)
        self._ring.appendleft(fresh)
        for tap, row in zip(self._taps, self._ring, strict=False):
            total.add_(row, alpha=std * tap)


def make_noises(bands: int) -> dict[str, Noise]:
    inverse = BandedInverse(2000, 100, bands)
    return {
        "drawn again": make_noise(inverse),
        "kept": RingNoise(inverse),
        "banded matrix (kept)": make_noise(BandedMatrix(2000, 100, bands)),
    }


def measure(noises: dict[str, Noise], size: int, rounds: int) -> dict[str, float]:
    """Median processor time of a step in seconds, in turns, with full bands."""
    total = torch.zeros(size)
    for noise in noises.values():
        for _ in range(17):
            noise.add_to([total], 1.0)
    times: dict[str, list[float]] = {name: [] for name in noises}
    for _ in range(rounds):
        for name, noise in noises.items():
            start = time.process_time()
            noise.add_to([total], 1.0)
            times[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2_000_000, help="number of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    alone = measure({"independent": Noise()}, given.size, given.rounds)["independent"]
    print(f"{given.size:,} parameters; independent noise {1e3 * alone:.1f} ms")
    for bands in (2, 4, 8, 16):
        for name, seconds in measure(make_noises(bands), given.size, given.rounds).items():
            kept = 0 if name == "drawn again" else (bands - 1 + (name == "kept")) * 4 * given.size
            print(f"bands {bands:2d}  {name:22s} {1e3 * seconds:7.1f} ms  {kept / 2**20:7.0f} MiB")


if __name__ == "__main__":
    main()
