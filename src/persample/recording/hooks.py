"""Hooks that a recording puts on a model and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample.distributed import Processes
from persample.errors import ROWS_ADVICE, Complain, PerSampleError, raise_or_complain


class ModuleHook:
    """A hook of a module's forward. In a copy of the module, and in a saved one, it does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @exclude_from_graph
    @skip_compilation(with_callees=False)
    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # The method takes any arguments and does nothing. A saved model can be loaded where persample is not installed.
        return getattr, (nullcontext(), "__exit__")


class PartHook(ModuleHook):
    """A hook before the forward of a submodule, with little cost while the model itself is running."""

    def __init__(self, function: Callable[..., None], is_inside: Callable[[nn.Module], bool]) -> None:
        super().__init__(function)
        self._is_inside = is_inside

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._is_inside(module):  # a compiled model is called as a whole
            return
        super().__call__(module, *args)


def _make_refusal(name: str) -> PerSampleError:
    return PerSampleError(
        f"'{name}' receives a gradient from a use that was not recorded: a backward pass of a penalty on the weights "
        "alone (add the penalty to the loss, or call its backward() outside), a call of the model or of a part of it "
        "with tensors that are the same for all samples (say which are samples with samples=, or add_samples() of a "
        "watched model), a use of weights in a watched model before it or a part of it was called, or a use inside "
        f"torch.func.vmap. {ROWS_ADVICE}"
    )


class _Refusal:
    """A hook of a parameter that refuses ordinary gradients: they come from a use that was not recorded."""

    __torch_unserializable__ = True  # torch shall not warn that a saved parameter loses the hook

    def __init__(self, name: str, is_pulling_back: Callable[[], bool], complain: Complain | None) -> None:
        self._name = name
        self._is_pulling_back = is_pulling_back
        self._complain = complain

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None and not self._is_pulling_back():
            raise_or_complain(_make_refusal(self._name), self._complain)


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a model that torch.jit has made: it takes no hooks, and its ops cannot be followed."""
    if isinstance(model, torch.jit.ScriptModule):
        raise PerSampleError(
            f"The model is a {type(model).__name__}, whose ops cannot be followed. Pass the module as it was before "
            "torch.jit.script or torch.jit.trace."
        )


def refuse_unrecorded(
    recorded: Mapping[str, Tensor],
    processes: Processes,
    is_pulling_back: Callable[[], bool],
    complain: Complain | None = None,
) -> list[RemovableHandle]:
    """Add hooks that refuse ordinary gradients of parameters; `complain` takes refusals in place of raising them.

    While a recording pulls gradients back to its parameters, such gradients are the recording's own.
    """
    hooks = []
    for name, p in recorded.items():
        refusal = _Refusal(name, is_pulling_back, complain)
        tensors = {id(tensor): tensor for tensor in (p, processes.get_used(p))}
        hooks += [tensor.register_hook(refusal) for tensor in tensors.values()]
    return hooks


class UnrecordedGradients:
    """Context manager for a backward pass: takes away the `grad` of each parameter, and puts it back at the end.

    A gradient that arrives in between comes from a use that was not recorded, and is refused.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._before: list[tuple[Tensor, Tensor]] | None = None

    def __enter__(self) -> None:
        with _torch.DisableTorchFunction():
            self._before = [(p, grad) for p in self._parameters.values() if (grad := p.grad) is not None]
            for p, _ in self._before:
                p.grad = None

    def __exit__(self, *error: Any) -> None:
        before, self._before = self._before, None
        assert before is not None
        with _torch.DisableTorchFunction():
            names = self._find_names()
            for name in names:
                self._parameters[name].grad = None
            for p, grad in before:
                p.grad = grad
        if names and error[0] is None:
            raise _make_refusal(names[0])

    def check(self) -> None:
        """Refuse gradients that have arrived so far."""
        if self._before is not None and (names := self._find_names()):
            raise _make_refusal(names[0])

    def _find_names(self) -> list[str]:
        return [name for name, p in self._parameters.items() if p.grad is not None]
