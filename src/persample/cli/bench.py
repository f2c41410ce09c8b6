"""`persample bench`."""

from __future__ import annotations

import platform
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import persample
from persample._internal.text import format_table
from persample.batches import Batch
from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.user_code import add_target_argument, convert_errors, load_model_data_and_loss
from persample.losses import compute_sample_losses
from persample.terms import SETTING, choose_library, find_maker

_DESCRIPTION = """\
Measure the cost of per-sample gradients of a model on this machine: the time of a step (forward and
backward pass) with per-sample gradients, relative to a plain step. The steps alternate. Each result is the
median of the ratios of all rounds.

    $ persample bench my_model:to_check
    $ persample bench                       # a small convolutional net
    $ persample bench --machine             # which kernels are used here, and why

The function takes no arguments and returns a model, a batch and a loss, as for `persample check`. This command
does not check the gradients.
"""

_EXIT_CODES = {0: "measured", 2: "wrong arguments, or the model fails without persample", 3: "the model is refused"}

Step = Callable[[], Any]


def _add_arguments(parser: ArgumentParser) -> None:
    add_target_argument(parser, "returns (model, batch, loss)", nargs="?")
    parser.add_argument("--rounds", type=parse_positive, default=15, metavar="N", help="number of rounds (default: 15)")
    parser.add_argument("--machine", action="store_true", help="print which kernels are used on this machine, and why")
    parser.add_argument(
        "--dense", action="store_true", help="also measure the dense gradients, which take B times the model's memory"
    )


def _run(args: Namespace) -> int:
    if args.machine:
        found = describe_kernels()
        print(format_json(found) if args.json else format_table([[*row] for row in found.items()], indent=""))
        return 0
    with redirect_user_output(args), convert_errors(args.target or "the built-in model"):
        task = load_model_data_and_loss(args.target, "batch") if args.target else _make_default_task()
        model, batch, loss_fn = task
        result = measure_costs(model, batch, loss_fn, args.rounds, args.dense)
    print(format_json(result) if args.json else _format_result(result))
    return 0


def describe_kernels() -> dict[str, str]:
    """What was chosen for this machine, and why."""
    products = choose_library()
    return {
        "processor": find_maker() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "large products": f"{products.library}: {products.reason}",
        "setting": f"{SETTING}=torch, onednn or auto",
    }


def measure_costs(model: nn.Module, batch: Any, loss_fn: Any, rounds: int, dense: bool = False) -> dict[str, Any]:
    """Measure the time of a plain step, and the ratios of steps with per-sample gradients: median and quartiles."""
    size = Batch(batch, 0, None, isinstance(batch, (tuple, list)) and len(batch) == 2).size

    def compute_total_loss() -> torch.Tensor:
        return compute_sample_losses(model, batch, loss_fn).sum()

    def run_plain() -> None:
        torch.autograd.grad(compute_total_loss(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    def make_step(answer: Callable[[Any], Any], **options: Any) -> Step:
        def run() -> None:
            with persample.record(model, batch_size=size, loss_reduction="sum", **options) as grads:
                compute_total_loss().backward()
            answer(grads)

        return run

    steps: dict[str, Step] = {
        "norms": make_step(lambda g: g.norms(), keep="norms"),
        "clipped sum": make_step(lambda g: g.clip(), keep="clip", max_norm=1.0),
        "projection to 512": make_step(lambda g: g.project(512)),
    }
    if dense:
        steps["dense gradients"] = make_step(lambda g: g.dense())
    for run in (run_plain, *steps.values()):  # the first steps of a model fill caches
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in steps}
    plain_times = []
    for _ in range(rounds):
        plain_times.append(_measure_seconds(run_plain))
        for name, run in steps.items():
            times[name].append(_measure_seconds(run) / plain_times[-1])
    return {
        "samples": size,
        "plain_milliseconds": 1000 * statistics.median(plain_times),
        "ratios": {name: _summarise_ratios(ratios) for name, ratios in times.items()},
    }


def _measure_seconds(run: Step) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _summarise_ratios(ratios: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": quartiles[1], "lower": quartiles[0], "upper": quartiles[2]}


def _make_default_task() -> tuple[nn.Module, Any, nn.Module]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))), nn.CrossEntropyLoss()


def _format_result(answer: dict[str, Any]) -> str:
    title = f"a plain step of {answer['samples']} samples: {answer['plain_milliseconds']:.1f} ms"
    subtitle = "time relative to it, median (quartiles):"
    rows = [
        [name, f"{spread['median']:.2f}", f"({spread['lower']:.2f} to {spread['upper']:.2f})"]
        for name, spread in answer["ratios"].items()
    ]
    return "\n".join([title, subtitle, format_table(rows, right={1}, indent="  ")])


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
