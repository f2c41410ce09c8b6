"""Resident memory of the first two steps of a process, as a ratio to plain steps: `python -m benchmarks.first_steps`.

A fresh process builds the model and the batch, and reads its resident memory. The result is the peak during its first
two steps, minus that. It includes everything that happens once: buffers of libraries, modules that are imported late,
the plans, the audit and the verification of a recording. The recorded steps compute the clipped sum. One thread; the
median over several processes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.engines import ENGINES, Engine, Plain
from benchmarks.machine import describe_machine
from benchmarks.memory import read_status, reset_peak
from benchmarks.output import RESULTS, write_json
from benchmarks.targets import FIRST_STEPS_MEMORY
from benchmarks.workloads import Workload, select_workloads

RESULT = RESULTS / "first_steps.json"
STEPS = 2


def measure_workload(workload: Workload, processes: int) -> dict[str, float]:
    """Megabytes of plain and of recorded steps, and their ratio."""
    ours = ENGINES["ours"]
    peaks: dict[type[Engine], list[int]] = {Plain: [], ours: []}
    for _ in range(processes):
        for engine, found in peaks.items():
            found.append(_measure_in_process(workload.short, engine.name))
    plain, recorded = (statistics.median(found) for found in peaks.values())
    return {"plain MB": round(plain / 1e6, 1), "clip MB": round(recorded / 1e6, 1), "ratio": round(recorded / plain, 3)}


def _measure_in_process(*arguments: str) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_steps, arguments)


def _measure_steps(workload_name: str, engine_name: str) -> int:
    """Bytes by which resident memory grows during the first steps of this process, at its peak."""
    torch.set_num_threads(1)
    (workload,) = (w for w in select_workloads() if w.short == workload_name)
    engine = Plain(workload) if engine_name == Plain.name else ENGINES[engine_name](workload)
    reset_peak()
    before = read_status("VmRSS")
    for _ in range(STEPS):
        result = engine.step("total" if engine_name == Plain.name else "clip")
        del result
        engine.clear()
    return read_status("VmHWM") - before


def measure_all(workloads: Sequence[Workload], processes: int) -> dict[str, Any]:
    """Measure the workloads; returns the results by short name, with the target where there is one."""
    found = {}
    for workload in workloads:
        numbers = measure_workload(workload, processes)
        target = FIRST_STEPS_MEMORY.get(workload.short)
        found[workload.short] = numbers if target is None else {**numbers, "target": target}
        print(f"{workload.short}: {json.dumps(found[workload.short])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5, help="processes for each median (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only workloads with TEXT in their name")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)  # for the description of the machine
    found = measure_all(select_workloads(options.only), options.processes)
    if options.write:
        write_json(RESULT, {"machine": describe_machine(), "processes": options.processes, "workloads": found})


if __name__ == "__main__":
    main()
