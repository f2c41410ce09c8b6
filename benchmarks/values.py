"""The cost of `persample.value` over a plain step: `python -m benchmarks.values`.

Steps with a tool take turns with plain steps; processor time of one thread. "two passes" is the arithmetic that no way
of computing values can do without: a plain step, and a forward and backward pass of the examples of validation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from benchmarks.monitor import make_cnn_steps
from benchmarks.output import RESULTS, write_json
from benchmarks.timing import compute_quartiles
from benchmarks.workloads import GPT

RESULT = RESULTS / "values.json"
REFRESH, STEPS = 20, 20

Draw = Callable[[int], tuple[Tensor, Tensor]]


def make_mlp() -> tuple[nn.Module, Draw, int]:
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), lambda n: (torch.randn(n, 784), torch.randint(10, (n,))), 256


def make_gpt() -> tuple[nn.Module, Draw, int]:
    return GPT(128, 4, 128, 1000), lambda n: (torch.randint(1000, (n, 64)), torch.randint(1000, (n, 64))), 8


def make_cnn() -> tuple[nn.Module, Draw, int]:
    return make_cnn_steps()[0], lambda n: (torch.randn(n, 3, 32, 32), torch.randint(10, (n,))), 32


WORKLOADS = {"MLP": make_mlp, "GPT": make_gpt, "CNN": make_cnn}


def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def measure(name: str, share: float, rounds: int) -> tuple[str, dict[str, str]]:
    """The workload, with a validation batch that has a share of the batch's size, and ratios to a plain step.

    The ratios are medians, with the quartiles.
    """
    torch.manual_seed(0)
    model, draw, size = WORKLOADS[name]()
    count = max(2, int(share * size))
    (x, y), (held_out, labels) = draw(size), draw(count)

    def step() -> None:
        model.zero_grad()
        compute_loss(model(x), y).backward()

    def step_with_validation() -> None:
        model.zero_grad()
        out = model(torch.cat([x, held_out]))
        (compute_loss(out[:size], y) + compute_loss(out[size:], labels)).backward()

    def validate(model: Any) -> Tensor:
        return compute_loss(model(held_out), labels)

    def run_two_passes() -> None:
        torch.autograd.grad(validate(model), list(model.parameters()))
        step()

    adam = torch.optim.AdamW(model.parameters())
    runs: dict[str, tuple[Callable[[], None], Callable[[], Any] | None]] = {
        "plain": (step, None),
        "two passes": (run_two_passes, None),
        "value": (step, lambda: persample.value(model, validation=validate)),
        "value(validation=n)": (step_with_validation, lambda: persample.value(model, validation=count)),
        f"value(refresh={REFRESH})": (step, lambda: persample.value(model, validation=validate, refresh=REFRESH)),
        f"value(refresh={REFRESH}, AdamW)": (
            step,
            lambda: persample.value(model, validation=validate, refresh=REFRESH, optimizer=adam),
        ),
    }
    times: dict[str, list[float]] = {run: [] for run in runs}
    for i in range(rounds + 1):
        for run, (once, make_tool) in runs.items():
            tool = None if make_tool is None else make_tool()
            start = time.process_time()
            for _ in range(STEPS):
                once()
            times[run].append(time.process_time() - start)
            if tool is not None:
                tool.stop()
        if i == 0:  # what happens once for a model
            times = {run: [] for run in runs}
    ratios = {run: [a / b for a, b in zip(own, times["plain"], strict=True)] for run, own in times.items()}
    quartiles = {run: compute_quartiles(own) for run, own in ratios.items() if run != "plain"}
    ratios_in_words = {run: f"{median:.2f} ({low:.2f} to {high:.2f})" for run, (low, median, high) in quartiles.items()}
    return f"{name}, {count} examples of validation beside {size}", ratios_in_words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = dict(measure(name, share, options.rounds) for name in WORKLOADS for share in (1.0, 0.125))
    print(json.dumps(result, indent=1))
    if options.write:
        write_json(RESULT, {"steps": STEPS, "rounds": options.rounds, "torch": torch.__version__, **result})


if __name__ == "__main__":
    main()
