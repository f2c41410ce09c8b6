"""Ratios of persample to a plain step, on one thread: measure them, and compare them with the published ones.

`python -m benchmarks --regression` writes the published ratios. `python -m benchmarks --check` measures them again and
fails if one is much larger. The check needs a quiet machine, so it is not one of the unit tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.engines import ENGINES
from benchmarks.timing import measure_times
from benchmarks.workloads import Workload, select_workloads

QUANTITIES = ("dense", "norms", "clip")
ALLOWED = 2.0  # times the published ratio
ROUNDS = 3
MORE_ROUNDS = 11  # to confirm a slowdown

Ratios = dict[str, float]  # by quantity


def read_published(directory: Path) -> dict[str, Ratios]:
    """The published ratios: workload -> quantity -> ratio."""
    ratios: dict[str, Ratios] = json.loads((directory / "regression.json").read_text())["ratios"]
    return ratios


def measure_all(rounds: int, only: str = "") -> dict[str, Ratios]:
    """Measure the ratios of the workloads with `only` in their name: workload -> quantity -> ratio."""
    with _use_one_thread():
        return {workload.short: measure_ratios(workload, QUANTITIES, rounds) for workload in select_workloads(only)}


def measure_ratios(workload: Workload, quantities: Iterable[str], rounds: int) -> Ratios:
    """Time of persample for each quantity as a ratio to a plain step."""
    ours, ratios = ENGINES["ours"](workload), {}
    for quantity in quantities:
        ours.step(quantity)  # warm up
        ratios[quantity] = round(measure_times(workload, quantity, [ours], rounds)[ours.name].ratio, 4)
    return ratios


def find_slowdowns(published: Mapping[str, Ratios], only: str = "") -> dict[str, Ratios]:
    """The measured ratios that are larger than `ALLOWED` times the published ones."""
    with _use_one_thread():
        slowdowns = {w.short: confirm_slowdowns(w, published[w.short]) for w in select_workloads(only)}
    return {name: ratios for name, ratios in slowdowns.items() if ratios}


def confirm_slowdowns(workload: Workload, published: Ratios, measure: Callable[..., Ratios] = measure_ratios) -> Ratios:
    """Measure a workload; measure the quantities that are too slow once more, with more rounds."""
    slow = _select_slow(published, measure(workload, published, ROUNDS))
    return _select_slow(published, measure(workload, slow, MORE_ROUNDS)) if slow else {}


def _select_slow(published: Ratios, measured: Ratios) -> Ratios:
    return {quantity: ratio for quantity, ratio in measured.items() if ratio > ALLOWED * published[quantity]}


@contextmanager
def _use_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
