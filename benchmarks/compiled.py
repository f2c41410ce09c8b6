"""Time of compiled and eager steps for a clipped sum, as a ratio to a plain forward and backward.

    python -m benchmarks.compiled [TEXT] [--rounds 9] [--json benchmarks/results/compiled.json]

Four steps take turns in one process: a plain step, a plain step with model and loss compiled, a recording, and
`persample.compile`. Each includes the loss. A result is the median over the rounds of the ratio to the plain step of
the same round. Before that, the result of the compiled step is compared with the result of the recording. `compile s`
is the time of the first call, in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.output import write_json
from benchmarks.timing import compute_quartiles, compute_ratios, time_call, time_in_turns
from benchmarks.workloads import Workload, compute_loss, select_workloads

Step = Callable[[], Any]


def make_steps(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Step]:
    """The steps that are compared, by name."""

    def loss_fn(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return compute_loss(model(x), labels)

    def run_plain(loss_fn: Callable[..., Tensor]) -> None:
        model.zero_grad()
        loss_fn(model, x, labels).backward()

    def record_and_clip() -> dict[str, Tensor]:
        with persample.record(model, loss_reduction="sum") as grads:
            loss_fn(model, x, labels).backward()
        return grads.clip(1.0)

    compiled_loss_fn = torch.compile(loss_fn)
    compiled_step = persample.compile(model, loss_fn, lambda grads: grads.clip(1.0), loss_reduction="sum")
    return {
        "plain": lambda: run_plain(loss_fn),
        "plain compiled": lambda: run_plain(compiled_loss_fn),
        "recorded": record_and_clip,
        "compiled": lambda: compiled_step(x, labels)[1],
    }


def measure_workload(
    workload: Workload, rounds: int, wait_after: Callable[[Step], Step] = lambda step: step
) -> dict[str, Any]:
    """Compile the steps, check the compiled result, and time the steps; `wait_after` makes a step wait for a device."""
    steps = {name: wait_after(step) for name, step in make_steps(*workload.build()).items()}
    compile_times = {name: time_call(steps[name]) for name in ("plain compiled", "compiled")}
    check_result(steps["compiled"](), steps["recorded"]())
    times = time_in_turns({name: partial(time_call, step) for name, step in steps.items()}, rounds)
    quartiles = {name: compute_quartiles(compute_ratios(times[name], times["plain"])) for name in steps}
    return {
        "ratio": {name: round(median, 3) for name, (_, median, _) in quartiles.items()},
        "quartiles": {name: [round(low, 3), round(high, 3)] for name, (low, _, high) in quartiles.items()},
        "plain ms": round(1e3 * statistics.median(times["plain"]), 2),
        "compile s": {name: round(seconds, 1) for name, seconds in compile_times.items()},
    }


def check_result(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise if a clipped sum differs from the expected one."""
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().max() <= 2e-3 * tensor.abs().max(), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workload", nargs="?", default="", metavar="TEXT", help="only workloads with TEXT in their name"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results; keeps its results of other workloads")
    options = parser.parse_args()
    results = json.loads(options.json.read_text())["workloads"] if options.json and options.json.exists() else {}
    for workload in select_workloads(options.workload):
        results[workload.name] = measure_workload(workload, options.rounds)
        print(workload.name, results[workload.name], flush=True)
    if options.json:
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        write_json(options.json, {**machine, "answer": "clip", "workloads": results})


if __name__ == "__main__":
    main()
