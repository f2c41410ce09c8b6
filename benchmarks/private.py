"""Private training beside ordinary training: whole steps, with noise and the optimizer, as ratios to a plain one.

    python -m benchmarks.private [--rounds 15] [--json benchmarks/results/private.json]

A step is a forward pass, a backward, the clipped sum, the noise and SGD's own step, of a batch that is there. Engines
take turns in one process, and a ratio is to the plain step of the same round; peak memory is that of a process each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine, memory
from benchmarks.engines.base import Engine
from benchmarks.timing import seconds
from benchmarks.workloads import WORKLOADS, Workload, loss_of, losses_of
from persample._internal.text import format_table

AT_MOST = {"GPT T 64": 1.15, "CNN": 1.25, "MLP": 1.4}
NOISE, BOUND = 1.0, 1.0


class Training(Engine):
    """A model with an optimizer; a step leaves its weights changed."""

    name = "plain"
    offers = ("train",)

    def setup(self) -> None:
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


class Ours(Training):
    name = "ours"
    passes: int | None = None

    def setup(self) -> None:
        from persample.private import PrivateOptimizer

        super().setup()
        self.optimizer = PrivateOptimizer(
            self.optimizer, module=self.model, noise_multiplier=NOISE, max_grad_norm=BOUND,
            expected_batch_size=len(self.x), loss_reduction="sum", recording={"passes": self.passes},
        )  # fmt: skip


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
            self.optimizer, noise_multiplier=NOISE, max_grad_norm=BOUND, expected_batch_size=len(self.x),
            loss_reduction="sum",
        )  # fmt: skip

    def loss(self) -> Tensor:
        return loss_of(self.wrapped(self.x), self.labels)


class OpacusGhost(Training):
    name = "Opacus ghost"

    def setup(self) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        def criterion(output: Tensor, labels: Tensor) -> Tensor:
            return losses_of(output, labels)

        super().setup()
        criterion.reduction = "sum"  # type: ignore[attr-defined]
        self.wrapped = GradSampleModuleFastGradientClipping(self.model, loss_reduction="sum", max_grad_norm=BOUND)
        self.optimizer = DPOptimizerFastGradientClipping(
            self.optimizer, noise_multiplier=NOISE, max_grad_norm=BOUND, expected_batch_size=len(self.x),
            loss_reduction="sum",
        )  # fmt: skip
        self.criterion = DPLossFastGradientClipping(self.wrapped, self.optimizer, criterion, loss_reduction="sum")

    def loss(self) -> Tensor:
        return self.criterion(self.wrapped(self.x), self.labels)  # type: ignore[return-value]


ENGINES: tuple[type[Training], ...] = (Ours, OursTwice, OpacusHooks, OpacusGhost)


def measured(workload: Workload, rounds: int) -> dict[str, Any]:
    """For each engine its ratio to plain with quartiles, and its peak memory over plain's."""
    plain = Training(workload)
    engines, notes = [], {}
    for kind in ENGINES:
        engine = kind(workload)
        try:
            engine.step("train")
        except Exception:  # it does not take the model as it is written
            engine = kind(workload, adapted=True)
            engine.step("train")
            notes[kind.name] = engine.note
        engines.append(engine)
    times: dict[str, list[float]] = {engine.name: [] for engine in (plain, *engines)}
    for i in range(rounds + 2):
        for engine in (plain, *engines):
            elapsed = seconds(engine, "train")
            if i >= 2:  # the first rounds warm up
                times[engine.name].append(elapsed)
    found: dict[str, Any] = {"plain ms": round(1e3 * statistics.median(times["plain"]), 2), "engines": {}}
    of_plain = memory.measure(Training, workload, "train", processes=3)
    assert isinstance(of_plain, memory.Peak)
    for engine in engines:
        ratios = [t / p for t, p in zip(times[engine.name], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        peak = memory.measure(type(engine), workload, "train", adapted=engine.name in notes)
        assert isinstance(peak, memory.Peak), peak
        found["engines"][engine.name] = {
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "memory": round(peak.later / of_plain.later, 2),
            "tensors": round(peak.tensors / of_plain.tensors, 2),
            **({"note": notes[engine.name]} if engine.name in notes else {}),
        }
    return found


def _make_row(name: str, cell: dict[str, Any]) -> list[str]:
    low, high = cell["quartiles"]
    memory_ratios = f"memory {cell['memory']:.2f}, of tensors {cell['tensors']:.2f}"
    return [name, f"{cell['ratio']:.2f} ({low:.2f}-{high:.2f})", memory_ratios, cell.get("note", "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to put the figures")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {}
    for workload in WORKLOADS:
        if workload.short in AT_MOST:
            results[workload.short] = found = measured(workload, given.rounds)
            print(f"\n{workload.name}: plain {found['plain ms']} ms; ours at most {AT_MOST[workload.short]}")
            print(format_table([_make_row(name, cell) for name, cell in found["engines"].items()], indent="  "))
    if given.json:
        given.json.write_text(json.dumps({"machine": machine.machine(), "steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
