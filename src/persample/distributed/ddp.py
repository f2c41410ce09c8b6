"""Recording under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from persample import _torch
from persample.distributed.base import Follower, Processes, Several, take_pending
from persample.errors import PerSampleError

# With these settings, DistributedDataParallel calls its module and does nothing else.
_NO_SYNC = {"require_backward_grad_sync": False, "find_unused_parameters": False, "static_graph": False}


class Replicated(Several):
    """DistributedDataParallel: each process has all parameters.

    The recorded model may be the wrapper, contain wrappers, or be wrapped; a wrapper around it is found when it runs.
    Without a wrapper, the process has no others.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._wrappers: list[Any] = []
        self._settings: list[dict[str, Any]] = []
        self._changed: list[tuple[Any, str, Any]] = []  # wrappers, names of settings, and the values to restore
        self._recorded = {id(p) for p in model.parameters()}
        self._inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]

    def get_called_module(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def start_forward(self) -> None:
        active = _torch.get_active_ddp()
        if active is not None and active not in self._wrappers:
            self._turn_off_reduction(active)

    def _turn_off_reduction(self, wrapper: Any) -> None:
        if wrapper.mixed_precision is not None:
            raise PerSampleError("DistributedDataParallel's own mixed_precision is not supported: use torch.autocast.")
        if any(wrapper.process_group is not other.process_group for other in self._wrappers):
            raise PerSampleError("The model has DistributedDataParallel wrappers over different process groups.")
        if any(p.requires_grad and id(p) not in self._recorded for p in wrapper.module.parameters()):
            raise PerSampleError(
                "The model is only a part of what DistributedDataParallel wraps, and the other parameters would no "
                "longer be synchronised. Record the whole wrapped module; use `parameters` to select from it."
            )
        self._wrappers.append(wrapper)
        settings = {name: getattr(wrapper, name) for name in (*_NO_SYNC, "require_forward_param_sync")}
        self._settings.append(settings)
        # A setting that has the value already may be that of `no_sync()`, which restores it itself.
        self._changed += [(wrapper, name, value) for name, value in settings.items() if _NO_SYNC.get(name) != value]
        for name, value in _NO_SYNC.items():
            setattr(wrapper, name, value)

    def restore_settings(self) -> None:
        changed, self._changed = self._changed, []
        for wrapper, name, value in changed:
            setattr(wrapper, name, value)

    @contextmanager
    def prepare_recording(self, tracker: Follower[Any], anchor: Tensor | None) -> Iterator[None]:
        node = None if anchor is None else self._watch_anchor(anchor)
        try:
            for wrapper in self._inside:
                self._turn_off_reduction(wrapper)
            yield
        finally:
            del node
            self.restore_settings()

    def add_up(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        return self._reduce(part.to(dtype)) if self._wrappers else part

    def find_largest(self, number: int) -> int:
        # Without gradients to add up, the backward passes of the processes do not wait for each other.
        return super().find_largest(number) if self._adds_grads else number

    def _get_groups(self) -> list[Any]:
        return [wrapper.process_group for wrapper in self._wrappers[:1]]

    def _get_device(self) -> torch.device:
        return self._wrappers[0].device if self._wrappers else torch.device("cpu")

    def _add_grads(self, pending: dict[int, tuple[Tensor, Tensor]]) -> None:
        """As DistributedDataParallel: the mean over the processes, for parameters that any of them has used.

        What `grad` holds is averaged, too: passes within `no_sync()` have left the part of one process there.
        """
        shared = self._find_averaged_parameters()
        for parameter in self._find_used(shared, pending):
            size = torch.distributed.get_world_size(self._wrappers[0].process_group)
            own = take_pending(pending, parameter)
            before = None if parameter.grad is None else parameter.grad.to(own.dtype)
            mean = self._reduce(own if before is None else own + before) / size
            Processes.add_to_grad(self, parameter, mean if before is None else mean - before)
        for parameter, own in pending.values():
            Processes.add_to_grad(self, parameter, own)

    def _find_averaged_parameters(self) -> list[Tensor]:
        """The parameters whose gradients a plain backward pass would average; none within `no_sync()`."""
        found: dict[int, Tensor] = {}
        for wrapper, settings in zip(self._wrappers, self._settings, strict=True):
            for name, p in wrapper.module.named_parameters() if settings["require_backward_grad_sync"] else ():
                if p.requires_grad and name not in wrapper.parameters_to_ignore:
                    found[id(p)] = p
        return list(found.values())
