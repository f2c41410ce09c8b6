"""Time and memory of per-sample gradients against a plain forward and backward, for persample and its peers.

Without options everything is measured, which takes some 20 minutes, and written to benchmarks/results.
Naming parts measures these only. A restricted run (--quick, --only, --quantities, --engines, --rounds) writes nothing
unless it is told where to.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import growth, regression, report, run, timing
from benchmarks.engines import ENGINES, QUANTITIES
from benchmarks.machine import machine
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results"
PARTS = ("time", "memory", "growth", "regression", "plot")
WEIGHED = ("dense", "norms", "clip")  # what peak memory is measured for, by default
QUICK_ROUNDS = 3
GROWTH_ROUNDS = 5
REGRESSION_ROUNDS = 9


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """What was asked on the command line, with the defaults filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_argument_group("parts (all of them, unless some are named)")
    parts.add_argument("--time", action="store_true", help="ratios to plain, engines interleaved in one process")
    parts.add_argument("--memory", action="store_true", help="peak memory, in a process for each engine and quantity")
    parts.add_argument("--growth", action="store_true", help="both, with the batch, length, width and vocabulary")
    parts.add_argument("--regression", action="store_true", help="our ratios on one thread, which --check compares to")
    parts.add_argument("--plot", action="store_true", help="pictures of what the results directory holds")
    check = (
        f"fail if a ratio of ours on one thread is {regression.ALLOWED:g} times the published one; measure nothing else"
    )
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, and {', '.join(WEIGHED)} only")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name contains this")
    parser.add_argument("--quantities", type=_names(QUANTITIES), metavar="A,B", help=f"of {', '.join(QUANTITIES)}")
    parser.add_argument("--engines", type=_names(ENGINES), metavar="A,B", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help=f"of timing; {timing.ROUNDS} by default, fewer for slow engines")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="where to write JSON and pictures")
    options = parser.parse_args(arguments)
    options.parts = [part for part in PARTS if getattr(options, part)] or list(PARTS)
    restricted = any((options.quick, options.only, options.quantities, options.engines, options.rounds))
    if options.output is None and not restricted:
        options.output = RESULTS
    return options


def _names(known: Iterable[str]) -> Any:
    """A parser of names; a comma may be part of one."""

    def chosen(text: str) -> list[str]:
        found = [name for name in known if f",{name}," in f",{text},"]
        rest = f",{text},"
        for name in sorted(found, key=len, reverse=True):
            rest = rest.replace(f",{name},", ",,")
        if not found or rest.strip(","):
            raise argparse.ArgumentTypeError(f"'{rest.strip(',')}' is none of {', '.join(known)}")
        return found

    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes what the arguments ask for. The result is the exit code."""
    options = options_of(arguments)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if options.check:
        return check_published(options)
    if {"time", "memory"} & set(options.parts):
        workloads(options)
    if "growth" in options.parts:
        growing(options)
    if "regression" in options.parts:
        ratios = run.regression(QUICK_ROUNDS if options.quick else REGRESSION_ROUNDS, options.only)
        print("\nour ratios on one thread:", json.dumps(ratios, indent=1))
        write(options.output, "regression", {"threads": 1, "ratios": ratios})
    if "plot" in options.parts and options.output:
        from benchmarks import plots

        for picture in plots.draw(options.output):
            print(f"drew {picture}")
    return 0


def check_published(options: argparse.Namespace) -> int:
    """Compare our ratios with the published ones."""
    published = regression.read_published(RESULTS)
    slowdowns = regression.find_slowdowns(published, options.only)
    for name, ratios in slowdowns.items():
        print(f"{name}: times of a plain step {ratios}, published {published[name]}")
    print("too slow" if slowdowns else "no ratio is too large")
    return 1 if slowdowns else 0


def workloads(options: argparse.Namespace) -> None:
    """The parts of time and memory."""
    engines = [ENGINES[name] for name in options.engines or ENGINES]
    asked = options.quantities or (WEIGHED if options.quick else QUANTITIES)
    timed = asked if "time" in options.parts else ()
    weighed = (options.quantities or WEIGHED) if "memory" in options.parts else ()
    times, peaks = {}, {}
    for workload in WORKLOADS:
        if options.only.lower() in f"{workload.name} {workload.short}".lower():
            start = time.perf_counter()
            rounds = options.rounds or (QUICK_ROUNDS if options.quick else timing.ROUNDS)
            times[workload.short], peaks[workload.short] = run.measure(workload, engines, timed, weighed, rounds)
            print(f"measured {workload.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    names = [engine.name for engine in engines]
    for quantity in timed:
        show(report.times(quantity, times, names))
    for quantity in weighed:
        show(report.peaks(quantity, peaks, names))
    show(report.notes([*times.values(), *peaks.values()]))
    if timed:
        show(report.time_targets(times))
        write(options.output, "time", {"workloads": {w.short: w.name for w in WORKLOADS}, "ratios": times})
    if weighed:
        show(report.memory_targets(peaks))
        write(options.output, "memory", {"workloads": {w.short: w.name for w in WORKLOADS}, "bytes": peaks})


def growing(options: argparse.Namespace) -> None:
    """The part of growth."""
    engines = [ENGINES[name] for name in options.engines or growth.ENGINES]
    quantities = options.quantities or growth.QUANTITIES
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else GROWTH_ROUNDS)
    names = [engine.name for engine in engines]
    print(report.growth_head(quantities, names), flush=True)
    found = []
    for axis, value, times, peaks in run.grow(options.quick, engines, quantities, rounds):
        for quantity in quantities:
            print(report.growth_line(axis, value, times[quantity], peaks[quantity], names), flush=True)
        found.append({"axis": axis, "value": value, "time": times, "memory": peaks})
    write(options.output, "growth", {"start": growth.START, "layers": growth.LAYERS, "points": found})


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def write(directory: Path | None, name: str, figures: dict[str, Any]) -> None:
    """Keeps figures, with the machine they were measured on."""
    if directory:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{name}.json"
        file.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
        print(f"wrote {file}")


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
