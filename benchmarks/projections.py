"""Cost and quality of the projections of gradients: time over a plain pass, and errors of cosines.

    python -m benchmarks.projections [--json benchmarks/results/projections.json]

The models and data are those of `benchmarks.scan`, after some steps of training. Time is processor time of one thread,
as a ratio to a plain forward and backward pass, which takes turns with the projections. Errors are root mean squares
over all pairs of samples and three seeds, of the cosine of two projected gradients against that of the gradients.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.output import write_json
from benchmarks.scan import BATCH, TASKS, Task, time_processor
from benchmarks.timing import compute_ratios, time_in_turns
from persample.gradients.projection import METHODS

SIZES, SEEDS, ROUNDS, STEPS = (512, 2048), 3, 7, 30


def compute_loss(task: Task) -> Tensor:
    """The sum of the losses of all samples."""
    model, data, loss_fn = task
    if isinstance(data, tuple):
        return nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
    losses: Tensor = loss_fn(model, data)
    return losses.sum()


def train(task: Task) -> None:
    """Take some steps on one batch: gradients of an untrained model lie mostly in its last layer."""
    optimizer = torch.optim.Adam(task[0].parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (compute_loss(task) / BATCH).backward()
        optimizer.step()


def measure_errors(grads: Any, size: int, method: str) -> float:
    """Root mean square error of the cosines between different samples."""
    exact = _compute_cosines(grads.gram().double())
    is_pair = ~torch.eye(len(exact), dtype=torch.bool)
    squares = []
    for seed in range(SEEDS):
        rows = grads.project(size, seed, method).double()
        squares.append((_compute_cosines(rows @ rows.T) - exact)[is_pair].square().mean())
    return float(torch.stack(squares).mean().sqrt())


def _compute_cosines(gram: Tensor) -> Tensor:
    lengths = gram.diagonal().sqrt()
    return gram / (lengths[:, None] * lengths)


def measure_task(task: Task) -> dict[str, Any]:
    """For each method and size: ratio to a plain pass, and error of cosines."""
    train(task)
    parameters = list(task[0].parameters())
    with persample.record(task[0], loss_reduction="sum") as grads:
        compute_loss(task).backward()
    calls: dict[str, Callable[[], Any]] = {"plain": lambda: torch.autograd.grad(compute_loss(task), parameters)}
    for method in METHODS:
        for size in SIZES:
            calls[f"{method} {size}"] = lambda method=method, size=size: grads.project(size, 0, method)  # type: ignore[misc]
    timers = {name: lambda call=call: (call(), time_processor(call))[1] for name, call in calls.items()}  # type: ignore[misc]
    times = time_in_turns(timers, ROUNDS, warm_up=1)  # each timed call follows one that draws the random matrices
    return {
        f"{method} {size}": {
            "ratio": statistics.median(compute_ratios(times[f"{method} {size}"], times["plain"])),
            "error of cosines": measure_errors(grads, size, method),
        }
        for method in METHODS
        for size in SIZES
    }


def main() -> None:
    """Measure all models; write the results if `--json` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": describe_machine(), "batch": BATCH}
    for name, make_task in TASKS.items():
        torch.manual_seed(0)
        results[name] = measure_task(make_task(BATCH))
        for label, figures in results[name].items():
            print(
                f"{name:4} {label:16} time {figures['ratio']:.2f}  error {figures['error of cosines']:.3f}", flush=True
            )
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
