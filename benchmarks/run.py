"""Runs: what is measured for a workload, as plain data to print, draw and keep."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from benchmarks import growth, memory, timing
from benchmarks.check import Examined, examine
from benchmarks.engines import ENGINES, Engine, Plain
from benchmarks.workloads import WORKLOADS, Workload

Cell = dict[str, Any]  # of an engine and a quantity: figures, or {"failure": ...}; and perhaps a "note"
Table = dict[str, dict[str, Cell]]  # quantity -> engine -> cell

FEWER = {"gram": 3, "project": 3}  # rounds: no targets, and the largest times
REGRESSION_QUANTITIES = ("dense", "norms", "clip")


def measure(
    workload: Workload,
    engines: Sequence[type[Engine]],
    timed: Sequence[str],
    weighed: Sequence[str],
    rounds: int,
    patience: float = timing.PATIENCE,
) -> tuple[Table, Table]:
    """The tables of time and of memory, for the quantities of each; right answers only."""
    quantities = [*timed, *(quantity for quantity in weighed if quantity not in timed)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        found = examine(workload, engines, quantities)
        times = {q: _times(workload, q, found, min(rounds, FEWER.get(q, rounds)), patience) for q in timed}
    plain = _peak(Plain, workload, "total", processes=3) if weighed else {}
    peaks = {quantity: {Plain.name: plain, **_peaks(workload, quantity, found)} for quantity in weighed}
    return times, peaks


def _times(
    workload: Workload, quantity: str, found: dict[str, Examined], rounds: int, patience: float
) -> dict[str, Cell]:
    cells = _cells(quantity, found)
    running = [one.engine for name, one in found.items() if _works(cells, name) and one.engine]
    for name, times in timing.measure(workload, quantity, running, rounds, patience).items():
        cells[name] = {**cells.get(name, {}), **_rounded(dataclasses.asdict(times))}
    return cells


def _peaks(workload: Workload, quantity: str, found: dict[str, Examined]) -> dict[str, Cell]:
    cells = _cells(quantity, found)
    for name, one in found.items():
        if _works(cells, name):
            cells[name] |= _peak(ENGINES[name], workload, quantity, adapted=bool(one.note))
    return cells


def _peak(engine: type[Engine], workload: Workload, quantity: str, adapted: bool = False, processes: int = 1) -> Cell:
    found = memory.measure(engine, workload, quantity, adapted, processes)
    return {"failure": found} if isinstance(found, str) else dataclasses.asdict(found)


def _cells(quantity: str, found: dict[str, Examined]) -> dict[str, Cell]:
    """For each engine that gives the quantity: how it failed, if it did, and what it needed."""
    cells = {}
    for name, one in found.items():
        if quantity in one.failures:
            known = {"failure": one.failures[quantity], "note": one.note}
            cells[name] = {key: text for key, text in known.items() if text}
    return cells


def _works(cells: dict[str, Cell], name: str) -> bool:
    return name in cells and "failure" not in cells[name]


def _rounded(cell: Cell) -> Cell:
    return {
        "ratio": round(cell["ratio"], 4),
        "quartiles": [round(q, 4) for q in cell["quartiles"]],
        "rounds": cell["rounds"],
        "milliseconds": round(cell["milliseconds"], 3),
    }


def grow(
    quick: bool, engines: Sequence[type[Engine]], quantities: Sequence[str], rounds: int
) -> Iterator[tuple[str, int, Table, Table]]:
    """Time and memory at each point of each axis; where they meet, measured once."""
    known: dict[Workload, tuple[Table, Table]] = {}
    for axis, value, workload in growth.points(growth.QUICK_AXES if quick else growth.AXES):
        if workload not in known:
            known[workload] = measure(workload, engines, quantities, quantities, rounds, growth.PATIENCE)
        yield axis, value, *known[workload]


def regression(rounds: int, only: str = "") -> dict[str, dict[str, float]]:
    """Our ratios in the setting of the tests, one thread: workload -> quantity -> ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chosen = [workload for workload in WORKLOADS if only in workload.name]
        return {w.short: our_ratios(w, REGRESSION_QUANTITIES, rounds) for w in chosen}
    finally:
        torch.set_num_threads(threads)


def our_ratios(workload: Workload, quantities: Iterable[str], rounds: int) -> dict[str, float]:
    """Our time for each quantity over that of a plain step."""
    ours, found = ENGINES["ours"](workload), {}
    for quantity in quantities:
        ours.step(quantity)
        found[quantity] = round(timing.measure(workload, quantity, [ours], rounds)[ours.name].ratio, 4)
    return found
