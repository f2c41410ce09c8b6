"""Cost and quality of the projections of gradients: time over a plain pass, and errors of cosines.

    python -m benchmarks.projections [--json benchmarks/results/projections.json]

The models and data are those of `benchmarks.scan`, after some steps of training. Time is processor time of one thread,
as a ratio to a plain forward and backward pass, which takes turns with the projections. Errors are root mean squares
over all pairs of samples and three seeds, of the cosine of two projected gradients against that of the gradients; and
relative, over eight seeds, of the noise scale of projected gradients, at two stages of a training of the CNN.
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
from benchmarks.scan import BATCH, TASKS, Task, make_image_task, time_processor
from benchmarks.timing import compute_ratios, time_in_turns
from persample.gradients.projection import METHODS

SIZES, SEEDS, ROUNDS, STEPS = (512, 2048), 3, 7, 30
NOISE_EXAMPLES, NOISE_STEPS, NOISE_SIZE, NOISE_SEEDS = 1024, (0, 3), 512, 8


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


def measure_noise_scales() -> list[dict[str, float]]:
    """The noise scale of a CNN that learns the brightness of images, and its error with projected gradients."""
    torch.manual_seed(0)
    model, (images, _), loss_fn = make_image_task(NOISE_EXAMPLES)
    labels = (images.mean((1, 2, 3)) * 16 + 5).long().clamp(0, 9)
    optimizer, results = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for step in range(max(NOISE_STEPS) + 1):
        if step in NOISE_STEPS:
            with persample.record(model) as grads:
                loss_fn(model(images), labels).backward()
            exact = float(grads.noise_scale())
            found = [_compute_noise_scale(grads.project(NOISE_SIZE, seed).double()) for seed in range(NOISE_SEEDS)]
            error = statistics.fmean([(value / exact - 1) ** 2 for value in found]) ** 0.5
            results.append({"steps": step, "noise scale": exact, "error": error})
            print(results[-1], flush=True)
        optimizer.zero_grad()
        loss_fn(model(images), labels).backward()
        optimizer.step()
    return results


def _compute_noise_scale(rows: Tensor) -> float:
    variance = rows.var(0).sum()
    return float(variance / (rows.mean(0).square().sum() - variance / len(rows)))


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
    results["noise scales"] = measure_noise_scales()
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
