"""Runs of a model on copies of its arguments, from the state in which it was before a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.func import functional_call

from persample import _torch
from persample._internal.copies import copy_values
from persample._internal.dropout import NoDropoutMode
from persample._internal.dtypes import widen
from persample._internal.rng import RngState
from persample._internal.state import Writes
from persample._internal.tree import iterate_tensors
from persample.batches import Call

if TYPE_CHECKING:
    from persample.recording.verification.one_pass import Verification


class _NoSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Frees what a forward pass saves for its backward pass. `was_needed`: the forward pass itself asked for it."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: None, self._refuse)
        self.was_needed = False

    def _refuse(self, saved: None) -> NoReturn:
        self.was_needed = True
        raise RuntimeError("The saved tensors of this pass were freed.")


class Runs:
    """Runs the model from the state in which it was before the forward pass.

    If the forward pass drew random numbers, dropout is off and no graph is kept. Else gradients are enabled as they are
    now, because modules may compute in another way without them; what they save for a backward pass is freed at once,
    unless the forward pass computes gradients itself.
    """

    def __init__(self, verification: Verification, writes: Writes, is_random: bool) -> None:
        self.model = verification.model
        self.is_random = is_random
        self.is_precise = False  # without autocast, and in float32 at least
        self._keeps_saved = False
        self._before, self._random = verification.before, verification.random_before
        self._writes = writes

    @property
    def rounding(self) -> float:
        """The eps of the least precise dtype so far."""
        return self._writes.rounding

    def run(self, call: Call, hook: Callable[..., None] | None = None) -> dict[int, Tensor]:
        """The tensors in the output of a call, by position. `hook` is called after the forward of each submodule."""
        if not self._keeps_saved:
            hooks = _NoSavedTensors()
            try:
                with hooks:
                    found = self._run(call, hook)
                if not hooks.was_needed:  # else the model has caught the error
                    return found
            except Exception as error:
                if not (hooks.was_needed or "saved tensor hooks" in str(error)):
                    raise
            self._keeps_saved = True
        return self._run(call, hook)

    def _run(self, call: Call, hook: Callable[..., None] | None) -> dict[int, Tensor]:
        self._before.restore()
        if self.is_random:
            self._random.restore()
        with ExitStack() as stack:
            for device in get_autocast_devices() if self.is_precise else ():
                stack.enter_context(torch.autocast(device, enabled=False))
            if self.is_random:
                self._turn_off_dropout(stack)
            if hook is not None:
                for module in list(self.model.modules())[1:]:
                    stack.callback(module.register_forward_hook(hook).remove)
            with _torch.disable_dispatch_modes():  # the dtypes of what is copied do not count
                args, kwargs = copy_values(call, self._copy)
                weights = self._widen_weights() if self.is_precise else {}
            output = functional_call(self.model, weights, args, kwargs) if weights else self.model(*args, **kwargs)
        return {position: tensor.detach() for position, tensor in enumerate(iterate_tensors(output))}

    def _copy(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        return (widen(own) if self.is_precise else own).requires_grad_(tensor.requires_grad)

    def _widen_weights(self) -> dict[str, Tensor]:
        """The parameters and buffers in half precision, in float32."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        wide = {name: widen(tensor.detach()) for name, tensor in named.items()}
        changed = [name for name in named if wide[name].dtype != named[name].dtype]
        return {name: wide[name].requires_grad_(named[name].requires_grad) for name in changed}

    def _turn_off_dropout(self, stack: ExitStack) -> None:
        stack.enter_context(torch.no_grad())
        stack.enter_context(NoDropoutMode())
        for module in self.model.modules():
            name = type(module).__name__.lower()
            if "drop" in name or "stochastic" in name:  # DropPath, StochasticDepth and the like
                module.training = False

    def read_random_state(self) -> RngState:
        """The state of the random number generators now."""
        return RngState(self._before.generators)

    def can_repeat(self, state: RngState) -> bool:
        """Whether the last run has drawn the same random numbers as one that left the generators in `state`.

        The numbers of a GPU are drawn in parallel, and its state does not tell how many they were.
        """
        is_same_on_gpu = all(map(torch.equal, state.devices[1:], self._random.devices[1:]))
        return is_same_on_gpu and self.read_random_state() == state

    @contextmanager
    def compute_precisely(self) -> Iterator[None]:
        """Compute in float32 at least in all runs from now on, unless the block raises."""
        dtypes = self._writes.dtypes
        self.is_precise, self._writes.dtypes = True, set()
        try:
            yield
        except Exception:
            self.is_precise, self._writes.dtypes = False, dtypes
            raise


def get_autocast_devices() -> list[str]:
    """The devices on which autocast is enabled."""
    return [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
