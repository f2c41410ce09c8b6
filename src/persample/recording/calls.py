"""The calls of a model and of its parts, as hooks report them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Set
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.model_table import read_model
from persample.recording.hooks import ModuleHook, PartHook
from persample.recording.session import Recording

# Modules that torch runs on a fast path in eval(), unless they or their submodules have hooks.
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Calls(ABC):
    """Hooks on a model and its submodules that report each call that is not part of another one.

    A part is a submodule that is called in place of the model, as in `model.head(model.encoder(x))`. Under DDP and FSDP
    parts are not reported: the whole model must be called. A call without gradients is not reported either, nor is a
    recomputation: what happens there is followed like the code around the model.

    A front end is a subclass: hooks refer to it, and it must not refer to itself.
    """

    def __init__(self) -> None:
        self._entry: ref[nn.Module] | None = None  # the model, or a part of it, whose call is running
        self._hooks: list[RemovableHandle] = []

    @abstractmethod
    def start_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Called before a call of the model or of a part; returns whether the call is recorded."""

    @abstractmethod
    def end_call(self, output: Any) -> None:
        """Called after a call that is recorded, with its output, or None if it has failed."""

    @abstractmethod
    def interrupt_call(self) -> None:
        """Called if an interrupt has ended the last call, after which torch calls no hook."""

    @abstractmethod
    def find_recording(self) -> Recording | None:
        """The recording of the current step."""

    def add_hooks(self, model: nn.Module, recorded: Set[int]) -> None:
        """Add the hooks. Parts are not reported if they have none of the parameters with these ids."""
        self._hooks = [
            model.register_forward_pre_hook(ModuleHook(self.before_model), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModuleHook(self._after), always_call=True),
        ]
        hook = PartHook(self.before_part, self._is_inside_entry)
        for part in find_parts(model, recorded):
            self._hooks.append(part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report a call of the model that is about to run."""
        if not self._is_reported():
            return
        if self.is_inside:
            if _torch.is_running(module):
                if (recording := self.find_recording()) is not None:
                    recording.verifier.note_nested_call()
                return
            self.interrupt_call()
        self._enter(module, args, kwargs)

    def before_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report a call of a part that is about to run."""
        if not self._is_reported() or not self._enter(module, args, kwargs):
            return
        handle = module.register_forward_hook(ModuleHook(lambda *given: leave(*given)), always_call=True)

        def leave(*given: Any) -> None:
            handle.remove()
            self._after(*given)

    @property
    def is_inside(self) -> bool:
        """Whether a call that is recorded is running."""
        return self._entry is not None

    def leave(self) -> None:
        """Note that no call is running."""
        self._entry = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self.start_call(module, args, kwargs):
            return False
        self._entry = ref(module)
        return True

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._entry is not None and not self._is_verifying() and self._entry() is module:
            try:
                self.end_call(output)
            finally:
                self.leave()

    def _is_reported(self) -> bool:
        is_recomputation = _torch.get_backward_pass() >= 0
        has_gradients = torch.is_grad_enabled() or _torch.is_in_reentrant_checkpoint()
        return has_gradients and not is_recomputation and not self._is_verifying()

    def _is_verifying(self) -> bool:
        recording = self.find_recording()
        return recording is not None and recording.verifier.is_running

    def _is_inside_entry(self, module: nn.Module) -> bool:
        # An interrupt may have ended the last call, and torch calls no hook then.
        return self._entry is not None and (self._entry() is not module or _torch.is_running(module))


def find_parts(model: nn.Module, recorded: Set[int]) -> Iterator[nn.Module]:
    """The submodules that may be called in place of the model: those with parameters of these ids."""
    if isinstance(model, DistributedDataParallel) or _torch.get_fsdp_states(model):
        return
    # A scripted module takes no hooks.
    modules = [module for module in read_model(model)[0] if not isinstance(module, torch.jit.ScriptModule)]
    members = _torch.list_members(modules)
    fast = {m for root in modules if isinstance(root, _FAST) and not root.training for m in root.modules()}
    having: set[int] = set()  # the ids of the modules that have recorded parameters
    pairs = zip(modules, members[: len(modules)], members[len(modules) :], strict=True)
    for module, parameters, children in reversed(list(pairs)):  # a module comes before its children
        own = [*map(id, parameters.values())]
        if not (recorded.isdisjoint(own) and having.isdisjoint(map(id, children.values()))):
            having.add(id(module))
            if module is not model and module not in fast:
                yield module
