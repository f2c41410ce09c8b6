"""Several processes that share a batch: what stands for a parameter in the forward pass, and how sums go over them.

Under DistributedDataParallel and FSDP2 (`fully_shard`) each process has samples of its own, and all use the same
parameters, which each has whole or a shard of. The rows of a recording are those of the process's own samples, and need
no other process. Sums over the samples are over those of all processes: all have to ask for them, as all have to call
backward. Every process then takes part in the same collectives in the same order, whatever its samples are, and if it
has none.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from persample.errors import PerSampleError
from persample.graph import nodes_behind

if TYPE_CHECKING:
    from persample.tracker import Tracker


def processes_of(model: nn.Module) -> Processes:
    """The processes that a model is trained by."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Processes()
    states = fsdp_states(model)
    over = Sharded(model, states) if states else Replicated(model)
    _refuse_other_ways(model, states, over)
    return over


class Processes:
    """One process, alone: all sums are its own."""

    def used(self, parameter: Tensor) -> Tensor:
        """The tensor that the forward pass uses for a parameter."""
        return parameter

    def face(self, parameter: Tensor) -> Tensor:
        """A plain tensor of a parameter's shape and type; nothing is said of its values."""
        return parameter

    def called(self, model: nn.Module) -> nn.Module:
        """The module whose forward takes the arguments of the model."""
        return model

    def total(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over all processes of what each has for a parameter, in shards if the parameter is."""
        return part

    def count(self, number: int) -> int:
        """The sum of a number over all processes."""
        return number

    def agreed(self, number: int) -> int:
        """The largest of a number over all processes, where they have to decide alike."""
        return number

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor, of which this process may have a shard."""
        return tensor

    def add_to_grad(self, used: Tensor, total: Tensor) -> None:
        """Adds what this process found to the `grad` of a parameter."""
        used.grad = total if used.grad is None else used.grad + total

    def forward_starts(self) -> None:
        """Says that the recorded model is about to run."""

    def recording(self, tracker: Tracker, keep_grad: bool) -> AbstractContextManager[Any]:
        """The time of a recording, in which backward passes bring no ordinary gradients that could be waited for."""
        return nullcontext()

    def saving_weights(self) -> AbstractContextManager[Any]:
        """Goes around an op of weights alone; what it saves is needed when the backward pass has ended."""
        return nullcontext()

    def check_saved(self, derived: Tensor) -> None:
        """Refuses a tensor computed from weights by what saves them where `saving_weights` does not see it."""


class _Several(Processes, ABC):
    """What a backward pass adds to `grad` is put aside until its end, when all processes add theirs together."""

    def __init__(self) -> None:
        self._aside: dict[int, tuple[Tensor, Tensor]] = {}
        self._passes: set[int] = set()  # the backward passes at whose end grads will be added

    def add_to_grad(self, used: Tensor, total: Tensor) -> None:
        before = self._aside.get(id(used))
        self._aside[id(used)] = (used, total if before is None else before[1] + total)
        self._add_at_the_end()

    def _watched(self, anchor: Tensor) -> Any:
        """The anchor's node, which runs in each backward pass, also where there are no samples.

        It has to be held until there is a graph that does.
        """
        node: Any = get_gradient_edge(anchor).node
        node.register_prehook(lambda grads: self._add_at_the_end())
        return node

    def _add_at_the_end(self) -> None:
        """Has what is aside added to the grads when this backward pass has ended, once."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in self._passes:
            self._passes.add(backward_pass)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._add_what_is_aside(backward_pass))

    def _add_what_is_aside(self, backward_pass: int) -> None:
        self._passes.remove(backward_pass)
        aside, self._aside = self._aside, {}
        with torch.no_grad():
            self._add_grads(aside)

    @abstractmethod
    def _add_grads(self, aside: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Adds what all processes have aside to the grads."""

    def _used_by_any(self, parameters: Sequence[Tensor], aside: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Those for which a process has something aside."""
        if not parameters:
            return []
        here = torch.tensor([id(p) in aside for p in parameters], dtype=torch.int32, device=parameters[0].device)
        return [p for p, times in zip(parameters, self._reduced(here).tolist(), strict=True) if times]

    def count(self, number: int) -> int:
        return int(self._reduced(torch.tensor(number, device=self._device())))

    def _reduced(self, tensor: Tensor, how: str = "SUM") -> Tensor:
        """The sum of a tensor over all processes, or the maximum."""
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        for group in self._process_groups():
            torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, how), group)
        return reduced

    @abstractmethod
    def _process_groups(self) -> list[Any]:
        """A sum over the first, then over the next, is one over all processes."""

    @abstractmethod
    def _device(self) -> torch.device:
        """Where the parameters are."""


# With these, DistributedDataParallel calls its module and does nothing else.
_QUIET = {"require_backward_grad_sync": False, "find_unused_parameters": False, "static_graph": False}


class Replicated(_Several):
    """Each process has all parameters, and DistributedDataParallel keeps them alike.

    A plain module may be run by a wrapper that it does not know of, which is found when it runs. Without one, the
    process is alone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._wrappers: list[Any] = []
        self._settings: list[dict[str, Any]] = []
        self._recorded = {id(p) for p in model.parameters()}
        self._inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]

    def called(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def forward_starts(self) -> None:
        active = DistributedDataParallel._get_active_ddp_module()
        if active is not None and active not in self._wrappers:
            self._silence(active)

    def _silence(self, wrapper: Any) -> None:
        if wrapper.mixed_precision is not None:
            raise PerSampleError("DistributedDataParallel's own mixed_precision is not supported: use torch.autocast.")
        if any(wrapper.process_group is not other.process_group for other in self._wrappers):
            raise PerSampleError("The model has DistributedDataParallel wrappers over different process groups.")
        if any(p.requires_grad and id(p) not in self._recorded for p in wrapper.module.parameters()):
            raise PerSampleError(
                "The model is part of what DistributedDataParallel wraps, whose other parameters would not be kept "
                "alike. Record all that is wrapped; `parameters` restricts what is recorded of it."
            )
        self._wrappers.append(wrapper)
        self._settings.append({name: getattr(wrapper, name) for name in (*_QUIET, "require_forward_param_sync")})
        for name, value in _QUIET.items():
            setattr(wrapper, name, value)

    @contextmanager
    def recording(self, tracker: Tracker, keep_grad: bool) -> Iterator[None]:
        node = self._watched(tracker.anchor) if keep_grad else None
        try:
            for wrapper in self._inside:
                self._silence(wrapper)
            yield
        finally:
            del node
            for wrapper, settings in zip(self._wrappers, self._settings, strict=True):
                for name, value in settings.items():
                    setattr(wrapper, name, value)

    def total(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        return self._reduced(part.to(dtype)) if self._wrappers else part

    def _process_groups(self) -> list[Any]:
        return [wrapper.process_group for wrapper in self._wrappers[:1]]

    def _device(self) -> torch.device:
        return self._wrappers[0].device if self._wrappers else torch.device("cpu")

    def _add_grads(self, aside: dict[int, tuple[Tensor, Tensor]]) -> None:
        """As DistributedDataParallel does: the mean over the processes, for parameters that any of them has used."""
        shared = self._averaged_parameters()
        for parameter in self._used_by_any(shared, aside):
            size = torch.distributed.get_world_size(self._wrappers[0].process_group)
            Processes.add_to_grad(self, parameter, self._reduced(_taken(aside, parameter)) / size)
        for parameter, own in aside.values():
            Processes.add_to_grad(self, parameter, own)

    def _averaged_parameters(self) -> list[Tensor]:
        """Those of which a plain backward pass would have averaged the gradients: none within `no_sync()`."""
        found: dict[int, Tensor] = {}
        for wrapper, settings in zip(self._wrappers, self._settings, strict=True):
            for name, p in wrapper.module.named_parameters() if settings["require_backward_grad_sync"] else ():
                if p.requires_grad and name not in wrapper.parameters_to_ignore:
                    found[id(p)] = p
        return list(found.values())


class Sharded(_Several):
    """Each process has a shard of each parameter, which FSDP makes whole for the time that a module runs.

    The forward pass then uses another tensor, which is always the same object but has memory only for that time. Sums
    come back in shards, as the parameters are.
    """

    def __init__(self, model: nn.Module, states: Sequence[Any]) -> None:
        super().__init__()
        self._states = states
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        managed = [p for group in self._groups for p in group.fsdp_params]
        meshes = {p.sharded_param.device_mesh for p in managed}
        if len(meshes) != 1 or any(p.is_dtensor for p in managed):
            raise PerSampleError("Tensor parallelism is not supported, nor are parameters over different meshes.")
        (self._mesh,) = meshes
        self._make_whole_once()
        self._managed = {id(form): p for p in managed for form in _forms(p)}
        self._named = {name: self._managed[id(p)] for name, p in model.named_parameters() if id(p) in self._managed}
        self._memory = {p.unsharded_param.untyped_storage()._cdata for p in managed}
        self._before: list[bool] = []

    def _make_whole_once(self) -> None:
        """Before a model has run for the first time there is nothing that stands for its parameters."""
        for state in self._states:
            if any(not hasattr(p, "_unsharded_param") for group in state._fsdp_param_groups for p in group.fsdp_params):
                state._modules[0].unshard()
                state._modules[0].reshard()

    def used(self, parameter: Tensor) -> Tensor:
        managed = self._managed.get(id(parameter))
        return parameter if managed is None else managed.unsharded_param

    def face(self, parameter: Tensor) -> Tensor:
        managed = self._managed.get(id(parameter))
        if managed is None:
            return parameter
        zero = torch.zeros((), dtype=managed.sharded_param.dtype, device=managed.unsharded_param.device)
        return zero.expand(managed.sharded_param.shape)

    def total(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial

        if name not in self._named:
            return self._reduced(part.to(dtype))
        with torch._C.DisableTorchFunction():
            partial = DTensor.from_local(part.to(dtype), self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            return partial.redistribute(placements=self._named[name].sharded_param.placements)

    def agreed(self, number: int) -> int:
        return int(self._reduced(torch.tensor(number, device=self._device()), "MAX"))

    def whole(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def _process_groups(self) -> list[Any]:
        return [self._mesh.get_group(dim) for dim in range(self._mesh.ndim)]

    def _device(self) -> torch.device:
        return self._groups[0].device

    # ---- the time of a recording ----

    @contextmanager
    def recording(self, tracker: Tracker, keep_grad: bool) -> Iterator[None]:
        node = self._watched(tracker.anchor) if keep_grad else None
        try:
            self._silence()
            for group in self._groups:
                group._register_post_backward_hook = _passes_weights_on(group, tracker)
            yield
        except BaseException:
            for context in self._contexts():
                context.all_states[0]._reset_iter_state()
            raise
        finally:
            del node
            self._restore()
            for group in self._groups:
                group.__dict__.pop("_register_post_backward_hook", None)

    def _silence(self) -> None:
        self._before = [group.reduce_grads for group in self._groups]
        for group in self._groups:
            group.reduce_grads = False

    def _restore(self) -> None:
        for group, reduces in zip(self._groups, self._before, strict=False):
            group.reduce_grads = reduces
        self._before = []

    def _contexts(self) -> list[Any]:
        """What the states of one root share; there are several roots if the model itself is none."""
        found = {id(state._state_ctx): state._state_ctx for state in self._states}
        return [context for context in found.values() if context.all_states]

    def _add_grads(self, aside: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Lays the gradients where autograd would have, and has FSDP do what it does with them at the end."""
        used = self._used_by_any([p.unsharded_param for group in self._groups for p in group.fsdp_params], aside)
        for whole in used:
            Processes.add_to_grad(self, whole, _taken(aside, whole))
        for parameter, own in aside.values():
            Processes.add_to_grad(self, parameter, own)
        before = self._before
        self._restore()
        for context in self._contexts() if used else ():
            context.all_states[0]._root_post_backward_final_callback()
        if before:
            self._silence()

    # ---- ops of weights alone ----

    def saving_weights(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(lambda t: t.clone() if self._will_be_freed(t) else t, lambda t: t)

    def check_saved(self, derived: Tensor) -> None:
        for node in nodes_behind(derived):
            if any(t is not None and self._will_be_freed(t) for t in getattr(node, "saved_tensors", ())):
                raise PerSampleError(
                    f"{type(node).__name__}, an autograd.Function of weights alone, saves a parameter that is freed "
                    "when its module has run. Have it save a clone, or write it with torch functions."
                )

    def _will_be_freed(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory


def fsdp_states(model: nn.Module) -> list[Any]:
    """The states of `fully_shard` in a model."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if implementation is None:
        return []
    states = [implementation._get_module_fsdp_state(module) for module in model.modules()]
    return list({id(state): state for state in states if state is not None}.values())


def _forms(managed: Any) -> list[Tensor]:
    """The tensors that a module may have for a parameter."""
    after_forward = getattr(managed, "_sharded_post_forward_param", None)
    return [managed.sharded_param, managed.unsharded_param, *([] if after_forward is None else [after_forward])]


def _taken(aside: dict[int, tuple[Tensor, Tensor]], parameter: Tensor) -> Tensor:
    """What is aside for a parameter, or zeros."""
    own = aside.pop(id(parameter), None)
    return torch.zeros_like(parameter) if own is None else own[1]


def _passes_weights_on(group: Any, tracker: Tracker) -> Callable[..., Any]:
    """How a group of FSDP notices that its module's backward has ended: by the gradients of the module's arguments.

    An argument that is a weight (a bias of positions, computed once for all layers) has none in a recording. It stays
    as it is, for it must not depend on the others.
    """
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

    def register(args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return args, kwargs
        with torch._C.DisableTorchFunction():
            tensors = list(collect_grad_tensors((args, kwargs)))
            where = [tracker.where(t) for t in tensors]
            batched = [i for i, layout in enumerate(where) if layout is not None]
            noticed = RegisterPostBackwardFunction.apply(group, *(tensors[i] for i in batched)) if batched else ()
            for i, same in zip(batched, noticed, strict=True):
                tensors[i] = same
                tracker.tell(same, where[i])
            return replace_grad_tensors((args, kwargs), iter(tensors))

    return register


def _is_run_otherwise(module: nn.Module) -> bool:
    states = sys.modules.get("torch.distributed._composable_state")
    contract = sys.modules.get("torch.distributed._composable.contract")
    applied = None if contract is None else contract._get_registry(module)
    return "replicate" in (applied or ()) or (states is not None and states._get_module_state(module) is not None)


def _refuse_other_ways(model: nn.Module, states: Sequence[Any], over: Processes) -> None:
    """Refuses what trains a model in another way: FSDP1, the older `replicate`, and tensor parallelism."""
    known = {id(module) for state in states for module in state._modules}
    for name, module in model.named_modules():
        if id(module) not in known and _is_run_otherwise(module):
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
