"""Time and memory of per-sample gradients relative to a plain forward and backward, for persample and its peers.

Without options, everything is measured and written to benchmarks/results. This takes about 20 minutes.
Options that name parts select these parts. A restricted run (--quick, --only, --quantities, --engines, --rounds)
writes files only if --output is given.
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

from benchmarks import growth, peers, regression, report, run, timing
from benchmarks.engines import ENGINES, QUANTITIES
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.workloads import WORKLOADS, select_workloads

PARTS = ("time", "memory", "growth", "regression", "plot")
MAIN_QUANTITIES = ("dense", "norms", "clip")  # for memory, and for --quick
QUICK_ROUNDS = 3
GROWTH_ROUNDS = 5
REGRESSION_ROUNDS = 9


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_argument_group("parts (default: all)")
    parts.add_argument("--time", action="store_true", help="time of all engines, in turns in one process")
    parts.add_argument("--memory", action="store_true", help="peak memory, in a process for each engine and quantity")
    parts.add_argument("--growth", action="store_true", help="growth with batch, length, width and vocabulary")
    parts.add_argument("--regression", action="store_true", help="ratios on one thread, for later runs of --check")
    parts.add_argument("--plot", action="store_true", help="plots of the results in the output directory")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"only compare ratios on one thread with the published ones; fail if one is {regression.ALLOWED:g} times "
        "as large",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, and only {', '.join(MAIN_QUANTITIES)}"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only workloads with TEXT in their name")
    parser.add_argument(
        "--quantities",
        type=_make_name_parser(QUANTITIES),
        metavar="A,B",
        help=f"only these, from {', '.join(QUANTITIES)}",
    )
    parser.add_argument(
        "--engines", type=_make_name_parser(ENGINES), metavar="A,B", help=f"only these, from {', '.join(ENGINES)}"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"rounds of timing (default: {timing.ROUNDS}, fewer for slow engines)"
    )
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="where to write JSON files and plots")
    peers.add_peers_option(parser)
    options = parser.parse_args(arguments)
    options.parts = [part for part in PARTS if getattr(options, part)] or list(PARTS)
    restricted = any((options.quick, options.only, options.quantities, options.engines, options.rounds))
    if options.output is None and not restricted:
        options.output = RESULTS
    return options


def _make_name_parser(names: Iterable[str]) -> Any:
    """A parser for a list of names, separated by commas. A name may contain a comma."""

    def parse(text: str) -> list[str]:
        found = [name for name in names if f",{name}," in f",{text},"]
        rest = f",{text},"
        for name in sorted(found, key=len, reverse=True):
            rest = rest.replace(f",{name},", ",,")
        if not found or rest.strip(","):
            raise argparse.ArgumentTypeError(f"unknown name '{rest.strip(',')}'; choose from {', '.join(names)}")
        return found

    return parse


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the selected parts. The result is the exit code."""
    options = parse_options(arguments)
    peers.find_peers(options.peers)
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    if options.check:
        return check_published(options)
    if {"time", "memory"} & set(options.parts):
        measure_workloads(options)
    if "growth" in options.parts:
        measure_growth(options)
    if "regression" in options.parts:
        ratios = regression.measure_all(QUICK_ROUNDS if options.quick else REGRESSION_ROUNDS, options.only)
        print("\nratios of persample on one thread:", json.dumps(ratios, indent=1))
        write_part(options, "regression", {"threads": 1, "ratios": ratios})
    if "plot" in options.parts and options.output:
        from benchmarks import plots

        for path in plots.draw_results(options.output):
            print(f"wrote {path}")
    return 0


def check_published(options: argparse.Namespace) -> int:
    """Compare the ratios of persample with the published ones."""
    published = regression.read_published(RESULTS)
    slowdowns = regression.find_slowdowns(published, options.only)
    for name, ratios in slowdowns.items():
        print(f"{name}: times of a plain step {ratios}, published {published[name]}")
    print("too slow" if slowdowns else "no ratio is too large")
    return 1 if slowdowns else 0


def measure_workloads(options: argparse.Namespace) -> None:
    """Measure and report time and memory of the workloads."""
    engines = [ENGINES[name] for name in options.engines or ENGINES]
    names = [engine.name for engine in engines]
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else timing.ROUNDS)
    time_quantities = options.quantities or (MAIN_QUANTITIES if options.quick else QUANTITIES)
    memory_quantities = options.quantities or MAIN_QUANTITIES
    if "time" not in options.parts:
        time_quantities = ()
    if "memory" not in options.parts:
        memory_quantities = ()
    times, peaks = {}, {}
    for workload in select_workloads(options.only):
        start = time.perf_counter()
        times[workload.short], peaks[workload.short] = run.measure_workload(
            workload, engines, time_quantities, memory_quantities, rounds
        )
        print(f"measured {workload.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    tables = [report.format_times(quantity, times, names) for quantity in time_quantities]
    tables += [report.format_peaks(quantity, peaks, names) for quantity in memory_quantities]
    tables += [report.format_notes([*times.values(), *peaks.values()])]
    tables += [report.format_time_targets(times)] if time_quantities else []
    tables += [report.format_memory_targets(peaks)] if memory_quantities else []
    print("\n".join(filter(None, tables)), flush=True)
    workload_names = {workload.short: workload.name for workload in WORKLOADS}
    if time_quantities:
        write_part(options, "time", {"workloads": workload_names, "ratios": times})
    if memory_quantities:
        write_part(options, "memory", {"workloads": workload_names, "bytes": peaks})


def measure_growth(options: argparse.Namespace) -> None:
    """Measure and report the growth of time and memory."""
    engines = [ENGINES[name] for name in options.engines or growth.ENGINES]
    names = [engine.name for engine in engines]
    axes = growth.QUICK_AXES if options.quick else growth.AXES
    quantities = options.quantities or growth.QUANTITIES
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else GROWTH_ROUNDS)
    print(report.format_growth_header(quantities, names), flush=True)
    points = []
    for axis, value, times, peaks in run.measure_growth(axes, engines, quantities, rounds):
        for quantity in quantities:
            print(report.format_growth_row(axis, value, times[quantity], peaks[quantity], names), flush=True)
        points.append({"axis": axis, "value": value, "time": times, "memory": peaks})
    write_part(options, "growth", {"start": growth.START, "layers": growth.LAYERS, "points": points})


def write_part(options: argparse.Namespace, name: str, results: dict[str, Any]) -> None:
    """Write the results of a part to the output directory, if there is one, with the description of the machine."""
    if options.output:
        write_json(options.output / f"{name}.json", {"machine": describe_machine(), **results})


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
