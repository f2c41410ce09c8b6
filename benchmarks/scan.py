"""Cost of a scan and its growth: time per example, memory, space on disk, and the time of queries.

    python -m benchmarks.scan [--json benchmarks/results/scan.json]

Time is a ratio to plain forward and backward passes over the same batches, which take turns with the scans. Memory is
the peak of resident memory of a process that runs a scan. Queries are run on stores of random gradients with 1,024
numbers each. Their spectrum decays slowly, which is the worst case for `duplicates`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.memory import read_status
from benchmarks.output import write_json
from benchmarks.timing import compute_ratios, time_call, time_in_turns
from benchmarks.workloads import make_gpt
from persample.scanning import queries
from persample.scanning.influence import StoredModel, TestGradients, make_scores
from persample.scanning.measure import ALL_QUANTITIES
from persample.scanning.store import Store
from persample.scanning.stored_gradients import StoredGradients

BATCH, ROUNDS = 64, 5
TIMED_EXAMPLES = 2048
SCANNED_EXAMPLES = (1024, 4096, 16384, 65536)
STORED_EXAMPLES, PROJECTION_SIZE = (1000, 10_000, 100_000), 1024
SHARD = 1024
SCAN_OPTIONS: dict[str, dict[str, Any]] = {
    "norms": {"quantities": ["loss", "norm"], "project": None},
    "norms, projection": {"quantities": ["loss", "norm"], "project": 512},
    "everything": {"project": 512},
    "everything, exact alignment": {"project": 512, "quantities": ALL_QUANTITIES},
}

Task = tuple[nn.Module, Any, Any]  # model, data, loss function


def make_image_task(count: int) -> Task:
    """A small convolutional net on 16 x 16 images."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(4, 64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return model, (torch.randn(count, 1, 16, 16), torch.randint(10, (count,))), nn.CrossEntropyLoss()


def make_text_task(count: int) -> Task:
    """A GPT of width 128 on 32 tokens."""
    model, _, _ = make_gpt(128, 2, 32, 1024, 2)
    tokens = torch.randint(1024, (count, 33))

    def compute_losses(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none").mean(1)

    return model, tokens, compute_losses


TASKS: dict[str, Callable[[int], Task]] = {"CNN": make_image_task, "GPT": make_text_task}


class ImageStream:
    """A dataset of constant images, which are made when they are read."""

    classes = None

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((1, 16, 16), i % 7 / 7), i % 10


def run_plain(model: nn.Module, data: Any, loss_fn: Any) -> None:
    """Run forward and backward passes over all the data."""
    for i in range(0, len(data[0] if isinstance(data, tuple) else data), BATCH):
        if isinstance(data, tuple):
            loss = loss_fn(model(data[0][i : i + BATCH]), data[1][i : i + BATCH])
        else:
            loss = loss_fn(model, data[i : i + BATCH]).mean()
        torch.autograd.grad(loss, list(model.parameters()))


def run_scan(task: Task, out: Path, options: Mapping[str, Any]) -> None:
    """Run a scan from the start."""
    model, data, loss_fn = task
    shutil.rmtree(out, ignore_errors=True)
    persample.scan(model, loss_fn, data, out=out, batch_size=BATCH, progress=False, **options)


def measure_times() -> dict[str, Any]:
    """For each model and set of options: ratio to plain passes, and milliseconds per example."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make_task in TASKS.items():
            task = make_task(TIMED_EXAMPLES)
            timers = {"plain": partial(time_call, partial(run_plain, *task))}
            for label, options in SCAN_OPTIONS.items():
                timers[label] = partial(time_call, partial(run_scan, task, Path(folder) / "out", options))
            times = time_in_turns(timers, ROUNDS, warm_up=1)  # the first scan also analyses the model
            ratios = {label: compute_ratios(times[label], times["plain"]) for label in SCAN_OPTIONS}
            results[name] = {
                "plain_ms_per_example": 1000 * statistics.median(times["plain"]) / TIMED_EXAMPLES,
                "ratios": {label: statistics.median(values) for label, values in ratios.items()},
                "spread": {label: [min(values), max(values)] for label, values in ratios.items()},
            }
            print(name, results[name], flush=True)
    return results


def measure_growth() -> list[dict[str, float]]:
    """Seconds, peak memory and bytes on disk, in a process for each number of examples."""
    results = []
    for count in SCANNED_EXAMPLES:
        command = [sys.executable, "-m", "benchmarks.scan", "--one", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(results[-1], flush=True)
    return results


def measure_scan(count: int) -> dict[str, float]:
    """Run a scan of `count` examples in this process and measure it."""
    model, _, loss_fn = make_image_task(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        seconds = time_call(partial(run_scan, (model, ImageStream(count), loss_fn), out, {}))
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    peak = read_status("VmHWM")  # not ru_maxrss of getrusage: it includes the peak of the parent process
    return {"examples": count, "seconds": seconds, "peak_bytes": peak, "bytes_on_disk": size}


def measure_queries() -> list[dict[str, float]]:
    """Seconds of each query, by the number of examples."""
    results = []
    spectrum = torch.arange(1, PROJECTION_SIZE + 1) ** -0.5
    for count in STORED_EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            stored = write_random_gradients(Store(folder), count, spectrum)
            tests = torch.randn(16, PROJECTION_SIZE) * spectrum
            calls = make_queries(stored, tests)
            results.append({"examples": count, **{name: time_call(call) for name, call in calls.items()}})
            print(results[-1], flush=True)
    return results


def write_random_gradients(store: Store, count: int, spectrum: Tensor) -> StoredGradients:
    """Fill a store with random gradients. `spectrum` holds the standard deviation of each entry."""
    generator = torch.Generator().manual_seed(0)
    for shard, start in enumerate(range(0, count, SHARD)):
        rows = torch.randn(min(SHARD, count - start), len(spectrum), generator=generator) * spectrum
        lengths = rows.norm(dim=1)
        unit = (rows / lengths[:, None]).half().numpy()
        store.write_shard(0, shard, {"length": lengths.double().numpy()}, unit)
    return StoredGradients(store, 0)


def make_queries(stored: StoredGradients, tests: Tensor) -> dict[str, Callable[[], Any]]:
    """The queries that are timed, by name."""

    def rank(method: Any) -> Any:
        gradients = TestGradients(tests, torch.ones(len(tests)), 1.0)
        return make_scores([StoredModel(stored)], [gradients], method, "auto", of_loss=True).rank(10)

    return {
        "neighbours of one": lambda: queries.find_neighbours(stored, 5, 10),
        "influence on 16": lambda: rank("tracin"),
        "influence on 16, whitened": lambda: rank("whitened"),
        "outliers": lambda: queries.find_outliers(stored, 10),
        "duplicates": lambda: queries.find_duplicates(stored, 0.1),
    }


def main() -> None:
    """Measure everything; write the results and their plot if `--json` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results; the plot is written beside it")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # one scan, in a process started by measure_growth
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_scan(options.one)))
        return
    results = {
        "machine": describe_machine(),
        "batch": BATCH,
        "times": measure_times(),
        "growth": measure_growth(),
        "questions": measure_queries(),
    }
    if options.json:
        from benchmarks.plots import draw_scan  # matplotlib would add to the measured memory

        write_json(options.json, results)
        print(f"wrote {draw_scan(options.json)}")


if __name__ == "__main__":
    main()
