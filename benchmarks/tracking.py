"""What it costs to follow the samples, on the steps after the first: `python -m benchmarks.tracking`.

A forward pass in a recording does what a plain one does, and beside it follows the samples and taps the uses of
weights. The difference between the two, in the same round, is given as a share of a plain step (forward and backward).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import persample
from benchmarks.workloads import WORKLOADS, loss_of

RESULT = Path(__file__).parent / "results" / "tracking.json"


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def overhead(name: str, rounds: int) -> dict[str, float | str | int]:
    model, x, y = next(w for w in WORKLOADS if w.name == name).make()

    def recorded() -> None:
        with persample.record(model):
            loss_of(model(x), y)

    def step() -> None:
        loss_of(model(x), y).backward()

    first = seconds(recorded)
    shares = []
    for _ in range(rounds):
        plain = seconds(lambda: loss_of(model(x), y))
        shares.append((seconds(recorded) - plain) / seconds(step))
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        "workload": name, "rounds": rounds, "share of a plain step": round(middle, 4),
        "quartiles": f"{low:.4f} {high:.4f}", "first forward, seconds": round(first, 3),
        "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--write", action="store_true", help=f"write the result to {RESULT.name}")
    options = parser.parse_args()
    results = [overhead(w.name, options.rounds) for w in WORKLOADS if w.name.startswith("GPT")]
    print(json.dumps(results, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
