"""How much is lost by projecting gradients? Influence from stored rows beside EK-FAC from whole gradients.

    python -m benchmarks.exact_influence [--write] [--only TEXT]

The linear datamodeling score (LDS) on the tasks of `damping_tasks.py` that no choice was made on, as in
`benchmarks.damping`: whitened influence from rows of 512 numbers with its automatic damping, and
`persample.scanning.score` with several dampings. Its default damping was chosen on four other tasks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import persample
from benchmarks.damping import CHECKPOINTS, run_groups, train_halves
from benchmarks.damping_tasks import HELD_OUT
from benchmarks.stacked_training import Stacked, StackedTraining, Task, split_models
from persample.scanning import score
from persample.scanning.statistics import estimate_lds

DAMPINGS, RESAMPLES = (0.01, 0.03, 0.1, 0.3, 1.0), 100


def compute_scores(task: Task, states: list[Stacked]) -> dict[str, tuple[Tensor, float]]:
    """The scores of each method, and its processor time."""
    model, start, found = task.make_model(), time.process_time(), {}

    def add(name: str, scores: Tensor) -> None:
        nonlocal start
        found[name], start = (scores, time.process_time() - start), time.process_time()

    options: Any = {"checkpoints": states, "progress": False}
    scanned = persample.scan(model, task.loss_fn, task.data, quantities=["loss", "norm"], **options)
    add("whitened, 512 numbers", scanned.scores(task.test))
    for damping in DAMPINGS:
        add(f"ekfac, {damping}", score(model, task.loss_fn, task.data, task.test, damping=damping, **options))
    for method in ("kfac", "block", "diagonal", "identity"):
        add(method, score(model, task.loss_fn, task.data, task.test, method=method, **options))  # type: ignore[arg-type]
    return found


def measure_task(task: Task) -> dict[str, dict[str, Any]]:
    """The LDS of each method with its interval, for one model and for the checkpoints of its training."""
    runs, members = train_halves(task), torch.arange(len(task.data[0]))[None]
    states = split_models(StackedTraining(task, members, [0]).run(CHECKPOINTS), 0)
    results: dict[str, dict[str, Any]] = {}
    for kind, chosen in (("1 model", states[-1:]), ("checkpoints", states)):
        results[kind] = {}
        for name, (scores, seconds) in compute_scores(task, chosen).items():
            generator = torch.Generator().manual_seed(0)
            lds = asdict(estimate_lds(runs.predict(scores), runs.effects, RESAMPLES, generator))
            results[kind][name] = {**lds, "processor_seconds": seconds}
    return results


def summarise(tasks: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """The means over the tasks."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, methods in next(iter(tasks.values())).items():
        found[kind] = {
            name: {
                key: statistics.mean(results[kind][name][key] for results in tasks.values())
                for key in ("value", "processor_seconds")
            }
            for name in methods
            if all(name in results[kind] for results in tasks.values())
        }
    return found


def main() -> None:
    """Measure all tasks, and print or write the results."""
    run_groups(
        __doc__,
        "exact_influence.json",
        {"held out": HELD_OUT},
        measure_task,
        lambda tasks: {"summary": summarise(tasks)},
    )


if __name__ == "__main__":
    main()
