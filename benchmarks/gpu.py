"""Everything that is worth knowing about a GPU, in one process: `python -m benchmarks.gpu [--peers DIRECTORY]`.

It takes about 10 minutes and writes one JSON file, with the machine in it. Nothing is sent. In this order:

1. The answers are compared with a loop over the samples. What is wrong is not measured.
2. Time and peak memory of a step, as ratios to a plain step, beside the peers that are installed. Products are in full
   float32 precision.
3. How often a warm step waits for the device (CUDA only), and its ops, as ratios to a plain step.
4. Private training steps, and steps compiled as one graph by `persample.compile`.

`--device cpu --quick` tries the command without a GPU, in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import compiled, launches, private, report, run, timing
from benchmarks.check import Reference, check_engines
from benchmarks.engines import ENGINES, Engine, Plain
from benchmarks.engines.base import format_error
from benchmarks.machine import describe_machine
from benchmarks.output import write_json
from benchmarks.peers import add_peers_option, find_peers
from benchmarks.rows import Rows, compute_clip_factors, compute_norm
from benchmarks.workloads import WORKLOADS, Residual, Workload, compute_loss, make_gpt

QUANTITIES = ("norms", "clip", "dense")
WITHOUT_LOOP = [engine for name, engine in ENGINES.items() if name != "loop"]
LARGE_ERROR = 1e-2  # of norms and clipped sums in float32
WARM_STEPS = 4


def make_large_resnet() -> tuple[nn.Module, Tensor, Tensor]:
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(before, after) for before, after in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return model, torch.randn(64, 3, 64, 64), torch.randint(10, (64,))


# Large enough to keep a GPU busy. Their rows are not computed: they would take gigabytes.
LARGE = [
    Workload("GPT d768 L12 T256 V32768, B 8", partial(make_gpt, 768, 12, 256, 32768, 8), "GPT d768"),
    Workload("ResNet 64..512, 64x64, B 64", make_large_resnet, "ResNet 512"),
]

QUICK = [Workload("GPT d8 L2 T4 V16, B 2", partial(make_gpt, 8, 2, 4, 16, 2), "GPT, tiny")]


class LargeReference(Reference):
    """Norms and clipped sum by a loop over the samples in float32 on the device, without keeping rows."""

    always_checked = ("norms",)

    def __init__(self, workload: Workload) -> None:
        model, x, labels = workload.build()
        parameters = dict(model.named_parameters())
        norms: list[Tensor] = []
        self.clip: Rows = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for sample, label in zip(x.split(1), labels.split(1), strict=True):
            gradient = torch.autograd.grad(compute_loss(model(sample), label), [*parameters.values()])
            norms.append(compute_norm(gradient))
            factor = compute_clip_factors(norms[-1])
            for total, part in zip(self.clip.values(), gradient, strict=True):
                total += factor * part
        self.norms = torch.stack(norms).cpu()
        self.clip = {name: total.detach().cpu() for name, total in self.clip.items()}

    def accepts(self, quantity: str, result: Any) -> bool:
        """Whether norms or a clipped sum are correct."""
        if quantity == "norms":
            return bool((result - self.norms).abs().max() <= LARGE_ERROR * self.norms.max())
        errors = compute_norm([result[name].detach() - total for name, total in self.clip.items()])
        return bool(errors <= LARGE_ERROR * compute_norm([*self.clip.values()]))


# ---- time and memory ----


def measure_workload(workload: Workload, is_large: bool, rounds: int) -> run.Table:
    """Check each engine, and measure the time and the memory of those that are correct, by quantity and engine."""
    quantities = [quantity for quantity in QUANTITIES if not (is_large and quantity == "dense")]
    # Wrong rows would be found by `dense`, which is too large here.
    engines = [engine for engine in WITHOUT_LOOP if not is_large or {"norms", "clip"} <= {*engine.quantities}]
    checked = check_engines(workload, engines, quantities, LargeReference if is_large else Reference)
    table: run.Table = {}
    for quantity in quantities:
        cells = run.make_cells(quantity, checked)
        correct = [one.engine for name, one in checked.items() if run.is_correct(cells, name) and one.engine]
        for name, times in timing.measure_times(workload, quantity, correct, rounds).items():
            cells[name] = {**cells.get(name, {}), **run.round_times(times)}
        for engine in [Plain(workload), *correct]:
            cells[engine.name]["peak"] = measure_peak(engine, "total" if engine.name == "plain" else quantity)
        table[quantity] = cells
    return table


def measure_peak(engine: Engine, quantity: str) -> int | None:
    """Bytes that a step takes on the device at most, beyond what was there before; None on a CPU."""
    device = engine.x.device
    if device.type == "cpu":
        return None
    engine.clear()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    result = engine.step(quantity)
    timing.wait_for(device)
    peak = torch.accelerator.max_memory_allocated(device) - before
    del result
    engine.clear()
    return peak


# ---- what a warm step waits for ----


def count_waits(workload: Workload) -> dict[str, dict[str, float | None]]:
    """For a plain step and each answer: the ops of a warm step, and how often it waits for the device."""
    engine, plain = ENGINES["ours"](workload), Plain(workload)
    found: dict[str, dict[str, float | None]] = {}
    for name, step in {
        "plain": partial(plain.step, "total"),
        "norms": partial(engine.step, "norms"),
        "clip": partial(engine.step, "clip"),
    }.items():
        for _ in range(WARM_STEPS):
            step()
        with launches.OpCounter() as counter:
            step()
        is_cuda = engine.x.device.type == "cuda"
        found[name] = {"ops": counter.launches, "waits": count_synchronisations(step) if is_cuda else None}
    return found


def count_synchronisations(step: Callable[[], Any]) -> int:
    """How often CUDA makes a step wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


# ---- private and compiled steps ----


def measure_private(workload: Workload, rounds: int) -> dict[str, Any]:
    """The time of private steps with a fixed batch, as ratios to plain training."""
    plain = private.Training(workload)
    found: dict[str, Any] = {}
    for kind in private.ENGINES:
        try:
            engine = private.build_engine(kind, workload)
        except Exception as error:
            found[kind.name] = {"failure": "not installed" if isinstance(error, ImportError) else format_error(error)}
            continue
        timers = {each.name: partial(timing.time_step, each, "train") for each in (plain, engine)}
        with timing.pause_collector():
            times = timing.time_in_turns(timers, rounds)
        ratios = timing.compute_quartiles(timing.compute_ratios(times[engine.name], times["plain"]))
        found[engine.name] = {"ratio": round(ratios[1], 3), "quartiles": [round(ratios[0], 3), round(ratios[2], 3)]}
    return found


def measure_compiled(workload: Workload, rounds: int) -> dict[str, Any]:
    """The time of compiled steps, as ratios to plain ones; the result is checked before."""
    device = torch.device(workload.device)

    def wait_after(step: Callable[[], Any]) -> Callable[[], Any]:
        def run_and_wait() -> Any:
            result = step()
            timing.wait_for(device)
            return result

        return run_and_wait

    return compiled.measure_workload(workload, rounds, wait_after)


# ---- all of it ----


def describe_device(device: torch.device) -> dict[str, Any]:
    """The device, its memory, and the versions that belong to it."""
    described: dict[str, Any] = {"device": device.type, "full precision": True}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device name": properties.name,
            "device memory GB": round(properties.total_memory / 1e9, 1),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
        }
    return {**describe_machine(), **described}


def choose_tasks(options: argparse.Namespace) -> Iterator[tuple[str, Workload, Callable[[Workload], Any]]]:
    """What is measured, in this order: the name of the part, the workload, and the function that measures it."""
    rounds = options.rounds or (2 if options.quick else timing.ROUNDS)
    small, large = (QUICK, []) if options.quick else (WORKLOADS, LARGE)
    chosen = [w for w in (*small, *large) if options.only.lower() in w.name.lower()]
    workloads = [replace(workload, device=options.device) for workload in chosen]
    large_names = {workload.name for workload in large}
    for workload in workloads:
        yield "steps", workload, partial(measure_workload, is_large=workload.name in large_names, rounds=rounds)
    for workload in workloads:
        yield "waits", workload, count_waits
    for workload in workloads:
        yield "private", workload, partial(measure_private, rounds=rounds)
    for workload in workloads if not options.quick else ():
        yield "compiled", workload, partial(measure_compiled, rounds=rounds)


def measure_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results by part and workload. What fails, or what there is no time for, is named in its place."""
    found: dict[str, dict[str, Any]] = {}
    end = time.perf_counter() + 60 * options.minutes
    for part, workload, measure in choose_tasks(options):
        results = found.setdefault(part, {})
        start = time.perf_counter()
        if start > end:
            results[workload.short] = {"failure": f"not measured: {options.minutes:g} minutes were over"}
            continue
        try:
            results[workload.short] = measure(workload)
        except Exception as error:
            results[workload.short] = {"failure": format_error(error), "text": traceback.format_exc(limit=-3)}
        print(f"{part}: {workload.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return found


def describe_results(found: dict[str, dict[str, Any]]) -> str:
    """The tables of time, and the other parts as lines."""
    tables = {name: table for name, table in found.get("steps", {}).items() if "failure" not in table}
    lines = []
    for quantity in QUANTITIES:
        measured = {name: table for name, table in tables.items() if quantity in table}
        if measured:
            lines.append(report.format_times(quantity, measured, [engine.name for engine in WITHOUT_LOOP]))
    for part in ("waits", "private", "compiled"):
        lines += [f"\n{part}", *(f"  {name}: {result}" for name, result in found.get(part, {}).items())]
    failures = [(part, name) for part, results in found.items() for name, cell in results.items() if "failure" in cell]
    return "\n".join([*lines, *(f"failed: {part}, {name}: {found[part][name]['failure']}" for part, name in failures)])


def main(arguments: list[str] | None = None) -> Path:
    """Measure, print and write. The result is the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="the device of torch (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one tiny model, two rounds, nothing compiled")
    parser.add_argument("--only", default="", metavar="TEXT", help="only workloads with TEXT in their name")
    parser.add_argument("--rounds", type=int, help=f"rounds of timing (default: {timing.ROUNDS})")
    parser.add_argument("--minutes", type=float, default=10, help="start nothing new after this time (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the file (default: %(default)s)")
    add_peers_option(parser)
    options = parser.parse_args(arguments)
    find_peers(options.peers)
    device = torch.device(options.device)
    if device.type != "cpu" and not torch.accelerator.is_available():
        parser.error(f"torch finds no device '{device}' here; --device cpu --quick tries the command without one")
    warnings.simplefilter("ignore")
    machine, start = describe_device(device), time.perf_counter()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = measure_all(options)
    print(describe_results(found))
    seconds = round(time.perf_counter() - start)
    write_json(options.output, {"machine": machine, "seconds": seconds, **found})
    print(
        f"\nwrote {options.output}. Nothing was sent. To share it, open an issue of the project with the file "
        "attached, or add it to benchmarks/results as gpu_NAME.json in a pull request. It names the processor, the "
        "device and the versions of libraries, and nothing else about you or your machine."
    )
    return options.output


if __name__ == "__main__":
    main()
