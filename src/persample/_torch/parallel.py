"""DistributedDataParallel and `fully_shard`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from persample._torch.lookup import Missing, find, read

_FSDP = "Recording under fully_shard"
_HOOK = "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"


def get_default_store() -> Any:
    """The store that the processes of the default process group share."""
    return find("torch.distributed.distributed_c10d._get_default_store", "Private training in several processes")()


def get_active_ddp() -> Any:
    """The DistributedDataParallel wrapper whose forward is running, None if there is none."""
    return read(DistributedDataParallel, "_get_active_ddp_module", "Recording under DistributedDataParallel")()


def get_fsdp_states(model: nn.Module) -> list[Any]:
    """The states of `fully_shard` in a model, each once. There are none without a process group."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if implementation is None or not torch.distributed.is_initialized():
        return []
    find_state = read(implementation, "_get_module_fsdp_state", _FSDP)
    states = {id(state): state for state in map(find_state, model.modules()) if state is not None}
    for state in states.values():
        _require_fsdp(state)
    return list(states.values())


def _require_fsdp(state: Any) -> None:
    """Raise before anything is recorded if a name is missing that is needed later, or only after an error."""
    get_fsdp_groups(state)
    read(state, "_root_post_backward_final_callback", _FSDP)
    if isinstance(missing := find(_HOOK, _FSDP), Missing):
        missing()


def get_fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that a state of `fully_shard` gathers and shards together; one before torch 2.12."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = read(state, "_fsdp_param_group", _FSDP)
    return [] if group is None else [group]


def get_fsdp_modules(state: Any) -> list[nn.Module]:
    """The modules that a state of `fully_shard` belongs to."""
    return list(read(state, "_modules", _FSDP))


def get_fsdp_context(state: Any) -> Any:
    """What all states of one root module share."""
    return read(state, "_state_ctx", _FSDP)


def is_unsharded_once(managed: Any) -> bool:
    """Whether a parameter of `fully_shard` has been gathered before, so that its unsharded tensor exists."""
    return hasattr(managed, "_unsharded_param")


def get_fsdp_forms(managed: Any) -> list[Tensor]:
    """The tensors that a module may hold for one parameter."""
    after_forward = getattr(managed, "_sharded_post_forward_param", None)
    return [managed.sharded_param, managed.unsharded_param, *([] if after_forward is None else [after_forward])]


def set_fsdp_hook_registration(group: Any, register: Callable[..., Any] | None) -> None:
    """Replace how a group attaches its backward hook to its module's inputs; None restores torch's own way."""
    read(group, "_register_post_backward_hook", _FSDP)
    if register is None:
        vars(group).pop("_register_post_backward_hook", None)
    else:
        group._register_post_backward_hook = register


def attach_fsdp_hook(group: Any, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, passed through the node by which a group notices the end of its module's backward."""
    return find(_HOOK, _FSDP).apply(group, *tensors)


def reset_fsdp_after_error(context: Any) -> None:
    """Prepare `fully_shard` for the next step after one that failed, where torch can do that."""
    if hasattr(state := context.all_states[0], "_reset_iter_state"):
        state._reset_iter_state()


def finish_fsdp_backward(context: Any) -> None:
    """Have `fully_shard` reduce and shard the gradients, as it does at the end of a backward pass.

    torch 2.15 notes at the start of a pass whether the user ends it, and forgets this at the first end.
    """
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    read(context.all_states[0], "_root_post_backward_final_callback", _FSDP)()


def is_managed_by_other_parallelism(module: nn.Module) -> bool:
    """Whether FSDP1 or `replicate` runs a module."""
    states = sys.modules.get("torch.distributed._composable_state")
    contract = sys.modules.get("torch.distributed._composable.contract")
    applied: Mapping[str, Any] | None = None if contract is None else read(contract, "_get_registry", _FSDP)(module)
    return "replicate" in (applied or ()) or (
        states is not None and read(states, "_get_module_state", _FSDP)(module) is not None
    )
