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
from persample.distributed.base import Follower, Processes, Several, take
from persample.errors import PerSampleError


class Sharded(Several):
    """Each process has a shard of each parameter, which FSDP makes whole for the time that a module runs.

    The forward pass then uses another tensor, which is always the same object but has memory only for that time. Sums
    come back in shards, as the parameters are.
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
        self._make_whole_once()
        self._managed = {id(form): p for p in managed for form in _torch.get_fsdp_forms(p)}
        self._named = {name: self._managed[id(p)] for name, p in model.named_parameters() if id(p) in self._managed}
        self._memory = {_torch.get_storage_id(p.unsharded_param) for p in managed}
        self._before: list[bool] = []

    def _make_whole_once(self) -> None:
        """Before a model has run for the first time there is nothing that stands for its parameters."""
        for state in self._states:
            managed = [p for group in _torch.get_fsdp_groups(state) for p in group.fsdp_params]
            if not all(map(_torch.is_unsharded_once, managed)):
                module: Any = _torch.get_fsdp_modules(state)[0]
                module.unshard()
                module.reshard()

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
        with _torch.DisableTorchFunction():
            partial = DTensor.from_local(part.to(dtype), self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            return partial.redistribute(placements=self._named[name].sharded_param.placements)

    def agreed(self, number: int) -> int:
        return int(self._reduced(torch.tensor(number, device=self._device()), "MAX"))

    def whole(self, tensor: Tensor) -> Tensor:
        with _torch.DisableTorchFunction():
            return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def _process_groups(self) -> list[Any]:
        return [self._mesh.get_group(dim) for dim in range(self._mesh.ndim)]

    def _device(self) -> torch.device:
        return self._groups[0].device

    # ---- the time of a recording ----

    @contextmanager
    def recording(self, tracker: Follower, keep_grad: bool) -> Iterator[None]:
        node = self._watched(tracker.anchor) if keep_grad else None
        try:
            self._silence()
            for group in self._groups:
                _torch.set_fsdp_hook_registration(group, _passes_weights_on(group, tracker))
            yield
        except BaseException:
            for context in self._contexts():
                _torch.reset_fsdp_after_error(context)
            raise
        finally:
            del node
            self._restore()
            for group in self._groups:
                _torch.set_fsdp_hook_registration(group, None)

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
        found = {id(context): context for context in map(_torch.get_fsdp_context, self._states)}
        return [context for context in found.values() if context.all_states]

    def _add_grads(self, aside: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Lays the gradients where autograd would have, and has FSDP do what it does with them at the end."""
        used = self._used_by_any([p.unsharded_param for group in self._groups for p in group.fsdp_params], aside)
        for whole in used:
            Processes.add_to_grad(self, whole, take(aside, whole))
        for parameter, own in aside.values():
            Processes.add_to_grad(self, parameter, own)
        before = self._before
        self._restore()
        for context in self._contexts() if used else ():
            _torch.finish_fsdp_backward(context)
        if before:
            self._silence()

    # ---- ops of weights alone ----

    def saving_weights(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(lambda t: t.clone() if self._will_be_freed(t) else t, lambda t: t)

    def check_saved(self, derived: Tensor) -> None:
        for node in find_nodes(derived):
            if any(t is not None and self._will_be_freed(t) for t in getattr(node, "saved_tensors", ())):
                raise PerSampleError(
                    f"{type(node).__name__}, an autograd.Function of weights alone, saves a parameter that is freed "
                    "when its module has run. Have it save a clone, or write it with torch functions."
                )

    def _will_be_freed(self, tensor: Tensor) -> bool:
        return _torch.get_storage_id(tensor) in self._memory


def _passes_weights_on(group: Any, tracker: Follower) -> Callable[..., Any]:
    """How a group of FSDP notices that its module's backward has ended: by the gradients of the module's arguments.

    An argument that is a weight (a bias of positions, computed once for all layers) has none in a recording. It stays
    as it is, for it must not depend on the others.
    """
    def register(args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return args, kwargs
        with _torch.DisableTorchFunction():
            tensors = _torch.get_grad_tensors((args, kwargs))
            where = [tracker.where(t) for t in tensors]
            batched = [i for i, layout in enumerate(where) if layout is not None]
            noticed = _torch.attach_fsdp_hook(group, [tensors[i] for i in batched]) if batched else ()
            for i, same in zip(batched, noticed, strict=True):
                tensors[i] = same
                tracker.tell(same, where[i])
            return _torch.replace_grad_tensors((args, kwargs), tensors)

    return register
