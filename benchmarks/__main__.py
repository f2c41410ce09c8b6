"""The time of dense per-sample gradients, their norms and their clipped sum, as ratios to a plain forward and backward.

The engines take turns in one process; a figure is the median of the rounds' ratios to the plain step of the same round.
Every answer is checked against the plain gradient, or against the dense one, before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import _per_sample_grad

import persample
from benchmarks.workloads import WORKLOADS, Workload, loss_of

Answer = dict[str, Tensor]
Engine = Callable[[nn.Module, Tensor, Tensor], Answer]


def plain(model: nn.Module, x: Tensor, labels: Tensor) -> Answer:
    loss_of(model(x), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours_dense(model: nn.Module, x: Tensor, labels: Tensor) -> Answer:
    with persample.record(model, loss_reduction="sum") as grads:
        loss_of(model(x), labels).backward()
    return grads.dense()


def ours_norms(model: nn.Module, x: Tensor, labels: Tensor) -> Answer:
    with persample.record(model, loss_reduction="sum", keep="norms") as grads:
        loss_of(model(x), labels).backward()
    norms = grads.norms()
    assert isinstance(norms, Tensor)
    return {"norms": norms}


def ours_clip(model: nn.Module, x: Tensor, labels: Tensor) -> Answer:
    with persample.record(model, loss_reduction="sum") as grads:
        loss_of(model(x), labels).backward()
    return grads.clip(1.0)


def torch_dense(model: nn.Module, x: Tensor, labels: Tensor) -> Answer:
    loss_of(_per_sample_grad.call_for_per_sample_grads(model, loss_reduction="sum")(x), labels).backward()
    return {name: p.grad_sample for name, p in model.named_parameters()}


def norms_of(rows: Answer) -> Answer:
    return {"norms": torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)}


def clip_of(rows: Answer) -> Answer:
    factors = (1.0 / norms_of(rows)["norms"]).clamp(max=1)
    return {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


ENGINES: dict[str, Engine] = {
    "dense": ours_dense,
    "norms": ours_norms,
    "clip": ours_clip,
    "torch dense": torch_dense,
    "torch norms": lambda *step: norms_of(torch_dense(*step)),
    "torch clip": lambda *step: clip_of(torch_dense(*step)),
}


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
        if hasattr(p, "grad_sample"):
            del p.grad_sample


def close(found: Answer, expected: Answer) -> bool:
    return all((found[name] - want).abs().max() <= 2e-3 * want.abs().max() for name, want in expected.items())


def verdicts(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, str]:
    """What to show in place of a time: the name of an error, or that the answer is wrong."""
    batch_gradient = {name: grad.clone() for name, grad in plain(model, x, labels).items()}
    clear(model)
    rows = ours_dense(model, x, labels)
    expected = {"dense": batch_gradient, "norms": norms_of(rows), "clip": clip_of(rows)}
    found: dict[str, str] = {}
    for name, engine in ENGINES.items():
        try:
            answer = engine(model, x, labels)
            if name.endswith("dense"):
                answer = {key: r.sum(0) for key, r in answer.items()}
            if not close(answer, expected[name.split()[-1]]):
                found[name] = "wrong"
        except Exception as error:
            found[name] = type(error).__name__
        clear(model)
    return found


def measure(workload: Workload, rounds: int) -> dict[str, float | str]:
    """Plain milliseconds, and each engine's ratio to it."""
    torch.manual_seed(0)
    model, x, labels = workload.make()
    failed = verdicts(model, x, labels)
    running: dict[str, Engine] = {"plain": plain, **{n: e for n, e in ENGINES.items() if n not in failed}}
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds + 1):
        for name, engine in running.items():
            start = time.perf_counter()
            engine(model, x, labels)
            clear(model)
            times[name].append(time.perf_counter() - start)
    base = times.pop("plain")[1:]  # the first round warms up
    row: dict[str, float | str] = {"plain": 1000 * statistics.median(base)}
    for name in ENGINES:
        if name in failed:
            row[name] = failed[name]
        else:
            row[name] = statistics.median(t / p for t, p in zip(times[name][1:], base, strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds; ratios to plain")
    print(f"{'workload':42}{'plain ms':>9}" + "".join(f"{name:>13}" for name in ENGINES))
    figures = {}
    for workload in WORKLOADS:
        if options.only in workload.name:
            row = figures[workload.name] = measure(workload, options.rounds)
            cells = [f"{cell:>13.2f}" if isinstance(cell, float) else f"{cell:>13}" for cell in list(row.values())[1:]]
            print(f"{workload.name:42}{row['plain']:>9.1f}" + "".join(cells), flush=True)
    if options.json:
        versions = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rounds": options.rounds}
        options.json.write_text(json.dumps({"versions": versions, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
