"""One of the processes of `tests.support.processes`: `python -m tests.support.worker RANK SIZE STORE`.

Each line of the standard input names a function. The answer is a line on the standard output: null or a traceback.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def main(rank: int, size: int, store: str) -> None:
    """Run functions until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what functions print is no answer
    torch.set_num_threads(1)
    # Only a deadlock takes as long as this: a process that waits for one that has failed is stopped before.
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)
    dist.destroy_process_group()


def run(module: str, function: str, arguments: dict[str, Any]) -> str | None:
    """Call a function; the traceback if it fails."""
    torch.manual_seed(0)
    try:
        inspect.unwrap(getattr(importlib.import_module(module), function))(**arguments)
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
