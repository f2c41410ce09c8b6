"""Hooks that a recording puts on a model, its parts and its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.models import Members, read_model
from persample.distributed import Processes
from persample.errors import ROWS_ADVICE, Complain, PerSampleError, raise_or_complain
from persample.forward import LAYERS

if TYPE_CHECKING:
    from persample.recording.session import Recording

# ---- parameters, and single calls ----


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

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls.before_part)
        self._calls = calls

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled model is called as a whole
            return
        entry = self._calls.entry  # an interrupt may have ended the last call, and torch calls no hook then
        if entry is None or (entry() is module and not _torch.is_running(module)):
            super().__call__(module, *args)


def _make_refusal(name: str) -> PerSampleError:
    return PerSampleError(
        f"'{name}' receives a gradient from a use that was not recorded. A penalty on the weights: add it to the loss, "
        "then grads.shared() is its gradient, or call its backward() outside. A call with tensors that are the same "
        "for all samples: name the samples by samples=, or add_samples() of a watched model. A watched model must be "
        f"called before its weights are used, and torch.func.vmap may not use them. {ROWS_ADVICE}"
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


# ---- calls of a model and of its parts ----


class Calls(ABC):
    """Hooks on a model and its submodules that report each call that is not part of another one.

    A part is a submodule that is called in place of the model, as in `model.head(model.encoder(x))`. Under DDP and FSDP
    parts are not reported: the whole model must be called. A call without gradients is not reported either, nor is a
    recomputation: what happens there is followed like the code around the model.

    A front end is a subclass: hooks refer to it, and it must not refer to itself.

    Attributes:
        entry: the model, or a part of it, whose call is running.
    """

    def __init__(self) -> None:
        self.entry: ref[nn.Module] | None = None
        self._hooks: list[RemovableHandle] = []
        self._parts: _torch.PreHook | None = None

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

    @skip_compilation(with_callees=True)
    def add_hooks(self, model: nn.Module, recorded: Set[int], members: Members | None = None) -> None:
        """Add the hooks. Parts are not reported if they have none of the parameters with these ids.

        `members`: those of the model, if they have just been read.
        """
        self._hooks = [
            model.register_forward_pre_hook(ModuleHook(self.before_model), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModuleHook(self._after), always_call=True),
        ]
        self._parts = _torch.PreHook(find_parts(model, recorded, members))
        self._parts.add(PartHook(self))

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._parts is not None:
            self._parts.remove()
        self._hooks, self._parts = [], None

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
        if self._enter(module, args, kwargs) and self._parts is not None:
            self._parts.pause()  # until the end of the call: calls inside of it are not reported

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
        return self.entry is not None

    def leave(self) -> None:
        """Note that no call is running."""
        self.entry = None
        if self._parts is not None:
            self._parts.add(PartHook(self))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self.start_call(module, args, kwargs):
            return False
        self.entry = ref(module)
        return True

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.entry is not None and not self._is_verifying() and self.entry() is module:
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


def find_parts(model: nn.Module, recorded: Set[int], members: Members | None = None) -> list[nn.Module]:
    """The submodules that may be called in place of the model: those with parameters of these ids."""
    if isinstance(model, DistributedDataParallel) or _torch.get_fsdp_states(model):
        return []
    members = members or read_model(model)
    # Torch runs layers on a fast path in eval(), unless they or their submodules have hooks.
    layers = [module for module in members.modules if isinstance(module, LAYERS) and not module.training]
    fast = {module for layer in layers for module in layer.modules()}
    return [module for module in members.find_owners(recorded) if module is not model and module not in fast]
