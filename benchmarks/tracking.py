"""Cost of tracking the samples, after the first step: `python -m benchmarks.tracking`.

The forward pass of a recording does the work of a plain forward pass; in addition, it tracks the samples and taps the
uses of weights. The difference between the two, in the same round, is given as a share of a plain step (forward and
backward).
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch

import persample
from benchmarks.output import RESULTS, write_json
from benchmarks.timing import compute_quartiles, time_call, time_in_turns
from benchmarks.workloads import Workload, compute_loss, select_workloads

RESULT = RESULTS / "tracking.json"


def measure_overhead(workload: Workload, rounds: int) -> dict[str, float | str | int]:
    """Measure the additional time of a recorded forward pass."""
    model, x, labels = workload.make()

    def run_forward() -> None:
        compute_loss(model(x), labels)

    def record_forward() -> None:
        with persample.record(model):
            compute_loss(model(x), labels)

    def run_step() -> None:
        compute_loss(model(x), labels).backward()

    first = time_call(record_forward)
    functions = {"plain": run_forward, "recorded": record_forward, "step": run_step}
    timers = {name: partial(time_call, function) for name, function in functions.items()}
    times = time_in_turns(timers, rounds, warm_up=0)
    shares = [
        (recorded - plain) / step
        for plain, recorded, step in zip(times["plain"], times["recorded"], times["step"], strict=True)
    ]
    low, median, high = compute_quartiles(shares)
    return {
        "workload": workload.name,
        "rounds": rounds,
        "share of a plain step": round(median, 4),
        "quartiles": f"{low:.4f} {high:.4f}",
        "first forward, seconds": round(first, 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args()
    results = [measure_overhead(workload, options.rounds) for workload in select_workloads("GPT")]
    print(json.dumps(results, indent=1))
    if options.write:
        write_json(RESULT, results)


if __name__ == "__main__":
    main()
