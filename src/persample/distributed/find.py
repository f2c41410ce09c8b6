"""Find out how a model is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from persample import _torch
from persample._internal.models import SeveralModels
from persample.distributed.base import Processes
from persample.distributed.ddp import Replicated
from persample.distributed.fsdp import Sharded
from persample.errors import PerSampleError


def find_processes(model: nn.Module) -> Processes:
    """The processes that train a model.

    Raises:
        PerSampleError: the model is distributed in a way that recordings do not support.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Processes()
    if isinstance(model, SeveralModels):
        raise PerSampleError("Several models in one recording are not available under several processes.")
    states = _torch.get_fsdp_states(model)
    processes = Sharded(model, states) if states else Replicated(model)
    _refuse_other_parallelism(model, states, processes)
    return processes


def _refuse_other_parallelism(model: nn.Module, states: Sequence[Any], processes: Processes) -> None:
    """Refuse FSDP1, the older `replicate`, and tensor parallelism."""
    known = {id(module) for state in states for module in _torch.get_fsdp_modules(state)}
    for name, module in model.named_modules():
        if id(module) not in known and _torch.is_managed_by_other_parallelism(module):
            raise PerSampleError(
                f"'{name}', a {type(module).__name__}, is distributed in a way that recordings do not support. "
                "Supported are DistributedDataParallel and torch.distributed.fsdp.fully_shard (FSDP2)."
            )
    for name, p in model.named_parameters():
        if hasattr(p, "full_tensor") and processes.get_used(p) is p and p.requires_grad:
            raise PerSampleError(
                f"'{name}' is a DTensor that does not come from fully_shard of this model. Record the whole model that "
                "fully_shard was called on. Tensor parallelism is not supported."
            )
