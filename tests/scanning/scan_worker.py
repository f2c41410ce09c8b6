"""A process of a scan that several share; started by test_scan.py, as torchrun does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import persample
from tests.scanning.test_scan import QUICK, Stream, built

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, data, loss_fn, _ = built("images")
    for name, given in {"data": data, "stream": Stream(data)}.items():
        persample.scan(model, loss_fn, given, out=Path(sys.argv[1]) / name, **QUICK)
    print(f"scanned on {dist.get_rank()}")
    dist.destroy_process_group()
