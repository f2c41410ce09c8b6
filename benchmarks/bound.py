"""Search for a sample above the bound of private training.

    python -m benchmarks.bound [--tries 2000] [--seed 0] [--json benchmarks/results/bound.json]

Each try draws a model, a loss, a dtype, options of private training and an adversarial sample
(`tests/support/bound.py`), and measures the change of the private sum by this sample, as a multiple of the bound.
Hypothesis draws half of the tries at random, and varies the worst ones in the other half. Prints all changes above the
bound, and the largest one of each dtype. Ends with an error if one exceeds the bound by more than 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as set_seed

from benchmarks.machine import describe_machine
from benchmarks.output import write_json
from tests.support.attempts import ATTEMPTS
from tests.support.bound import Attempt, measure_change

ALLOWED = 1 + 1e-4


def search(tries: int, seed: int) -> dict[str, Any]:
    """The number of tries, those above the bound, and the worst one of each dtype."""
    worst: dict[str, tuple[float, Attempt]] = {}
    found: list[dict[str, Any]] = []
    made = 0

    @set_seed(seed)
    @settings(
        max_examples=tries,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.target],
        suppress_health_check=list(HealthCheck),
    )
    @given(ATTEMPTS)
    def attack(attempt: Attempt) -> None:
        nonlocal made
        made += 1
        change = measure_change(attempt)
        if not change <= ALLOWED:
            found.append({"change": change, **asdict(attempt)})
            print("above the bound:", found[-1], flush=True)
        if not change <= worst.get(attempt.dtype, (0.0, attempt))[0]:
            worst[attempt.dtype] = change, attempt
        target(change if change < float("inf") else 1e9, label=attempt.dtype)

    attack()
    largest = {dtype: {"change": change, **asdict(attempt)} for dtype, (change, attempt) in sorted(worst.items())}
    return {"tries": made, "above the bound": found, "worst": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=2000, help="number of samples (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = search(options.tries, options.seed)
    print(f"{results['tries']} tries, {len(results['above the bound'])} above the bound. The largest changes:")
    for dtype, worst in results["worst"].items():
        print(f"  {dtype}: {worst['change']:.7f} of the bound: {worst}")
    if options.json:
        write_json(options.json, {"machine": describe_machine(), "seed": options.seed, **results})
    sys.exit(bool(results["above the bound"]))


if __name__ == "__main__":
    main()
