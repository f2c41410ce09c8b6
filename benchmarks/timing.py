"""Times as ratios to a plain step: engines take turns in one process, and a ratio is formed within a round.

Single timings on a shared machine mean little. What is done about it: in each round plain steps are timed before and
between those of the engines, a round's ratio is an engine's time over the median of that round's plain times, and a
figure is the median of the rounds' ratios, with their quartiles. The engines' order changes from round to round. The
last answer is dropped before the clock starts, as in a training loop, and no garbage is collected while it runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines import Engine, Plain
from benchmarks.workloads import Workload

ROUNDS = 15
FEWEST = 3  # rounds that even a slow engine takes part in
PATIENCE = 1.5  # seconds, after which it needs no more
ENDLESS = 5.0  # seconds of a single step, of which one is enough
BETWEEN = 2  # engines from one plain step to the next


@dataclass(frozen=True)
class Times:
    """An engine's ratios to plain: the median and the quartiles, the number of rounds, and the median time."""

    ratio: float
    quartiles: tuple[float, float]
    rounds: int
    milliseconds: float


def seconds(engine: Engine, quantity: str) -> float:
    """The time of one step."""
    engine.clear()
    gc.collect()
    start = time.perf_counter()
    answer = engine.step(quantity)
    elapsed = time.perf_counter() - start
    del answer
    engine.clear()
    return elapsed


def measure(
    workload: Workload, quantity: str, engines: Sequence[Engine], rounds: int = ROUNDS, patience: float = PATIENCE
) -> dict[str, Times]:
    """The times of the engines' steps, by their names, and of the plain one.

    The engines have made this step before: when their answers were checked.
    """
    plain = Plain(workload)
    ratios: dict[str, list[float]] = {engine.name: [] for engine in engines}
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    plain_times: list[float] = []
    gc.collect()
    gc.freeze()  # so that a collection between steps looks at the steps' own objects only
    gc.disable()
    try:
        seconds(plain, "total")  # warms up
        for i in range(rounds):
            base, taken = [], {}
            for j, engine in enumerate(_turned([e for e in engines if _goes_on(times[e.name], patience)], i)):
                if j % BETWEEN == 0:
                    base.append(seconds(plain, "total"))
                taken[engine.name] = seconds(engine, quantity)
            if not taken:
                break
            plain_times.append(statistics.median(base))
            for name, elapsed in taken.items():
                times[name].append(elapsed)
                ratios[name].append(elapsed / plain_times[-1])
    finally:
        gc.enable()
        gc.unfreeze()
    found = {name: _times(ratios[name], times[name]) for name in times}
    return {plain.name: _times([t / statistics.median(plain_times) for t in plain_times], plain_times), **found}


def _goes_on(times: list[float], patience: float) -> bool:
    fewest = 1 if max(times, default=0) > ENDLESS else FEWEST
    return len(times) < fewest or sum(times) < patience


def _turned(engines: list[Engine], by: int) -> list[Engine]:
    by %= max(1, len(engines))
    return engines[by:] + engines[:by]


def _times(ratios: list[float], times: list[float]) -> Times:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Times(middle, (low, high), len(ratios), 1000 * statistics.median(times))
