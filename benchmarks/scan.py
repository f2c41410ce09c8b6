"""Cost of a scan and its growth: time per example, memory, space on disk, and the time of queries.

    python -m benchmarks.scan [--json benchmarks/results/scan.json]

Time is a ratio to plain forward and backward passes over the same batches, which take turns with the scans: elapsed
time with all cores, and processor time with one thread. Scans choose their batches themselves, and the plain passes
have the same. For the CNN, the arithmetic that a scan needs is timed as well (`benchmarks.scan_floor`). Memory is the
peak of resident memory of a process that runs a scan. Queries are run on stores of random gradients with 1,024 numbers
each. Their spectrum decays slowly, which is the worst case for `duplicates`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.memory import read_status
from benchmarks.output import write_json
from benchmarks.scan_floor import make_floors
from benchmarks.timing import compute_ratios, time_call, time_in_turns
from benchmarks.workloads import make_gpt
from persample._internal.memory import keep_freed_memory
from persample.scanning import queries
from persample.scanning.influence import StoredModel, TestGradients, make_scores
from persample.scanning.measure import ALL_QUANTITIES
from persample.scanning.store import Store
from persample.scanning.stored_gradients import StoredGradients

BATCH, ROUNDS, FLOOR_ROUNDS = 64, 4, 40
TIMED_EXAMPLES = {"CNN": 8192, "GPT": 1536}
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


def run_plain(model: nn.Module, data: Any, loss_fn: Any, batch: int) -> None:
    """Run forward and backward passes over all the data."""
    for i in range(0, len(data[0] if isinstance(data, tuple) else data), batch):
        if isinstance(data, tuple):
            loss = loss_fn(model(data[0][i : i + batch]), data[1][i : i + batch])
        else:
            loss = loss_fn(model, data[i : i + batch]).mean()
        torch.autograd.grad(loss, list(model.parameters()))


def run_scan(task: Task, out: Path, options: Mapping[str, Any]) -> persample.Scan:
    """Run a scan from the start."""
    model, data, loss_fn = task
    shutil.rmtree(out, ignore_errors=True)
    return persample.scan(model, loss_fn, data, out=out, progress=False, **options)


def time_processor(call: Callable[[], Any]) -> float:
    """Seconds of processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_times() -> dict[str, Any]:
    """For each model and set of options: ratio to plain passes, and milliseconds per example."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        for name, make_task in TASKS.items():
            torch.manual_seed(0)
            task = make_task(TIMED_EXAMPLES[name])
            batch = run_scan(task, out, SCAN_OPTIONS["norms"]).settings["batch_size"]
            calls: dict[str, Callable[[], Any]] = {"plain": partial(run_plain, *task, batch)}
            calls |= {label: partial(run_scan, task, out, options) for label, options in SCAN_OPTIONS.items()}
            elapsed = time_in_turns({label: partial(time_call, call) for label, call in calls.items()}, ROUNDS, 1)
            with use_threads(1):
                timers = {label: partial(time_processor, call) for label, call in calls.items()}
                one_thread = time_in_turns(timers, ROUNDS, 1)
            results[name] = {
                "examples": TIMED_EXAMPLES[name],
                "batch": batch,
                **summarise_times(elapsed, TIMED_EXAMPLES[name]),
                "one thread": summarise_times(one_thread, TIMED_EXAMPLES[name]),
            }
            print(name, json.dumps(results[name], indent=1), flush=True)
    return results


def summarise_times(times: Mapping[str, list[float]], examples: int) -> dict[str, Any]:
    """Milliseconds of a plain pass per example, and the ratios of everything else to it."""
    ratios = {label: compute_ratios(taken, times["plain"]) for label, taken in times.items() if label != "plain"}
    return {
        "plain_ms_per_example": 1000 * statistics.median(times["plain"]) / examples,
        "ratios": {label: statistics.median(values) for label, values in ratios.items()},
        "spread": {label: [min(values), max(values)] for label, values in ratios.items()},
    }


def measure_floor(batch: int) -> dict[str, Any]:
    """The arithmetic of a scan of the CNN as a ratio to a plain pass, in processor time of one thread."""
    torch.manual_seed(0)
    model, (images, labels), loss_fn = make_image_task(batch)
    calls: dict[str, Callable[[], Any]] = {
        "plain": partial(run_plain, model, (images, labels), loss_fn, batch),
        **make_floors(model, images, labels),
    }
    keep_freed_memory()  # as recordings do
    with use_threads(1):
        times = time_in_turns({name: partial(time_processor, call) for name, call in calls.items()}, FLOOR_ROUNDS)
    results = summarise_times(times, batch)
    print("floor", json.dumps(results, indent=1), flush=True)
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
    start = time.monotonic()
    machine, times = describe_machine(), measure_times()
    results = {
        "machine": machine,
        "times": times,
        "floor": measure_floor(times["CNN"]["batch"]),
        "growth": measure_growth(),
        "questions": measure_queries(),
    }
    print(f"took {time.monotonic() - start:.0f} s")
    if options.json:
        from benchmarks.plots import draw_scan  # matplotlib would add to the measured memory

        write_json(options.json, results)
        print(f"wrote {draw_scan(options.json)}")


if __name__ == "__main__":
    main()
