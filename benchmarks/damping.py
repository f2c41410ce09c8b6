"""Is the damping that persample chooses near the best one, and are useless scores noticed?

    python -m benchmarks.damping [--write] [--only TEXT]

The tasks of `attribution_tasks.py`, each with few and many examples, and trained briefly and long. For each, models are
trained on random halves of the data. Whitened influence with the automatic damping is compared with fixed dampings by
the linear datamodeling score (LDS), for several sizes of the projection, and with an automatic damping that is relative
to the mean eigenvalue of all parameters together (TOGETHER) or has no least value (WITHOUT_LEAST). The correlation by
which `RandomScores` is decided is beside it.

The tasks with names that begin with RANKINGS are the datasets and models of `rankings.py`: the least damping of "auto"
was chosen on them and on the variants, all else on the variants and other tasks. Those that begin with HELD_OUT
(`damping_tasks.py`) were measured once, after all choices had been made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import persample
from benchmarks.attribution_tasks import TASKS, Task
from benchmarks.damping_tasks import HELD_OUT_TASKS
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.rankings import DATASETS
from persample.scanning import damping, influence
from persample.scanning.evaluation import retrain_on_subsets
from persample.scanning.probe import Probe
from persample.scanning.retraining import draw_subsets
from persample.scanning.statistics import correlate_ranks
from persample.scanning.stored_gradients import StoredGradients

SUBSETS, REPEATS, MODELS = 24, 1, 1
DIMS = (4, 64, 512)
VARIANTS, RANKINGS, HELD_OUT = "variants", "rankings", "held out"
RANKINGS_SIZE = 450  # training examples
TOGETHER, WITHOUT_LEAST = "auto, all parameters together", "auto, without the least damping"
DAMPINGS = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def iterate_variants() -> Iterator[tuple[str, Task]]:
    """Each task with all and with 300 examples, with half and with twice the epochs."""
    for name, make_task in TASKS.items():
        task = make_task()
        for examples in (300, len(task.data[0])):
            for factor in (0.5, 2):
                inputs, labels = task.data
                data = inputs[:examples], labels[:examples]
                epochs = round(factor * task.epochs)
                yield f"{name}, {examples} examples, {epochs} epochs", replace(task, data=data, epochs=epochs)


def iterate_rankings() -> Iterator[tuple[str, Task]]:
    """The datasets of the comparison of rankings; "digits, MLP" is not among them, because it is like a task above."""
    for name, dataset in DATASETS.items():
        if name != "digits, MLP":
            inputs, labels = dataset.make(0)
            data, test = (
                (inputs[:RANKINGS_SIZE], labels[:RANKINGS_SIZE]),
                (inputs[RANKINGS_SIZE:], labels[RANKINGS_SIZE:]),
            )
            yield name, Task(partial(dataset.model, 0), data, test, dataset.epochs[0])


def iterate_tasks() -> Iterator[tuple[str, Task]]:
    """All tasks, with the name of their group before their own."""
    held_out = ((name, make_task()) for name, make_task in HELD_OUT_TASKS.items())
    for group, tasks in ((VARIANTS, iterate_variants()), (RANKINGS, iterate_rankings()), (HELD_OUT, held_out)):
        for name, task in tasks:
            yield f"{group}: {name}", task


def measure_task(task: Task) -> list[dict[str, Any]]:
    """LDS by damping, for each model and size of the projection."""
    members = draw_subsets(len(task.data[0]), SUBSETS, 0.5, torch.Generator().manual_seed(0))
    loss_fn = nn.CrossEntropyLoss()
    runs = retrain_on_subsets(task.train, task.data, task.test, loss_fn, members, REPEATS, seed=0)
    results = []
    for seed in range(MODELS):
        model = task.train(task.data, seed)[0].eval()
        for dim in DIMS:
            found = persample.scan(model, loss_fn, task.data, project=dim, quantities=["loss", "norm"], progress=False)
            scores = {"auto": found.scores(task.test), "tracin": found.scores(task.test, "tracin")}
            scores |= {str(value): found.scores(task.test, damping=value) for value in DAMPINGS}
            tests = Probe(loss_fn).project_batch(model, None, found.settings, 0, task.test)
            models = [influence.StoredModel(found._get_gradients(0))]
            scores[TOGETHER] = score_together(models[0].stored, tests[0].rows)
            with patch.object(damping, "LEAST_DAMPING", damping.LEAST_OF_DIRECTIONS):
                smaller = influence.StoredModel(models[0].stored).get_whitening("whitened", "auto").damping
            scores[WITHOUT_LEAST] = found.scores(task.test, damping=smaller)
            results.append(
                {
                    "seed": seed,
                    "dim": dim,
                    "lds": {k: float(correlate_ranks(runs.predict(v), runs.effects).mean()) for k, v in scores.items()},
                    "damping": models[0].get_whitening("whitened", "auto").damping,
                    "damping_without_least": smaller,
                    "half_correlation": {
                        method: influence.warn_if_random(models, tests, method, "auto")
                        for method in ("whitened", "tracin")
                    },
                }
            )
    return results


def score_together(stored: StoredGradients, tests: Tensor) -> Tensor:
    """Whitened influence with an automatic damping that is the same for all parameters."""
    rows = stored[torch.arange(len(stored))].double() * stored.lengths[:, None]
    whitening = damping.Whitening(rows.T @ rows / len(rows), "auto", stored.lengths)
    return whitening.solve(tests) @ rows.T


def compare_together(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean LDS of "auto" and of TOGETHER, and in how many cases the first is better."""
    pairs = [(row["lds"]["auto"], row["lds"][TOGETHER]) for row in rows if row["dim"] >= 64]
    own, together = (statistics.mean(part) for part in zip(*pairs, strict=True))
    return {"auto": own, TOGETHER: together, "better": sum(a > b for a, b in pairs), "cases": len(pairs)}


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each choice of a damping, its LDS divided by the best LDS of any fixed damping: mean and least."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        best = max(row["lds"][str(value)] for value in DAMPINGS)
        if row["dim"] >= 64 and best > 0.05:  # with four numbers there is nothing to choose
            for name in ("auto", WITHOUT_LEAST, *map(str, DAMPINGS)):
                shares.setdefault(name, []).append(row["lds"][name] / best)
    return {
        name: {"mean": statistics.mean(part), "least": min(part), "cases": len(part)} for name, part in shares.items()
    }


def main() -> None:
    """Measure all tasks, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/damping.json")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tasks with TEXT in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / "damping.json"
    tasks = json.loads(path.read_text())["tasks"] if options.only and path.exists() else {}
    for name, task in iterate_tasks():
        if options.only not in name:
            continue
        tasks[name] = measure_task(task)
        for row in tasks[name]:
            best = max(DAMPINGS, key=lambda value: row["lds"][str(value)])
            print(
                f"{name}, {row['dim']} numbers: auto {row['lds']['auto']:.2f} ({row['damping']:.2g}), without least "
                f"{row['lds'][WITHOUT_LEAST]:.2f} ({row['damping_without_least']:.2g}), together "
                f"{row['lds'][TOGETHER]:.2f}, best {row['lds'][str(best)]:.2f} ({best:g}), tracin "
                f"{row['lds']['tracin']:.2f}, correlations {row['half_correlation']['whitened']:.2f} "
                f"{row['half_correlation']['tracin']:.2f}",
                flush=True,
            )
    results: dict[str, Any] = {"machine": describe_machine(), "tasks": tasks}
    for group in (VARIANTS, RANKINGS, HELD_OUT):
        rows = [row for name, part in tasks.items() if name.startswith(f"{group}:") for row in part]
        if rows:
            results[group] = {"summary": summarise(rows), "by_parameter": compare_together(rows)}
            print(group, results[group]["by_parameter"])
            for name, shares in results[group]["summary"].items():
                print(f"{name:6} mean {shares['mean']:.3f} least {shares['least']:.2f} of {shares['cases']} cases")
    if options.write:
        write_json(path, results)


if __name__ == "__main__":
    main()
