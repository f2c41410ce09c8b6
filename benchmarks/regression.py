"""Compare our ratios to a plain step with the published ones: `python -m benchmarks --check`.

The unit tests have no time limits. This check belongs to a quiet machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks import run
from benchmarks.workloads import WORKLOADS, Workload

ALLOWED = 2.0  # times the published ratio
ROUNDS = 3
MORE_ROUNDS = 11  # to confirm a slowdown

Ratios = dict[str, float]  # by quantity


def read_published(directory: Path) -> dict[str, Ratios]:
    """The published ratios: workload -> quantity -> ratio."""
    ratios: dict[str, Ratios] = json.loads((directory / "regression.json").read_text())["ratios"]
    return ratios


def find_slowdowns(published: Mapping[str, Ratios], only: str = "") -> dict[str, Ratios]:
    """The measured ratios that are larger than `ALLOWED` times the published ones, on one thread."""
    chosen = [workload for workload in WORKLOADS if only.lower() in f"{workload.name} {workload.short}".lower()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {workload.short: confirm_slowdowns(workload, published[workload.short]) for workload in chosen}
    finally:
        torch.set_num_threads(threads)
    return {name: ratios for name, ratios in found.items() if ratios}


def confirm_slowdowns(workload: Workload, published: Ratios, measure: Callable[..., Ratios] = run.our_ratios) -> Ratios:
    """Measure a workload; measure the quantities that are too slow once more, with more rounds."""
    slow = _select_slow(published, measure(workload, published, ROUNDS))
    return _select_slow(published, measure(workload, slow, MORE_ROUNDS)) if slow else {}


def _select_slow(published: Ratios, measured: Ratios) -> Ratios:
    return {quantity: ratio for quantity, ratio in measured.items() if ratio > ALLOWED * published[quantity]}
