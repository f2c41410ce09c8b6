"""What a scan costs, and how it grows: per example, in memory and on disk, and the questions to it.

    python -m benchmarks.scan [--json benchmarks/results/scan.json]

Time is over that of a plain forward and backward of the same batches, which take turns with the scans; memory is the
highest resident memory of a process that scans. Questions are to stores of random gradients with a slowly falling
spectrum, the worst case of `duplicates`, by 1,024 numbers each.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import torch
from matplotlib import pyplot
from torch import Tensor, nn

import persample
from benchmarks.machine import machine
from benchmarks.workloads import gpt
from persample.scanning import queries
from persample.scanning.queries import StoredGradients
from persample.scanning.store import Store

BATCH, ROUNDS = 64, 5
EXAMPLES = (1024, 4096, 16384, 65536)
STORED, DIM = (1000, 10_000, 100_000), 1024
ASKED: dict[str, dict[str, Any]] = {
    "norms": {"quantities": ["loss", "norm"], "project": None},
    "norms, projection": {"quantities": ["loss", "norm"], "project": 512},
    "everything": {"project": 512},
}


def images(count: int) -> tuple[nn.Module, Any, Any]:
    """A small convolutional net on 16 x 16 images."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return model, (torch.randn(count, 1, 16, 16), torch.randint(10, (count,))), nn.CrossEntropyLoss()


def sentences(count: int) -> tuple[nn.Module, Any, Any]:
    """A GPT of width 128 on 32 tokens."""
    model, _, _ = gpt(128, 2, 32, 1024, 2)
    tokens = torch.randint(1024, (count, 33))

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none").mean(1)

    return model, tokens, losses


TASKS: dict[str, Callable[[int], tuple[nn.Module, Any, Any]]] = {"CNN": images, "GPT": sentences}


def plain(model: nn.Module, data: Any, loss_fn: Any) -> None:
    """A forward and backward pass over all the data."""
    for i in range(0, len(data[0] if isinstance(data, tuple) else data), BATCH):
        if isinstance(data, tuple):
            loss = loss_fn(model(data[0][i : i + BATCH]), data[1][i : i + BATCH])
        else:
            loss = loss_fn(model, data[i : i + BATCH]).mean()
        torch.autograd.grad(loss, list(model.parameters()))


def scanned(task: tuple[nn.Module, Any, Any], out: Path, asked: dict[str, Any]) -> None:
    """A scan from the start."""
    model, data, loss_fn = task
    shutil.rmtree(out, ignore_errors=True)
    persample.scan(model, loss_fn, data, out=out, batch_size=BATCH, progress=False, **asked)


def times() -> dict[str, Any]:
    """For each model and quantity, the ratio to plain passes, and the milliseconds for each example."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in TASKS.items():
            task = make(2048)
            ratios: dict[str, list[float]] = {asked: [] for asked in ASKED}
            own = []
            for turn in range(ROUNDS + 1):  # the first looks at the model
                own.append(seconds(lambda task=task: plain(*task)))
                for asked, options in ASKED.items():
                    taken = seconds(lambda task=task, options=options: scanned(task, Path(folder) / "out", options))
                    if turn:
                        ratios[asked].append(taken / own[-1])
            milliseconds = 1000 * statistics.median(own[1:]) / 2048
            found[name] = {
                "plain_ms_per_example": milliseconds,
                "ratios": {asked: statistics.median(part) for asked, part in ratios.items()},
                "spread": {asked: [min(part), max(part)] for asked, part in ratios.items()},
            }
            print(name, found[name], flush=True)
    return found


def growth() -> list[dict[str, float]]:
    """Seconds, peak memory and bytes on disk, in a process for each number of examples."""
    found = []
    for count in EXAMPLES:
        command = [sys.executable, "-m", "benchmarks.scan", "--one", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    return found


def one(count: int) -> None:
    """A scan of so many examples, which are made as they are read, and what it took."""

    class Endless:
        classes = None

        def __len__(self) -> int:
            return count

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.full((1, 16, 16), i % 7 / 7), i % 10

    model, _, loss_fn = images(1)
    with tempfile.TemporaryDirectory() as folder:
        taken = seconds(lambda: scanned((model, Endless(), loss_fn), Path(folder) / "out", {}))
        files = [path.stat().st_size for path in (Path(folder) / "out").rglob("*") if path.is_file()]
    answer = {"examples": count, "seconds": taken, "peak_bytes": peak(), "bytes_on_disk": sum(files)}
    print(json.dumps(answer))


def questions() -> list[dict[str, float]]:
    """Seconds for each question, by the number of examples."""
    found = []
    spectrum = torch.arange(1, DIM + 1) ** -0.5
    for count in STORED:
        with tempfile.TemporaryDirectory() as folder:
            store = Store(folder)
            generator = torch.Generator().manual_seed(0)
            for shard, start in enumerate(range(0, count, 1024)):
                rows = torch.randn(min(1024, count - start), DIM, generator=generator) * spectrum
                lengths = rows.norm(dim=1)
                unit = (rows / lengths[:, None]).half().numpy()
                store.write_shard(0, shard, {"length": lengths.double().numpy()}, unit)
            stored = StoredGradients(store, 0)
            tests = torch.randn(16, DIM) * spectrum
            asked: dict[str, Callable[[], Any]] = {
                "neighbours of one": lambda stored=stored: queries.find_neighbours(stored, 5, 10),
                "influence on 16": lambda stored=stored, tests=tests: queries.compute_products(stored, tests).topk(10),
                "influence on 16, whitened": lambda stored=stored, tests=tests: queries.compute_products(
                    stored, tests @ queries.compute_whitening(stored.compute_second_moment(scaled=True))
                ),
                "outliers": lambda stored=stored: queries.find_outliers(stored, 10),
                "duplicates": lambda stored=stored: queries.find_duplicates(stored, 0.1),
            }
            found.append({"examples": count, **{name: seconds(question) for name, question in asked.items()}})
            print(found[-1], flush=True)
    return found


def seconds(run: Callable[[], Any]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak() -> int:
    """The highest resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw(found: dict[str, Any], picture: Path) -> None:
    """The curves of growth."""
    canvas, (time_axes, space_axes, question_axes) = pyplot.subplots(1, 3, figsize=(11, 3.2))
    counts = [point["examples"] for point in found["growth"]]
    time_axes.plot(counts, [1000 * p["seconds"] / p["examples"] for p in found["growth"]], marker="o", color="#c8102e")
    time_axes.set_title("scan: ms for an example", loc="left")
    space_axes.plot(counts, [p["bytes_on_disk"] / 1e6 for p in found["growth"]], marker="o", label="on disk")
    space_axes.plot(counts, [p["peak_bytes"] / 1e6 for p in found["growth"]], marker="o", label="peak memory, of all")
    space_axes.set_title("scan: MB", loc="left")
    space_axes.legend(frameon=False)
    for name in list(found["questions"][0])[1:]:
        question_axes.plot(
            [p["examples"] for p in found["questions"]], [p[name] for p in found["questions"]], marker="o", label=name
        )
    question_axes.set_title("questions: seconds", loc="left")
    question_axes.legend(frameon=False, fontsize=7)
    for axes in (time_axes, space_axes, question_axes):
        axes.set_xscale("log")
        axes.set_xlabel("examples")
        axes.spines[["top", "right"]].set_visible(False)
    time_axes.set_ylim(bottom=0)
    space_axes.set_yscale("log")
    question_axes.set_yscale("log")
    canvas.tight_layout()
    canvas.savefig(picture, metadata={"Date": None})


def main() -> None:
    """Measures all of it, and writes it if it is told where to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures, and the picture beside")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    found = {"machine": machine(), "batch": BATCH, "times": times(), "growth": growth(), "questions": questions()}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        draw(found, options.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
