"""Which processes a model is trained by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from persample import _torch
from persample.distributed.base import Processes
from persample.distributed.ddp import Replicated
from persample.distributed.fsdp import Sharded
from persample.errors import PerSampleError


def processes_of(model: nn.Module) -> Processes:
    """The processes that a model is trained by."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Processes()
    states = _torch.get_fsdp_states(model)
    over = Sharded(model, states) if states else Replicated(model)
    _refuse_other_ways(model, states, over)
    return over


def _refuse_other_ways(model: nn.Module, states: Sequence[Any], over: Processes) -> None:
    """Refuses what trains a model in another way: FSDP1, the older `replicate`, and tensor parallelism."""
    known = {id(module) for state in states for module in _torch.get_fsdp_modules(state)}
    for name, module in model.named_modules():
        if id(module) not in known and _torch.is_managed_by_other_parallelism(module):
            raise PerSampleError(
                f"'{name}', a {type(module).__name__}, is run by another part of torch.distributed than recordings "
                "work with, which are DistributedDataParallel and torch.distributed.fsdp.fully_shard."
            )
    for name, p in model.named_parameters():
        if hasattr(p, "full_tensor") and over.used(p) is p and p.requires_grad:
            raise PerSampleError(
                f"'{name}' is a DTensor that fully_shard did not make of a parameter of this model: record the whole "
                "of what it was given. Tensor parallelism is not supported."
            )
