"""The GPT-2 of `benchmarks.large` under FSDP2 in two processes: memory of each process, and time.

    python -m benchmarks.sharded [--rounds 2] [--write]

Each process has one thread, half of the batch and half of the parameters. The steps take turns, and the processes meet
before each. Ratios are to the plain step of the same round and process. Needs transformers. Linux only.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.large import GPT2, Steps, make_parser, make_steps, measure_steps, summarise, write_results
from benchmarks.memory import read_status
from benchmarks.output import RESULTS
from persample._internal.text import format_table

RESULT = RESULTS / "sharded.json"
PROCESSES = 2
NAMES = ("plain", "training", "norms", "clip", 'keep="clip"', "first private step", "private")


def make_sharded() -> nn.Module:
    """GPT-2 with a group of sharded parameters for each block, and one for the rest."""
    model = GPT2()
    for block in model.model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def run_process(rank: int, folder: str, rounds: int, batch: int, length: int, queue: SimpleQueue[Any]) -> None:
    """Measure the steps of one process, and send the results."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    own, private = (Steps(make_sharded(), batch // PROCESSES, length) for _ in range(2))
    print(f"process {rank}: two models of {read_status('VmRSS') / 2**30:.2f} GB, imports included", flush=True)
    steps = make_steps(own, private)
    found = measure_steps({name: step for name, step in steps.items() if name in NAMES}, rounds, before=dist.barrier)
    queue.put((rank, summarise(found)))
    dist.barrier()
    dist.destroy_process_group()


def measure(rounds: int, batch: int, length: int) -> list[dict[str, dict[str, float]]]:
    """The results of each process. Raises if one of them fails."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (folder, rounds, batch, length, queue), nprocs=PROCESSES)
    results = dict(queue.get() for _ in range(PROCESSES))
    return [results[rank] for rank in range(PROCESSES)]


def main() -> None:
    options = make_parser(__doc__, RESULT).parse_args()
    results = measure(options.rounds, options.batch, options.length)
    rows = [
        [name, str(rank), f"{cell['GB']:.2f}", f"{cell['memory']:.2f}", f"{cell['time']:.2f}"]
        for name in NAMES
        for rank, cells in enumerate(results)
        if "time" in (cell := cells[name])
    ]
    print(format_table(rows, ["", "process", "GB", "memory", "time"], right={1, 2, 3, 4}))
    if options.write:
        write_results(RESULT, options, {"processes": results})


if __name__ == "__main__":
    main()
