"""How often audits find planted faults, and how often they find one in right trainings.

    python -m benchmarks.audits [--right 100] [--faults 10] [--json benchmarks/results/audits.json]

Right trainings have random settings (`tests/support/audited.py`); the faults are those of
`tests/support/planted_faults.py`, each planted into several trainings. All audits have their default settings, with one
run. Ends with an error if a right training is accused.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.machine import describe_machine
from benchmarks.output import write_json
from persample.private import AuditResult, audit
from tests.support.audited import Training, draw_training
from tests.support.planted_faults import FAULTS


def audit_right_trainings(count: int) -> dict[str, Any]:
    """Trainings with settings of the seeds 0, 1, 2, ...; their noise and batches differ in each run of this program."""
    accused, times = [], []
    made: Counter[str] = Counter()
    for seed in range(count):
        training = draw_training(torch.Generator().manual_seed(seed))
        result, seconds = measure(training)
        times.append(seconds)
        made.update(test.name for test in result.tests)
        if result.exceeds:
            accused.append(f"{training}: {', '.join(test.name for test in result.failed)}")
            print(f"accused: {training}\n{result}", flush=True)
    return {"audits": count, "accused": accused, "tests": dict(made), "seconds": [min(times), max(times)]}


def audit_faults(count: int) -> dict[str, Any]:
    """By fault: in how many trainings an audit has found it, and in how many of them by the test that it is for."""
    found = {}
    for fault, plant in FAULTS.items():
        results = []
        is_large = "small batches" in fault
        for seed in range(count):
            training = Training(
                size=1000 if is_large else (256, 1000)[seed % 2],
                steps=10 if is_large else (4, 8, 20)[seed % 3],
                noise=(0.7, 1.0, 3.0)[seed % 3],
                examples_per_unit=2 if "units" in fault else 1,
            )
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                results.append(measure(training)[0])
        name = fault.partition(" (")[0]
        found[fault] = {
            "audits": count,
            "found": sum(result.exceeds for result in results),
            "by its test": sum(name in [test.name for test in result.failed] for result in results),
        }
        print(fault, found[fault], flush=True)
    return found


def measure(training: Training) -> tuple[AuditResult, float]:
    """The result of an audit, and the time of the processor for the audit with its training."""
    start = time.process_time()
    result = audit(training)
    return result, round(time.process_time() - start, 3)


def main() -> None:
    """Run the audits, and write a table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--right", type=int, default=100, help="number of right trainings")
    parser.add_argument("--faults", type=int, default=10, help="number of trainings for each fault")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of Opacus
    right = audit_right_trainings(args.right)
    print(right, flush=True)
    result = {"machine": describe_machine(), "right": right, "faults": audit_faults(args.faults)}
    if args.json:
        write_json(args.json, result)
    if right["accused"]:
        sys.exit("A right training was accused.")


if __name__ == "__main__":
    main()
