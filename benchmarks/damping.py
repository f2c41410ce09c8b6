"""Is the damping that persample chooses near the best one, and which models should be scanned?

    python -m benchmarks.damping [--write] [--only TEXT]

The tasks of `damping_tasks.py`. For each, 96 models are trained on 48 random halves of the data, all at once, and three
on all data, with four checkpoints each. Whitened influence of one model, of the checkpoints of one training, of several
models and of all their checkpoints is scored by the linear datamodeling score (LDS), with the automatic damping and
with fixed ones. `share` is the LDS of a damping divided by that of the best fixed one; cases with a best LDS below 0.05
are left out. The rule was chosen on the tasks of CHOSEN. Those of HELD_OUT were measured after that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import persample
from benchmarks.damping_tasks import CHOSEN, HELD_OUT
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.stacked_training import StackedTraining, Task, split_models
from persample.scanning.influence import Method, find_damping, make_scores
from persample.scanning.probe import Probe
from persample.scanning.retraining import SubsetRuns, draw_subsets
from persample.scanning.statistics import correlate_ranks

SUBSETS, REPEATS, MODELS, CHECKPOINTS = 48, 2, 3, 4
DAMPINGS = (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0)
GROUPS = {"chosen": CHOSEN, "held out": HELD_OUT}
LEAST_LDS = 0.05
Results = dict[str, dict[str, Any]]  # by kind of models


def train_halves(task: Task) -> SubsetRuns:
    """The losses of the test samples, of models that were trained on random halves."""
    members = draw_subsets(len(task.data[0]), SUBSETS, 0.5, torch.Generator().manual_seed(0))
    training = StackedTraining(task, members.repeat_interleave(REPEATS, 0), range(5000, 5000 + SUBSETS * REPEATS))
    training.run()
    return SubsetRuns(members, training.compute_test_losses().view(SUBSETS, REPEATS, -1))


def measure_task(task: Task) -> Results:
    """The LDS of each damping, for each kind of models."""
    runs, count = train_halves(task), len(task.data[0])
    trained = StackedTraining(task, torch.arange(count).expand(MODELS, count), range(MODELS)).run(CHECKPOINTS)
    states = [split_models(trained, model) for model in range(MODELS)]
    chosen = {
        "1 model": [states[0][-1]],
        "checkpoints": states[0],
        "models": [own[-1] for own in states],
        "models x checkpoints": [state for own in states for state in own],
    }
    results = {}
    for kind, checkpoints in chosen.items():
        found = persample.scan(
            task.make_model(), task.loss_fn, task.data, checkpoints=checkpoints, quantities=["loss", "norm"],
            progress=False,
        )  # fmt: skip
        models = found._get_models()
        tests = Probe(task.loss_fn).project_batch(task.make_model(), checkpoints, found.store, 0, task.test)
        score = partial(make_scores, models, tests, of_loss=True)
        scores = {str(damping): score("whitened", damping).compute() for damping in ("auto", *DAMPINGS)}
        others: tuple[Method, ...] = ("trak", "tracin")
        scores |= {method: score(method, "auto").compute() for method in others}
        lds = {name: float(correlate_ranks(runs.predict(part), runs.effects).mean()) for name, part in scores.items()}
        results[kind] = {"lds": lds, "damping": find_damping(models, "whitened", "auto")}
    return results


def summarise(tasks: dict[str, Results]) -> Results:
    """For each kind of models: the mean LDS over the tasks, and the shares of the best fixed damping."""
    summary: Results = {}
    for kind in next(iter(tasks.values())):
        curves = [results[kind]["lds"] for results in tasks.values()]
        ratios = [
            {k: v / find_best(curve) for k, v in curve.items()} for curve in curves if find_best(curve) > LEAST_LDS
        ]
        summary[kind] = {
            "lds": {name: statistics.mean(curve[name] for curve in curves) for name in curves[0]},
            "best": statistics.mean(map(find_best, curves)),
            "cases": len(ratios),
            "share": {name: statistics.mean(ratio[name] for ratio in ratios) for name in curves[0]},
            "least": {name: min(ratio[name] for ratio in ratios) for name in curves[0]},
            "reached": {name: sum(ratio[name] >= 0.97 for ratio in ratios) for name in curves[0]},
        }
    return summary


def find_best(curve: dict[str, float]) -> float:
    """The LDS of the best fixed damping."""
    return max(curve[str(damping)] for damping in DAMPINGS)


def compare_kinds(tasks: dict[str, Results]) -> dict[str, list[float]]:
    """The mean LDS of each kind of models beyond that of one model, with a 95 % interval over the tasks."""
    found = {}
    for kind in next(iter(tasks.values())):
        gains = [results[kind]["lds"]["auto"] - results["1 model"]["lds"]["auto"] for results in tasks.values()]
        error = 1.96 * statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        mean = statistics.mean(gains)
        found[kind] = [mean, mean - error, mean + error]
    return found


def run_groups(
    description: str | None,
    file: str,
    groups: Mapping[str, Mapping[str, Callable[[], Task]]],
    measure: Callable[[Task], Results],
    summarise: Callable[[dict[str, Results]], dict[str, Any]],
) -> None:
    """A command that measures the tasks of each group, and prints or writes the results after each task."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{file}")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tasks with TEXT in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / file
    results: dict[str, Any] = json.loads(path.read_text()) if options.only and path.exists() else {}
    results["machine"] = describe_machine()
    for group, made in groups.items():
        tasks: dict[str, Results] = results.get(group, {}).get("tasks", {})
        for name, make_task in made.items():
            if options.only not in f"{group}: {name}":
                continue
            tasks[name] = measure(make_task())
            print(f"{group}: {name}: {json.dumps(tasks[name])}", flush=True)
            results[group] = {**summarise(tasks), "tasks": tasks}
            if options.write:
                write_json(path, results)
        if tasks:
            print(json.dumps({group: {**results[group], "tasks": None}}, indent=1))


def main() -> None:
    """Measure all tasks, and print or write the results."""
    run_groups(
        __doc__,
        "damping.json",
        GROUPS,
        measure_task,
        lambda tasks: {"summary": summarise(tasks), "gains": compare_kinds(tasks)},
    )


if __name__ == "__main__":
    main()
