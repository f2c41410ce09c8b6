"""Quality of influence scores: the linear datamodeling score, and flipped labels, for persample and its peers.

    python -m benchmarks.attribution [--write] [--quick] [--keep FILE] [--peers DIRECTORY] [--only TEXT]

Three tasks (`attribution_tasks.py`), with the functions of `persample.evaluate`. The test samples are split into two
halves. Where a method has a damping, "tuned" is the damping with the best score on the first half. All scores in
the table are of the second half. `persample`, "auto" uses no test sample and no retrained model for its damping.

With `--keep`, the results of each task go to a file when they are known; a run that was stopped goes on behind them.
`--quick` trains a fifth as often, so that its intervals are wide.

The peers are traker, kronfluence, captum and dattri. Install them without their dependencies, so that torch stays:

    pip install --no-deps --target DIRECTORY traker kronfluence captum dattri einconv opt_einsum
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.attribution_peers import PEERS
from benchmarks.attribution_tasks import TASKS, Task, describe
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.peers import add_peers_option, find_peers
from persample.scanning.evaluation import estimate_ceiling, retrain_on_subsets
from persample.scanning.retraining import SubsetRuns, draw_subsets
from persample.scanning.statistics import correlate_ranks, estimate_lds

PROJECT, RESAMPLES = 512, 200
FULL, QUICK = {"subsets": 32, "repeats": 4, "models": 5}, {"subsets": 12, "repeats": 2, "models": 2}
DAMPINGS = (1e-3, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RANKINGS = ("loss", "mean_loss", "norm", "self_influence", "whitened self-influence", "trak self-influence")

Score = Callable[[Any], Tensor]


class Comparison:
    """The trainings of one task, and the scores of all methods on it.

    Args:
        subsets: how many random halves are trained on.
        repeats: how often each half is trained on.
        models: how many models are scanned.
    """

    def __init__(self, task: Task, subsets: int, repeats: int, models: int) -> None:
        self.task = task
        members = draw_subsets(len(task.data[0]), subsets, 0.5, torch.Generator().manual_seed(0))
        self.runs = retrain_on_subsets(
            task.train, task.data, task.test, nn.CrossEntropyLoss(), members, repeats, seed=0
        )
        trained = [task.train(task.data, seed) for seed in range(models)]
        self.models: list[nn.Module] = [model.eval() for model, _ in trained]
        self.checkpoints = trained[0][1]
        self.tuning, self.reported = torch.arange(len(task.test[0])).chunk(2)
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, compute: Score, dampings: Sequence[Any]) -> None:
        """Score a method with each damping; report the first one (the default), and the best on the first half."""
        curve, seconds, kept = {}, 0.0, {}
        for damping in dampings:
            start = time.process_time()
            try:
                scores = compute(damping)
            except Exception as error:
                traceback.print_exc()
                self.rows.append({"method": name, "error": f"{type(error).__name__}: {error}"[:200]})
                return
            seconds = seconds or time.process_time() - start
            kept[damping] = scores
            curve[str(damping)] = [self._score(scores, part) for part in (self.tuning, self.reported)]
        best = max(dampings, key=lambda damping: curve[str(damping)][0])
        self.rows.append(
            {
                "method": name,
                "default": self._estimate(kept[dampings[0]]),
                "tuned": self._estimate(kept[best]) if len(dampings) > 1 else None,
                "tuned_damping": best,
                "processor_seconds": seconds,
                "curve": curve,
            }
        )
        print(f"  {name}: {self.rows[-1]['default']} tuned {self.rows[-1]['tuned']} ({best})", flush=True)

    def _score(self, scores: Tensor, part: Tensor) -> float:
        runs = self._select(part)
        return float(correlate_ranks(runs.predict(scores[part]), runs.effects).mean())

    def _estimate(self, scores: Tensor) -> dict[str, float]:
        runs = self._select(self.reported)
        generator = torch.Generator().manual_seed(0)
        return asdict(estimate_lds(runs.predict(scores[self.reported]), runs.effects, RESAMPLES, generator))

    def _select(self, part: Tensor) -> SubsetRuns:
        return SubsetRuns(self.runs.members, self.runs.losses[:, :, part])


def add_persample(comparison: Comparison) -> None:
    """Score the methods of persample: with one model, with its checkpoints, and with several models."""
    task, models = comparison.task, len(comparison.models)

    @cache
    def scan(count: int, with_checkpoints: bool, dim: int) -> persample.Scan:
        states = comparison.checkpoints if with_checkpoints else [m.state_dict() for m in comparison.models[:count]]
        return persample.scan(
            task.make_model(), nn.CrossEntropyLoss(), task.data, checkpoints=states, project=dim, progress=False,
            quantities=["loss", "norm"],
        )  # fmt: skip

    def make_score(method: Any, count: int = 1, with_checkpoints: bool = False, dim: int = PROJECT) -> Score:
        def compute(damping: Any) -> Tensor:
            scan.cache_clear() if damping in (None, "auto") else None  # the time of the default includes the scan
            options = {} if damping is None else {"damping": damping}
            return scan(count, with_checkpoints, dim).scores(task.test, method, **options)

        return compute

    comparison.add("persample tracin, checkpoints", make_score("tracin", with_checkpoints=True), (None,))
    comparison.add("persample cosine", make_score("cosine"), (None,))
    for count in (1, models):
        name = "" if count == 1 else f", {count} models"
        for method in ("whitened", "trak"):
            comparison.add(f"persample {method}{name}", make_score(method, count), ("auto", *DAMPINGS))
    name = f"persample whitened, {models} models, 2048 numbers"
    comparison.add(name, make_score("whitened", models, dim=2048), ("auto",))


def measure_flipped_labels(task: Task) -> dict[str, Any]:
    """The area under the ROC curve of rankings, by `persample.evaluate`."""
    found = persample.evaluate(
        task.train, task.data, task.test, nn.CrossEntropyLoss(), methods=[], rankings=RANKINGS, subsets=3,
        project=PROJECT, progress=False,
    )  # fmt: skip
    return {name: asdict(estimate) for name, estimate in found.mislabel_auc.items()}


def find_versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    found = {}
    for package in ("traker", "kronfluence", "captum", "dattri"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def read_kept(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The tasks that an earlier run with these settings has kept."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    if any(found[name] != settings[name] for name in settings if name != "machine"):
        raise SystemExit(f"{path} is of a run with other settings. Name another file.")
    tasks: dict[str, Any] = found["tasks"]
    return tasks


def main() -> None:
    """Compare all methods on all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/attribution.json")
    parser.add_argument("--quick", action="store_true", help="train a fifth as often")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep the results of each task here, and go on from it"
    )
    add_peers_option(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="only tasks with TEXT in their name")
    options = parser.parse_args()
    find_peers(options.peers)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.quick and options.write:
        parser.error("--write is for the results of a full run")
    path, counts = RESULTS / "attribution.json", QUICK if options.quick else FULL
    settings = {"machine": describe_machine(), "peers": find_versions(), **counts, "project": PROJECT}
    earlier = json.loads(path.read_text())["tasks"] if options.only and path.exists() else {}
    tasks = read_kept(options.keep, settings)
    for name, make_task in TASKS.items():
        if options.only not in name or name in tasks:
            continue
        start, task = time.perf_counter(), make_task()
        comparison = Comparison(task, **counts)
        print(f"{name}: trained in {time.perf_counter() - start:.0f} s", flush=True)
        add_persample(comparison)
        for peer, score, count, dampings in PEERS if options.peers else ():
            compute = partial(score, task, comparison.models[:count], comparison.checkpoints)
            comparison.add(peer, compute, dampings)
        tasks[name] = {
            **describe(task, comparison.models),
            "ceiling": estimate_ceiling(comparison.runs),
            "lds": comparison.rows,
            "mislabel_auc": measure_flipped_labels(task),
        }
        print(tasks[name]["mislabel_auc"], f"{time.perf_counter() - start:.0f} s", flush=True)
        if options.keep:
            write_json(options.keep, {**settings, "tasks": tasks})
        if options.write:
            write_json(path, {**settings, "tasks": {**earlier, **tasks}})


if __name__ == "__main__":
    main()
