"""One of two processes of private training: `python -m tests.support.failing_process RANK STORE KIND`."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persample.private import PrivateOptimizer


def main(rank: int, store: str, kind: str) -> None:
    """Make two steps; in the second, the second process has a loss that mixes samples."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=30)
    )
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        net = fully_shard(net)
    else:
        net = DistributedDataParallel(net)
    optimizer = PrivateOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        module=net,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=3,
        distributed=True,
    )
    for step in range(3):
        optimizer.zero_grad()
        out = net(torch.randn(3, 4))
        (out.softmax(0) if rank == 1 and step == 1 else out).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
