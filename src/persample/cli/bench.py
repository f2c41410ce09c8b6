"""`persample bench`."""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import persample
from persample.batches import Batch
from persample.cli.check import subject_of
from persample.cli.command import Command, apart, as_json, positive
from persample.cli.entry import UsageError, in_one_line, told
from persample.errors import PerSampleError
from persample.losses import compute_sample_losses

_BENCH = """\
Measure on this machine what per-sample gradients of a model cost: the time of a forward and backward pass
with them, over that of a plain one. The two take turns, and a figure is the median of the turns' ratios.

    $ persample bench my_model:to_check
    $ persample bench                       a small convolutional net

The function returns a model, a batch and a loss, as for `persample check`, which tells whether they are right.
"""

Step = Callable[[], Any]


def _arguments(parser: ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 measured, 2 an error in what was asked, 3 the model is refused"
    parser.add_argument("target", nargs="?", metavar="module:function", help="a module (my.module) or a file")
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="how many turns (15)")
    parser.add_argument("--dense", action="store_true", help="the gradients themselves too, B times the model's size")


def _run(args: Namespace) -> int:
    with apart(args):
        model, batch, loss_fn = subject_of(args.target) if args.target else _small()
        try:
            answer = measured(model, batch, loss_fn, args.rounds, args.dense)
        except PerSampleError as error:
            raise UsageError(f"{args.target}: {in_one_line(error)}", code=3) from error
        except Exception as error:
            raise UsageError(f"{args.target}: the model or loss fails by itself: {told(error)}") from error
    print(as_json(answer) if args.json else _as_text(answer))
    return 0


def measured(model: nn.Module, batch: Any, loss_fn: Any, rounds: int, dense: bool = False) -> dict[str, Any]:
    """The time of a plain step, and for each quantity the median of ratios to it, with quartiles."""
    size = Batch(batch, 0, None, isinstance(batch, (tuple, list)) and len(batch) == 2).size

    def forward() -> torch.Tensor:
        return compute_sample_losses(model, batch, loss_fn).sum()

    def plain() -> None:
        torch.autograd.grad(forward(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    def step(answer: Callable[[Any], Any], **options: Any) -> Step:
        def run() -> None:
            with persample.record(model, batch_size=size, loss_reduction="sum", **options) as grads:
                forward().backward()
            answer(grads)

        return run

    steps: dict[str, Step] = {
        "norms": step(lambda g: g.norms(), keep="norms"),
        "clipped sum": step(lambda g: g.clip(), keep="clip", max_norm=1.0),
        "projection to 512": step(lambda g: g.project(512)),
    }
    if dense:
        steps["dense gradients"] = step(lambda g: g.dense())
    for run in (plain, *steps.values()):  # the first step of a model looks at it more closely
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in steps}
    of_plain = []
    for _ in range(rounds):
        of_plain.append(_seconds(plain))
        for name, run in steps.items():
            times[name].append(_seconds(run) / of_plain[-1])
    return {
        "samples": size,
        "plain_milliseconds": 1000 * statistics.median(of_plain),
        "ratios": {name: _spread(ratios) for name, ratios in times.items()},
    }


def _seconds(run: Step) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _spread(ratios: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": quartiles[1], "lower": quartiles[0], "upper": quartiles[2]}


def _small() -> tuple[nn.Module, Any, nn.Module]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))), nn.CrossEntropyLoss()


def _as_text(answer: dict[str, Any]) -> str:
    lines = [f"a plain step of {answer['samples']} samples: {answer['plain_milliseconds']:.1f} ms", "times that:"]
    width = max(map(len, answer["ratios"]))
    for name, spread in answer["ratios"].items():
        lines.append(f"  {name:{width}}  {spread['median']:.2f}  ({spread['lower']:.2f} to {spread['upper']:.2f})")
    return "\n".join(lines)


COMMAND = Command("measure what per-sample gradients of a model cost here", _BENCH, _arguments, _run)
