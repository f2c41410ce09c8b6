"""Peak memory of a step, each in a process of its own (Linux only).

A process builds the model and the batch, makes one step with two samples, so that libraries are loaded and thread pools
started, and notes its resident memory. Then come whole steps, each answer dropped before the next. What they take is
the highest resident memory of the process less what was noted. It is given for all steps, the first with what is tried
and planned in it included, and for the later ones, once the first's garbage has been collected. A last step tells how
much tensors took at once, which is what the libraries' own buffers and a heap with gaps are not part of.

The processes are forked from one that has imported everything and computed nothing.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from benchmarks.engines import Engine
from benchmarks.workloads import Workload

STEPS = 2


@dataclass(frozen=True)
class Peak:
    """Bytes: the peak of all steps, that of the steps after the first, of the tensors alone, and the answer's size."""

    peak: int
    later: int
    tensors: int
    result: int


def measure(
    engine: type[Engine], workload: Workload, quantity: str, adapted: bool = False, processes: int = 1
) -> Peak | str:
    """The peak memory of an engine's steps, the median of some processes; or the name of the error."""
    peaks = []
    for _ in range(processes):
        peak = _in_a_process(engine, workload, quantity, adapted)
        if isinstance(peak, str):
            return peak
        peaks.append(peak)
    peak, later = (round(statistics.median(getattr(p, part) for p in peaks)) for part in ("peak", "later"))
    return Peak(peak, later, peaks[0].tensors, peaks[0].result)


def _in_a_process(*work: Any) -> Peak | str:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(theirs, *work))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        return "error: killed"
    finally:
        process.join()


def _report(to: Connection, engine: type[Engine], workload: Workload, quantity: str, adapted: bool) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            to.send(_peak_of_steps(engine(workload, adapted), quantity))
    except Exception as error:
        to.send(f"error: {type(error).__name__}")


def _peak_of_steps(engine: Engine, quantity: str) -> Peak:
    x, labels = engine.x, engine.labels
    engine.x, engine.labels = x[:2], labels[:2]
    engine.step(quantity)
    engine.clear()
    engine.x, engine.labels = x, labels
    _collect()
    before = _resident("VmRSS")
    result = _bytes(engine.step(quantity))
    first = _resident("VmHWM")
    engine.clear()
    _collect()
    for _ in range(STEPS - 1):
        answer = engine.step(quantity)
        del answer
        engine.clear()
    later = _resident("VmHWM")
    return Peak(max(first, later) - before, later - before, _most_in_tensors(engine, quantity), result)


def _most_in_tensors(engine: Engine, quantity: str) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step(quantity)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(itertools.accumulate(changes), default=0)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def _collect() -> None:
    """Frees what can be freed, gives it back to the system, and forgets the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _bytes(answer: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(answer))


def _tensors(answer: Any) -> Iterable[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor))
