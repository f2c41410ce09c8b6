"""Measure workloads. The results are plain data, which can be printed, drawn and written."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import growth, memory, timing
from benchmarks.check import CheckedEngine, check_engines
from benchmarks.engines import ENGINES, Engine, Plain
from benchmarks.workloads import Workload

Cell = dict[str, Any]  # of an engine and a quantity: measured numbers or {"failure": ...}, and a "note" if adapted
Table = dict[str, dict[str, Cell]]  # quantity -> engine -> cell

MAX_ROUNDS = {"gram": 3, "project": 3}  # no targets, and long times


def measure_workload(
    workload: Workload,
    engines: Sequence[type[Engine]],
    time_quantities: Sequence[str],
    memory_quantities: Sequence[str],
    rounds: int,
    budget: float = timing.TIME_BUDGET,
) -> tuple[Table, Table]:
    """Return the table of time and the table of memory. Only engines with correct results are measured."""
    quantities = [*time_quantities, *(q for q in memory_quantities if q not in time_quantities)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the peers
        checked = check_engines(workload, engines, quantities)
        times = {
            quantity: _measure_times(workload, quantity, checked, min(rounds, MAX_ROUNDS.get(quantity, rounds)), budget)
            for quantity in time_quantities
        }
    plain = _measure_peak(Plain, workload, "total", processes=3) if memory_quantities else {}
    peaks = {q: {Plain.name: plain, **_measure_peaks(workload, q, checked)} for q in memory_quantities}
    return times, peaks


def measure_growth(
    axes: dict[str, tuple[int, ...]], engines: Sequence[type[Engine]], quantities: Sequence[str], rounds: int
) -> Iterator[tuple[str, int, Table, Table]]:
    """Time and memory at each point of each axis. A workload that belongs to several axes is measured once."""
    measured: dict[Workload, tuple[Table, Table]] = {}
    for axis, value, workload in growth.list_points(axes):
        if workload not in measured:
            measured[workload] = measure_workload(workload, engines, quantities, quantities, rounds, growth.TIME_BUDGET)
        yield axis, value, *measured[workload]


def _measure_times(
    workload: Workload, quantity: str, checked: dict[str, CheckedEngine], rounds: int, budget: float
) -> dict[str, Cell]:
    cells = make_cells(quantity, checked)
    engines = [one.engine for name, one in checked.items() if is_correct(cells, name) and one.engine]
    for name, times in timing.measure_times(workload, quantity, engines, rounds, budget).items():
        cells[name] = {**cells.get(name, {}), **round_times(times)}
    return cells


def _measure_peaks(workload: Workload, quantity: str, checked: dict[str, CheckedEngine]) -> dict[str, Cell]:
    cells = make_cells(quantity, checked)
    for name, one in checked.items():
        if is_correct(cells, name):
            cells[name] |= _measure_peak(ENGINES[name], workload, quantity, adapted=bool(one.note))
    return cells


def _measure_peak(
    engine: type[Engine], workload: Workload, quantity: str, adapted: bool = False, processes: int = 1
) -> Cell:
    peak = memory.measure_peak(engine, workload, quantity, adapted, processes)
    return {"failure": peak} if isinstance(peak, str) else dataclasses.asdict(peak)


def make_cells(quantity: str, checked: dict[str, CheckedEngine]) -> dict[str, Cell]:
    """A cell for each engine that supports the quantity, with its failure and its note, if any."""
    cells = {}
    for name, one in checked.items():
        if quantity in one.failures:
            texts = {"failure": one.failures[quantity], "note": one.note}
            cells[name] = {key: text for key, text in texts.items() if text}
    return cells


def is_correct(cells: dict[str, Cell], name: str) -> bool:
    """Whether an engine has a cell without a failure."""
    return name in cells and "failure" not in cells[name]


def round_times(times: timing.Times) -> Cell:
    """The numbers of a cell."""
    return {
        "ratio": round(times.ratio, 4),
        "quartiles": [round(q, 4) for q in times.quartiles],
        "rounds": times.rounds,
        "milliseconds": round(times.milliseconds, 3),
    }
