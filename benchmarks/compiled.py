"""Compiled steps beside eager ones: the time of a clipped sum as a ratio to a plain forward and backward.

    python -m benchmarks.compiled [part of a workload's name] [--rounds 9] [--json benchmarks/results/compiled.json]

Four steps take turns in one process, all with the loss included: plain and eager, plain with model and loss compiled, a
recording, and `persample.compile`. A figure is the median of the rounds' ratios to the plain step of the same round.
The compiled answer is compared with the recording's first. `compile` is the time of the first call, in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.workloads import WORKLOADS, Workload, loss_of


def steps_of(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Callable[[], Any]]:
    """The steps that are compared, by their names."""

    def loss_fn(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model(x), labels)

    def backward(loss_fn: Callable[..., Tensor]) -> None:
        model.zero_grad()
        loss_fn(model, x, labels).backward()

    def recorded() -> Any:
        with persample.record(model, loss_reduction="sum") as grads:
            loss_fn(model, x, labels).backward()
        return grads.clip(1.0)

    plain = torch.compile(loss_fn)
    step = persample.compile(model, loss_fn, lambda grads: grads.clip(1.0), loss_reduction="sum")
    return {
        "plain": lambda: backward(loss_fn),
        "plain compiled": lambda: backward(plain),
        "recorded": recorded,
        "compiled": lambda: step(x, labels)[1],
    }


def measured(workload: Workload, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    steps = steps_of(*workload.make())
    seconds: dict[str, float] = {}
    for name in ("plain compiled", "compiled"):
        start = time.perf_counter()
        found = steps[name]()
        seconds[name] = time.perf_counter() - start
    expected = steps["recorded"]()
    for name, want in expected.items():
        assert (found[name] - want).abs().max() <= 2e-3 * want.abs().max(), name
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i >= 2:  # the first rounds warm up
                times[name].append(time.perf_counter() - start)
    ratios = {name: [t / p for t, p in zip(times[name], times["plain"], strict=True)] for name in steps}
    spreads = {name: statistics.quantiles(r, n=4) for name, r in ratios.items()}
    return {
        "ratio": {name: round(q[1], 3) for name, q in spreads.items()},
        "quartiles": {name: [round(q[0], 3), round(q[2], 3)] for name, q in spreads.items()},
        "plain ms": round(1e3 * statistics.median(times["plain"]), 2),
        "compile s": {name: round(s, 1) for name, s in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="", help="a part of the names of those to measure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where to put the figures; those of other workloads stay")
    given = parser.parse_args()
    known = json.loads(given.json.read_text())["workloads"] if given.json and given.json.exists() else {}
    for workload in WORKLOADS:
        if given.workload in workload.name:
            known[workload.name] = found = measured(workload, given.rounds)
            print(workload.name, found, flush=True)
    if given.json:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        given.json.write_text(json.dumps({**about, "answer": "clip", "workloads": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
