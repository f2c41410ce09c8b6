"""The cost of `persample.monitor`, as a ratio to plain training: `python -m benchmarks.monitor`.

Runs of `EVERY` steps, of which one is measured, take turns with plain runs of the same steps. A GPT with 4 layers of
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


def make_gpt_steps(varied: bool) -> tuple[nn.Module, Callable[[], Sequence[Step]]]:
    """A language model, and a function that draws the steps of a run."""
    model, generator = GPT(128, 4, 128, VOCABULARY), random.Random(0)

    def make_step(ids: Tensor) -> Step:
        def step() -> None:
            model.zero_grad()
            logits = model(ids)[:, :-1]
            F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)).backward()

        return step

    def draw() -> list[Step]:
        shapes = [(generator.randint(6, 10), generator.randint(16, 120)) if varied else (8, 64) for _ in range(EVERY)]
        return [make_step(torch.randint(VOCABULARY, shape)) for shape in shapes]

    return model, draw


def make_cnn_steps() -> tuple[nn.Module, Callable[[], Sequence[Step]]]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return model, lambda: [step] * EVERY


WORKLOADS = {
    "GPT, fixed shape": lambda: make_gpt_steps(varied=False),
    "GPT, varied shapes": lambda: make_gpt_steps(varied=True),
    "CNN": make_cnn_steps,
}


def measure(name: str, rounds: int) -> dict[str, float | str]:
    """The ratio of a monitored to a plain run of `EVERY` steps."""
    torch.manual_seed(0)
    model, draw = WORKLOADS[name]()
    with persample.monitor(model, every=1):
        draw()[0]()  # what happens once for a model
    ratios = []
    for _ in range(rounds):
        steps = draw()
        gc.collect()
        plain = _time_run(steps)
        with persample.monitor(model, every=EVERY):
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
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {name: measure(name, options.rounds) for name in WORKLOADS}
    print(json.dumps(result, indent=1))
    if options.write:
        write_json(RESULT, {"every": EVERY, "rounds": options.rounds, "torch": torch.__version__, **result})


if __name__ == "__main__":
    main()
