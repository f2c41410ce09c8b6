"""Peak memory of a step, each measured in a separate process (Linux only).

A process builds the model and the batch. It runs one step with two samples, so that libraries are loaded and thread
pools started, and reads its resident memory. Then it runs whole steps, and frees each result before the next step.
Three numbers are measured:

- the peak of resident memory over all steps, minus the resident memory before them. This includes the trials and the
  planning of the first step;
- the same for the steps after the first, with the garbage of the first step collected;
- the largest memory of tensors at one time during a last step. It does not include buffers of libraries and
  fragmentation of the heap.

The processes are forked from a process that has imported everything and computed nothing.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import statistics
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from benchmarks.engines import Engine
from benchmarks.engines.base import format_error
from benchmarks.workloads import Workload

STEPS = 2


@dataclass(frozen=True)
class Peak:
    """Bytes: peak of all steps, peak of the steps after the first, peak of the tensors alone, size of the result."""

    peak: int
    later: int
    tensors: int
    result: int


def measure_peak(
    engine: type[Engine], workload: Workload, quantity: str, adapted: bool = False, processes: int = 1
) -> Peak | str:
    """Peak memory of the steps of an engine, as the median over some processes; or the name of the error."""
    peaks = []
    for _ in range(processes):
        peak = _measure_in_process(engine, workload, quantity, adapted)
        if isinstance(peak, str):
            return peak
        peaks.append(peak)
    peak, later = (round(statistics.median(getattr(p, part) for p in peaks)) for part in ("peak", "later"))
    return Peak(peak, later, peaks[0].tensors, peaks[0].result)


def _measure_in_process(*arguments: Any) -> Peak | str:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages from the profiler
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return "error: killed"
    finally:
        process.join()


def _send_peak(sender: Connection, engine: type[Engine], workload: Workload, quantity: str, adapted: bool) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sender.send(_measure_steps(engine(workload, adapted), quantity))
    except Exception as error:
        sender.send(format_error(error))


def _measure_steps(engine: Engine, quantity: str) -> Peak:
    x, labels = engine.x, engine.labels
    engine.x, engine.labels = x[:2], labels[:2]
    engine.step(quantity)
    engine.clear()
    engine.x, engine.labels = x, labels
    reset_peak()
    before = read_status("VmRSS")
    size = _count_bytes(engine.step(quantity))
    first = read_status("VmHWM")
    engine.clear()
    reset_peak()
    for _ in range(STEPS - 1):
        result = engine.step(quantity)
        del result
        engine.clear()
    later = read_status("VmHWM")
    return Peak(max(first, later) - before, later - before, _measure_tensors(engine, quantity), size)


def _measure_tensors(engine: Engine, quantity: str) -> int:
    """Largest number of bytes that tensors take at one time during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step(quantity)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(itertools.accumulate(changes), default=0)


def read_status(field: str) -> int:
    """A field of the status of this process, in bytes: VmRSS is the resident memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def reset_peak() -> None:
    """Collect garbage, return free memory to the system, and reset the peak of resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _count_bytes(result: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
