"""Recording under FSDP2 (`fully_shard`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from persample import _torch
from persample._internal.graph import find_nodes
from persample.distributed.base import Follower, Processes, Several, take_pending
from persample.errors import PerSampleError


class Sharded(Several):
    """FSDP2: each process has a shard of each parameter, and FSDP gathers a whole one while a module runs.

    The forward pass uses the gathered tensor. It is the same object in each step, but has memory only while the module
    runs. Sums are sharded like the parameters.
    """

    def __init__(self, model: nn.Module, states: Sequence[Any]) -> None:
        super().__init__()
        self._states = states
        self._groups = [group for state in states for group in _torch.get_fsdp_groups(state)]
        managed = [p for group in self._groups for p in group.fsdp_params]
        meshes = {p.sharded_param.device_mesh for p in managed}
        if len(meshes) != 1 or any(p.is_dtensor for p in managed):
            raise PerSampleError("Tensor parallelism is not supported, nor are parameters over different meshes.")
        (self._mesh,) = meshes
        self._gather_once()
        self._managed = {id(form): p for p in managed for form in _torch.get_fsdp_forms(p)}
        self._by_name = {name: self._managed[id(p)] for name, p in model.named_parameters() if id(p) in self._managed}
        self._memory = {_torch.get_storage_id(p.unsharded_param) for p in managed}
        self._before: list[bool] = []

    def _gather_once(self) -> None:
        """Gather all parameters once: before the first forward pass the gathered tensors do not exist."""
        for state in self._states:
            managed = [p for group in _torch.get_fsdp_groups(state) for p in group.fsdp_params]
            if not all(map(_torch.is_unsharded_once, managed)):
                module: Any = _torch.get_fsdp_modules(state)[0]
                module.unshard()
                module.reshard()

    def get_used(self, parameter: Tensor) -> Tensor:
        managed = self._managed.get(id(parameter))
        return parameter if managed is None else managed.unsharded_param

    def get_template(self, parameter: Tensor) -> Tensor:
        managed = self._managed.get(id(parameter))
        if managed is None:
            return parameter
        zero = torch.zeros((), dtype=managed.sharded_param.dtype, device=managed.unsharded_param.device)
        return zero.expand(managed.sharded_param.shape)

    def add_up(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial

        if name not in self._by_name:
            return self._reduce(part.to(dtype))
        with _torch.DisableTorchFunction():
            partial = DTensor.from_local(part.to(dtype), self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            return partial.redistribute(placements=self._by_name[name].sharded_param.placements)

    def gather(self, tensor: Tensor) -> Tensor:
        with _torch.DisableTorchFunction():
            return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def _get_groups(self) -> list[Any]:
        return [self._mesh.get_group(dim) for dim in range(self._mesh.ndim)]

    def _get_device(self) -> torch.device:
        return self._groups[0].device

    # ---- during a recording ----

    @contextmanager
    def prepare_recording(self, tracker: Follower[Any], anchor: Tensor | None) -> Iterator[None]:
        node = None if anchor is None else self._watch_anchor(anchor)
        try:
            self._turn_off_reduction()
            for group in self._groups:
                _torch.set_fsdp_hook_registration(group, _make_hook_registration(group, tracker))
            yield
        except BaseException:
            for context in self._get_contexts():
                _torch.reset_fsdp_after_error(context)
            raise
        finally:
            del node
            self._turn_on_reduction()
            for group in self._groups:
                _torch.set_fsdp_hook_registration(group, None)

    def restore_settings(self) -> None:
        self._turn_on_reduction()

    def _turn_off_reduction(self) -> None:
        self._before = [group.reduce_grads for group in self._groups]
        for group in self._groups:
            group.reduce_grads = False

    def _turn_on_reduction(self) -> None:
        for group, reduces in zip(self._groups, self._before, strict=False):
            group.reduce_grads = reduces
        self._before = []

    def _get_contexts(self) -> list[Any]:
        """The contexts that the states of each root share; there are several roots if the model is not one."""
        found = {id(context): context for context in map(_torch.get_fsdp_context, self._states)}
        return [context for context in found.values() if context.all_states]

    def _add_grads(self, pending: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Put the gradients where autograd would have put them, and have FSDP reduce and shard them."""
        used = self._find_used([p.unsharded_param for group in self._groups for p in group.fsdp_params], pending)
        for whole in used:
            Processes.add_to_grad(self, whole, take_pending(pending, whole))
        for parameter, own in pending.values():
            Processes.add_to_grad(self, parameter, own)
        before = self._before
        self._turn_on_reduction()
        for context in self._get_contexts() if used else ():
            _torch.finish_fsdp_backward(context)
        if before:
            self._turn_off_reduction()

    # ---- ops of weights alone ----

    def saving_weights(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(lambda t: t.clone() if self._is_freed_after_use(t) else t, lambda t: t)

    def check_saved(self, derived: Tensor) -> None:
        for node in find_nodes(derived):
            if any(t is not None and self._is_freed_after_use(t) for t in getattr(node, "saved_tensors", ())):
                raise PerSampleError(
                    f"{type(node).__name__}, an autograd.Function of weights alone, saves a parameter that fully_shard "
                    "frees when its module has run. Save a clone, or write it with torch functions."
                )

    def _is_freed_after_use(self, tensor: Tensor) -> bool:
        return _torch.get_storage_id(tensor) in self._memory


def _make_hook_registration(group: Any, tracker: Follower[Any]) -> Callable[..., Any]:
    """A replacement for how an FSDP group registers its hook for the end of its module's backward.

    FSDP waits for the gradients of the module's arguments. An argument that is a weight (a position bias that is
    computed once for all layers) has no gradient in a recording, so it is left out.
    """

    def register(args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return args, kwargs
        with _torch.DisableTorchFunction():
            tensors = {id(t): t for t in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            layouts = {key: tracker.find_layout(t) for key, t in tensors.items() if t.requires_grad}
            batched = [key for key, layout in layouts.items() if layout is not None]
            noticed = _torch.attach_fsdp_hook(group, [tensors[key] for key in batched]) if batched else ()
            replaced = dict(zip(batched, noticed, strict=True))
            for key, same in replaced.items():
                tracker.set_layout(same, layouts[key])
            return _torch.pytree.tree_map(lambda leaf: replaced.get(id(leaf), leaf), (args, kwargs))

    return register
