"""Time and memory of private training steps as ratios to steps of ordinary training.

    python -m benchmarks.private [--rounds 40] [--json benchmarks/results/private.json]

A step consists of forward, backward, clipped sum, noise and SGD. The batches are Poisson samples, so that each round
has another batch size, and are loaded before the clock starts. An engine and plain training take turns with the batch
of the round, and a ratio is formed with the plain step of the same round. Each engine is alone with plain training: an
engine that fills the caches would slow down the next one. The garbage collector does not run in a step. Peak memory is
measured in a separate process for each engine, with one batch size.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import memory
from benchmarks.engines.base import Engine
from benchmarks.engines.opacus import wrap_for_ghost_clipping
from benchmarks.engines.opake import make_clipped_grad, take_parameters
from benchmarks.machine import describe_machine
from benchmarks.output import write_json
from benchmarks.peers import add_peers_option, find_peers
from benchmarks.targets import PRIVATE_TIME
from benchmarks.timing import compute_quartiles, compute_ratios, pause_collector, time_in_turns, time_step
from benchmarks.workloads import WORKLOADS, Workload, compute_loss
from persample._internal.text import format_table

NOISE_MULTIPLIER, MAX_NORM = 1.0, 1.0
WARM_UP_ROUNDS = 50  # then most batch sizes have occurred: libraries generate code for products of a new size


class Training(Engine):
    """A model with an optimizer. A step changes the weights."""

    name = "plain"
    quantities = ("train",)

    def setup(self) -> None:
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.compute_loss().backward()
        self.optimizer.step()


class Ours(Training):
    name = "ours"
    passes: int | None = None

    def setup(self) -> None:
        from persample.private import PrivateOptimizer

        super().setup()
        self.optimizer = PrivateOptimizer(
            self.optimizer,
            module=self.model,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=MAX_NORM,
            expected_batch_size=len(self.x),
            loss_reduction="sum",
            recording={"passes": self.passes},
        )


class OursTwice(Ours):
    name = "ours, 2 passes"
    passes = 2


class OpacusHooks(Training):
    name = "Opacus hooks"

    def setup(self) -> None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        super().setup()
        self.wrapped = GradSampleModule(self.model, loss_reduction="sum")
        self.optimizer = DPOptimizer(
            self.optimizer,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=MAX_NORM,
            expected_batch_size=len(self.x),
            loss_reduction="sum",
        )

    def compute_loss(self) -> Tensor:
        return compute_loss(self.wrapped(self.x), self.labels)


class OpacusGhost(Training):
    name = "Opacus ghost"

    def setup(self) -> None:
        super().setup()
        self.wrapped, self.optimizer, self.criterion = wrap_for_ghost_clipping(
            self.model, self.optimizer, len(self.x), NOISE_MULTIPLIER, MAX_NORM
        )

    def compute_loss(self) -> Tensor:
        return self.criterion(self.wrapped(self.x), self.labels)


class Opake(Training):
    name = "Opake"

    def setup(self) -> None:
        from opake.dpsgd.noise import gaussian_noise
        from opake.random import key

        super().setup()
        self.run, self.state = make_clipped_grad(self.model, normalize_by=float(len(self.x)))
        self.add_noise, self.noise_state = gaussian_noise(noise_multiplier=NOISE_MULTIPLIER, key=key(0))

    def train(self) -> None:
        parameters = take_parameters(self.model)
        clipped, self.state = self.run(parameters, self.x, self.labels, state=self.state)
        noised, self.noise_state = self.add_noise(clipped, self.noise_state)
        for name, p in self.model.named_parameters():
            p.grad = noised.pytree[name]
        self.optimizer.step()


ENGINES: tuple[type[Training], ...] = (Ours, OursTwice, OpacusHooks, OpacusGhost, Opake)


def build_engine(kind: type[Training], workload: Workload) -> Training:
    """Build an engine and run one step; adapt the model if the engine does not support it.

    Raises:
        ImportError: The library is not installed.
    """
    try:
        engine = kind(workload)
        engine.step("train")
    except ImportError:
        raise
    except Exception:
        engine = kind(workload, adapted=True)
        engine.step("train")
    return engine


def draw_batches(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Poisson samples with the batch size of the workload as their mean, the same at each call."""
    _, x, labels = workload.build()
    x, labels = torch.cat([x, x]), torch.cat([labels, labels])
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.rand(len(x), generator=generator) < 0.5
        yield x[chosen], labels[chosen]


def make_timer(engine: Training, workload: Workload) -> Callable[[], float]:
    """A function that makes a step with the next batch, and returns its seconds."""
    batches = draw_batches(workload)

    def time_next() -> float:
        engine.x, engine.labels = next(batches)
        return time_step(engine, "train")

    return time_next


def measure_workload(workload: Workload, rounds: int) -> dict[str, Any]:
    """For each engine: the time of plain steps beside it; time with quartiles, and peak memory, as ratios to plain."""
    plain_peak = measure_peak(Training, workload, processes=3)
    results = {}
    for kind in ENGINES:
        try:
            engine = build_engine(kind, workload)
        except ImportError:
            print(f"{kind.name}: not installed")
            continue
        timers = {each.name: make_timer(each, workload) for each in (Training(workload), engine)}
        with pause_collector():
            times = time_in_turns(timers, rounds, WARM_UP_ROUNDS)
        low, median, high = compute_quartiles(compute_ratios(times[engine.name], times["plain"]))
        peak = measure_peak(type(engine), workload, adapted=bool(engine.note))
        results[engine.name] = {
            "plain ms": round(1e3 * statistics.median(times["plain"]), 2),
            "ratio": round(median, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "memory": round(peak.later / plain_peak.later, 2),
            "tensors": round(peak.tensors / plain_peak.tensors, 2),
            **({"note": engine.note} if engine.note else {}),
        }
    return results


def measure_peak(engine: type[Training], workload: Workload, **options: Any) -> memory.Peak:
    """Peak memory of training steps."""
    peak = memory.measure_peak(engine, workload, "train", **options)
    assert isinstance(peak, memory.Peak), peak
    return peak


def _make_row(name: str, cell: dict[str, Any]) -> list[str]:
    low, high = cell["quartiles"]
    time = f"{cell['ratio']:.2f} ({low:.2f}-{high:.2f})"
    return [
        name,
        f"{cell['plain ms']:.2f}",
        time,
        f"{cell['memory']:.2f}",
        f"{cell['tensors']:.2f}",
        cell.get("note", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results")
    add_peers_option(parser)
    options = parser.parse_args()
    find_peers(options.peers)
    warnings.simplefilter("ignore")
    results = {}
    header = ["", "plain ms", "time (quartiles)", "memory", "tensors alone", ""]
    for workload in WORKLOADS:
        if workload.short in PRIVATE_TIME:
            results[workload.short] = result = measure_workload(workload, options.rounds)
            print(f"\n{workload.name}: target {PRIVATE_TIME[workload.short]}")
            rows = [_make_row(name, cell) for name, cell in result.items()]
            print(format_table(rows, header, right={1, 3, 4}, indent="  "))
    if options.json:
        write_json(options.json, {"machine": describe_machine(), "steps": results})


if __name__ == "__main__":
    main()
