"""What a module keeps: parameters, buffers, children, hooks."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample._torch.lookup import find, read


def get_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own parameters."""
    return read(module, "_parameters", "persample.compile")


def list_members(modules: list[Any]) -> list[dict[str, Any]]:
    """The dicts in which modules keep their own parameters, then those in which they keep their children."""
    return [*[module._parameters for module in modules], *[module._modules for module in modules]]


def walk_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, each once, with the prefix of their parameters' names; a module may be its own child."""
    found: dict[int, tuple[str, Any]] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        entry = prefix, module = pending.pop()
        if id(module) not in found:
            found[id(module)] = entry
            if children := module._modules:
                pending += [(f"{prefix}{name}.", child) for name, child in children.items() if child is not None][::-1]
    return list(found.values())


def get_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own buffers."""
    return read(module, "_buffers", "Restoring a model's buffers")


# Runs in each call of a module, with the module as `self`.
_call_module: Any = find("torch.nn.Module._call_impl", "Recording a loss with tensors from outside the model")


def iterate_running_modules() -> Iterator[nn.Module]:
    """The modules that are being called in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    code = _call_module.__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_running(module: nn.Module) -> bool:
    """Whether a call of a module is running in this thread, below the one whose hooks are running now."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls == 2


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's forward."""
    feature = "Transformer layers in eval()"
    return bool(read(module, "_forward_hooks", feature) or read(module, "_forward_pre_hooks", feature))


class PreHook:
    """A place for a hook with keyword arguments before the forward of several modules, ahead of other hooks.

    The hook is added and removed in less time than module by module. Keeps neither the hook nor the modules.
    """

    def __init__(self, modules: list[Any]) -> None:
        self._modules, self._is_added = [*map(ref, modules)], False
        self._number = RemovableHandle(OrderedDict()).id

    def add(self, hook: Callable[..., Any]) -> None:
        """Add the hook, unless it is there."""
        number, was_added, self._is_added = self._number, self._is_added, True
        if was_added:
            return
        for reference in self._modules:
            if (module := reference()) is not None:
                hooks = module._forward_pre_hooks
                hooks[number] = hook
                if len(hooks) > 1:
                    hooks.move_to_end(number, last=False)
                module._forward_pre_hooks_with_kwargs[number] = True

    def pause(self) -> None:
        """Remove the hook until it is added again."""
        number, self._is_added = self._number, False
        for reference in self._modules:
            if (module := reference()) is not None:
                module._forward_pre_hooks.pop(number, None)

    def remove(self) -> None:
        """Remove the hook; nothing happens if it was not added."""
        self.pause()
        for reference in self._modules:
            if (module := reference()) is not None:
                module._forward_pre_hooks_with_kwargs.pop(self._number, None)


_module_implementation: Any = find("torch.nn.modules.module", "Verifying a recording")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def get_hooks(module: nn.Module) -> list[Any]:
    """The hooks that run before and after a module's forward and backward."""
    return [hook for name in _HOOKS for hook in read(module, name, "Verifying a recording").values()]


def get_custom_function(node: Any) -> type:
    """The `autograd.Function` that a node of the graph belongs to; the type of the node if that is not known."""
    found: type = getattr(node, "_forward_cls", type(node))
    return found


def get_backward_hooks(module: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that run before and after a module's backward, by their ids."""
    return module._backward_hooks, module._backward_pre_hooks


def find_modules_with_backward_hooks(modules: list[Any]) -> list[nn.Module]:
    """Those of some modules that have hooks before or after their backward."""
    return [module for module in modules if module._backward_hooks or module._backward_pre_hooks]


def get_global_hooks() -> list[Any]:
    """The hooks that run before and after the forward and backward of every module."""
    return [hook for name in _GLOBAL_HOOKS for hook in getattr(_module_implementation, name).values()]


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` was called on a module."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module by a function of it."""
    read(module, "_apply", "check()")(function)
