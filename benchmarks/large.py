"""A GPT-2 with 124 million parameters: time and peak memory of each kind of step, as ratios to plain steps.

    python -m benchmarks.large [--rounds 2] [--only TEXT] [--write]

Random weights, batch 8, length 256, in one process. The steps take turns, and a ratio is formed with the plain step of
the same round: forward and backward for recordings, and with SGD for training. Peak memory is the highest resident
memory during a step minus the resident memory before it, with the models loaded. The first step is the first private
step of the process, with the audit, the plans and the verification. The adapters (LoRA, rank 8, on the attention of
each block) are compared with plain training of the adapters. Needs transformers. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.memory import read_status, reset_peak
from benchmarks.output import RESULTS, write_json
from benchmarks.targets import LARGE_MEMORY, LARGE_TIME
from benchmarks.workloads import compute_loss
from persample._internal.text import format_table
from persample.private import PrivateOptimizer

RESULT = RESULTS / "large.json"
BATCH, LENGTH = 8, 256
RANK = 8


class GPT2(nn.Module):
    """GPT-2 of transformers; returns the logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


class Adapted(nn.Module):
    """A frozen layer with a low-rank update."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.layer(x) + self.up(self.down(x))
        return adapted


def add_adapters(model: GPT2) -> GPT2:
    """Freeze the model, and add an adapter to the attention of each block."""
    model.requires_grad_(False)
    for block in model.model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn, *block.attn.c_attn.weight.shape)
    return model


@dataclass
class Measured:
    """Seconds and peak bytes of one kind of step, in each round."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


class Steps:
    """The steps of one model. Each private step is made by an optimizer that stays."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.ids, self.labels = torch.randint(50257, (2, batch, length), generator=generator)

    def compute_loss(self) -> Tensor:
        return compute_loss(self.model(self.ids), self.labels)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def make_training(self, is_private: bool) -> Callable[[], None]:
        """A training step."""
        optimizer: Any = self.make_optimizer()
        if is_private:
            optimizer = PrivateOptimizer(
                optimizer,
                module=self.model,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                expected_batch_size=len(self.ids),
                loss_reduction="sum",
            )

        def train() -> None:
            optimizer.zero_grad()
            self.compute_loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return train

    def run_plain(self) -> None:
        self.compute_loss().backward()
        self.model.zero_grad()

    def _record(self, **options: Any) -> Any:
        with persample.record(self.model, loss_reduction="sum", **options) as grads:
            self.compute_loss().backward()
        return grads

    def compute_norms(self) -> None:
        self._record(keep="norms").norms()

    def clip(self) -> None:
        self._record().clip(1.0)

    def keep_clip(self) -> None:
        self._record(keep="clip", max_norm=1.0).clip()

    def compute_scan_row(self) -> None:
        """What a scan computes for each example: norms, alignment with the mean, a projection."""
        grads = self._record()
        grads.norms()
        grads.dot(grads.mean())
        grads.project(512)


def run_step(name: str, step: Callable[[], None], measured: Measured) -> None:
    """Measure one step, and print the result."""
    gc.collect()
    reset_peak()
    before, start = read_status("VmRSS"), time.perf_counter()
    step()
    measured.seconds.append(time.perf_counter() - start)
    measured.peaks.append(read_status("VmHWM") - before)
    print(f"{name}: {measured.seconds[-1]:.2f} s, {measured.peaks[-1] / 2**30:.2f} GB", flush=True)


# By name: the plain step that a step is compared with.
COMPARED = {
    "norms": "plain",
    "clip": "plain",
    'keep="clip"': "plain",
    "scan row": "plain",
    "private": "training",
    "first private step": "training",
    "adapters, norms": "adapters, plain",
    "adapters, private": "adapters, training",
}


def make_steps(own: Steps, private: Steps) -> dict[str, Callable[[], None]]:
    """Each kind of step by name. The model of the private steps is in private training from the first one."""
    return {
        "plain": own.run_plain,
        "training": own.make_training(is_private=False),
        "norms": own.compute_norms,
        "clip": own.clip,
        'keep="clip"': own.keep_clip,
        "scan row": own.compute_scan_row,
        "private": private.make_training(is_private=True),
    }


def choose_names(only: str) -> set[str]:
    """The steps with `only` in their names, and the steps that they are compared with."""
    names = {name for name in COMPARED if only in name}
    if any("private" in name for name in names):
        names |= {"private", "first private step"}
    return names | {COMPARED[name] for name in names}


def measure(rounds: int, only: str, batch: int, length: int) -> dict[str, Measured]:
    """Measure each step with `only` in its name, and the steps that it is compared with."""
    names = choose_names(only)
    steps: dict[str, Callable[[], None]] = {}
    if any(not name.startswith("adapters") for name in names):
        steps |= make_steps(*(Steps(GPT2(), batch, length) for _ in range(2)))
    if any(name.startswith("adapters") for name in names):
        adapted = make_steps(*(Steps(add_adapters(GPT2()), batch, length) for _ in range(2)))
        steps |= {f"adapters, {name}": step for name, step in adapted.items()}
    return measure_steps({name: step for name, step in steps.items() if name in names}, rounds)


def measure_steps(
    steps: dict[str, Callable[[], None]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, Measured]:
    """Run each step once and then in rounds. `before` is called before each step.

    The first run also starts threads and loads libraries. It is kept for private steps, as "first private step".
    """
    found = {name: Measured() for name in steps}
    for name, step in steps.items():
        before()
        first = Measured()
        run_step(f"{name}, first", step, first)
        if name == "private":
            found["first private step"] = first
    for _ in range(rounds):
        for name, step in steps.items():
            before()
            run_step(name, step, found[name])
    return found


def summarise(found: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """Seconds and GB, and their ratios to the plain step, as medians over the rounds."""
    results: dict[str, dict[str, float]] = {}
    for name, measured in found.items():
        results[name] = {
            "seconds": round(statistics.median(measured.seconds), 2),
            "GB": round(statistics.median(measured.peaks) / 2**30, 2),
        }
        if name in COMPARED:
            plain = found[COMPARED[name]]
            pairs = zip(measured.seconds, plain.seconds, strict=False)
            results[name]["time"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
            results[name]["memory"] = round(statistics.median(measured.peaks) / statistics.median(plain.peaks), 3)
    return results


def make_parser(description: str | None, result: Path) -> argparse.ArgumentParser:
    """The arguments of a run whose results are written to a file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples (default: %(default)s)")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {result.name}")
    return parser


def write_results(path: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write results with the machine and the setting."""
    setting = {"batch": options.batch, "length": options.length, "rounds": options.rounds}
    write_json(path, {"machine": describe_machine(), **setting, **results})


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--only", default="", help="measure only the steps with this text in their names")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = summarise(measure(options.rounds, options.only, options.batch, options.length))
    rows = [
        [
            name,
            f"{cell['time']:.2f}",
            f"{LARGE_TIME.get(name, '')}",
            f"{cell['memory']:.2f}",
            f"{LARGE_MEMORY.get(name, '')}",
        ]
        for name, cell in results.items()
        if "time" in cell
    ]
    print(format_table(rows, ["", "time", "goal", "memory", "goal"], right={1, 2, 3, 4}))
    if options.write:
        write_results(RESULT, options, {"steps": results})


if __name__ == "__main__":
    main()
