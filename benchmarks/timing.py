"""Time of the engines as a ratio to a plain step.

Single timings on a shared machine vary a lot. Therefore:

- All engines run in one process and take turns. Their order changes from round to round.
- Plain steps are timed in every round, before and between the steps of the engines. The ratio of a round is the time
  of the engine divided by the median of the plain times of that round.
- A result is the median of the ratios of all rounds, with quartiles.
- The last result is freed before the clock starts, as in a training loop, and the garbage collector does not run while
  a step is timed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.engines import Engine, Plain
from benchmarks.workloads import Workload

ROUNDS = 15
WARM_UP_ROUNDS = 2
MIN_ROUNDS = 3  # for engines that exceed the time budget
TIME_BUDGET = 1.5  # seconds per engine
SLOW_STEP = 5.0  # seconds; an engine with a slower step runs one round only
ENGINES_PER_PLAIN = 2  # engines from one plain step to the next


@dataclass(frozen=True)
class Times:
    """Ratio of an engine to a plain step: median, quartiles, number of rounds; and the median time of its step."""

    ratio: float
    quartiles: tuple[float, float]
    rounds: int
    milliseconds: float


@contextmanager
def pause_collector() -> Iterator[None]:
    """Inside the block the garbage collector runs only if it is called, and visits only objects that were made there.

    A collection of all objects between two steps would evict the model's data from the caches.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def time_call(function: Callable[[], object]) -> float:
    """Call a function; return the seconds that it takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_step(engine: Engine, quantity: str) -> float:
    """Seconds of one step of an engine. The result is freed after the clock has stopped."""
    engine.clear()
    gc.collect()
    wait_for(engine.x.device)
    start = time.perf_counter()
    result = engine.step(quantity)
    wait_for(engine.x.device)
    elapsed = time.perf_counter() - start
    del result
    engine.clear()
    return elapsed


def time_in_turns(
    timers: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = WARM_UP_ROUNDS
) -> dict[str, list[float]]:
    """Run each timer once per round; return the seconds of each, without the warm-up rounds."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(warm_up + rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: taken[warm_up:] for name, taken in times.items()}


def compute_ratios(times: Sequence[float], plain_times: Sequence[float]) -> list[float]:
    """Ratio to the plain step of the same round."""
    return [taken / plain for taken, plain in zip(times, plain_times, strict=True)]


def compute_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def measure_times(
    workload: Workload, quantity: str, engines: Sequence[Engine], rounds: int = ROUNDS, budget: float = TIME_BUDGET
) -> dict[str, Times]:
    """Time the steps of the engines and the plain step; return the results by engine name.

    The engines are not warmed up: they already ran this step when their results were checked.
    """
    plain = Plain(workload)
    ratios: dict[str, list[float]] = {engine.name: [] for engine in engines}
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    plain_times: list[float] = []
    with pause_collector():
        time_step(plain, "total")  # warm up
        for i in range(rounds):
            base, taken = [], {}
            active = [engine for engine in engines if _needs_rounds(times[engine.name], budget)]
            for j, engine in enumerate(_rotate(active, i)):
                if j % ENGINES_PER_PLAIN == 0:
                    base.append(time_step(plain, "total"))
                taken[engine.name] = time_step(engine, quantity)
            if not taken:
                break
            plain_times.append(statistics.median(base))
            for name, elapsed in taken.items():
                times[name].append(elapsed)
                ratios[name].append(elapsed / plain_times[-1])
    plain_median = statistics.median(plain_times)
    plain_ratios = [elapsed / plain_median for elapsed in plain_times]
    return {
        plain.name: _summarise(plain_ratios, plain_times),
        **{name: _summarise(ratios[name], times[name]) for name in times},
    }


def _needs_rounds(times: list[float], budget: float) -> bool:
    min_rounds = 1 if max(times, default=0) > SLOW_STEP else MIN_ROUNDS
    return len(times) < min_rounds or sum(times) < budget


def _rotate(engines: list[Engine], by: int) -> list[Engine]:
    by %= max(1, len(engines))
    return engines[by:] + engines[:by]


def _summarise(ratios: list[float], times: list[float]) -> Times:
    low, median, high = compute_quartiles(ratios)
    return Times(median, (low, high), len(ratios), 1000 * statistics.median(times))
