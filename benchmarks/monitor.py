"""The cost of `persample.monitor` and of other tools in a run, over plain training: `python -m benchmarks.monitor`.

Runs of `EVERY` steps take turns with plain runs of the same steps. The monitor measures one of them, and values are
computed in each. The validation batch is as large as that of the first step. A GPT with 4 layers of
width 128 with one fixed shape and with shapes that change in every step, and a small convolutional net. One thread,
processor time, after the first measured step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from benchmarks.output import RESULTS, write_json
from benchmarks.timing import compute_quartiles
from benchmarks.workloads import GPT

RESULT = RESULTS / "monitor.json"
EVERY = 20
VOCABULARY = 1000

Step = Callable[[], None]


Workload = tuple[nn.Module, Callable[[], Sequence[Step]], Callable[[nn.Module], Tensor]]


def make_gpt_steps(varied: bool) -> Workload:
    """A language model, a function that draws the steps of a run, and the loss of a validation batch."""
    model, generator = GPT(128, 4, 128, VOCABULARY), random.Random(0)

    def make_step(ids: Tensor) -> Step:
        def step() -> None:
            model.zero_grad()
            compute_loss(model, ids).backward()

        return step

    def compute_loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    def draw() -> list[Step]:
        shapes = [(generator.randint(6, 10), generator.randint(16, 120)) if varied else (8, 64) for _ in range(EVERY)]
        return [make_step(torch.randint(VOCABULARY, shape)) for shape in shapes]

    held_out = torch.randint(VOCABULARY, (8, 64))
    return model, draw, lambda model: compute_loss(model, held_out)


def make_cnn_steps() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return model, lambda: [step] * EVERY, lambda model: F.cross_entropy(model(x), y)


WORKLOADS = {
    "GPT, fixed shape": lambda: make_gpt_steps(varied=False),
    "GPT, varied shapes": lambda: make_gpt_steps(varied=True),
    "CNN": make_cnn_steps,
}


def is_norm_weight(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 1 and "bias" not in name


TOOLS: dict[str, Callable[..., Any]] = {
    "monitor": lambda model, validate: persample.monitor(model, every=EVERY),
    "value": lambda model, validate: persample.value(model, validation=validate),
    "value, refresh=10": lambda model, validate: persample.value(model, validation=validate, refresh=10),
    "value of norm layers, refresh=10": lambda model, validate: persample.value(
        model, validation=validate, refresh=10, parameters=is_norm_weight
    ),
}


def measure(name: str, tool: str, rounds: int) -> dict[str, float | str]:
    """The ratio of a run of `EVERY` steps with a tool to a plain run."""
    torch.manual_seed(0)
    model, draw, validate = WORKLOADS[name]()
    with persample.monitor(model, every=1):
        draw()[0]()  # what happens once for a model
    ratios = []
    for _ in range(rounds):
        steps = draw()
        gc.collect()
        plain = _time_run(steps)
        with TOOLS[tool](model, validate):
            ratios.append(_time_run(steps) / plain)
    low, median, high = compute_quartiles(ratios)
    return {"ratio": round(median, 3), "quartiles": f"{low:.3f} {high:.3f}"}


def _time_run(steps: Sequence[Step]) -> float:
    start = time.process_time()
    for step in steps:
        step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS, help="what to measure (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {tool: {name: measure(name, tool, options.rounds) for name in WORKLOADS} for tool in options.tools}
    print(json.dumps(result, indent=1))
    if options.write:
        write_json(RESULT, {"every": EVERY, "rounds": options.rounds, "torch": torch.__version__, **result})


if __name__ == "__main__":
    main()
