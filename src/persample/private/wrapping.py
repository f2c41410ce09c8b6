"""What scripts for Opacus expect of a wrapped model: `model._module`, and a handle with `cleanup()`."""

from __future__ import annotations

from torch import nn

from persample.private.optimizer import PrivateOptimizer

_WRAPPED = "_module"


def show_as_wrapped(module: nn.Module) -> nn.Module:
    """Let `module._module` be the module itself. Names of parameters and the state of the module stay as they are."""
    if not hasattr(module, _WRAPPED):
        vars(module)[_WRAPPED] = module  # not setattr, which would make it a submodule
    return module


class Handle:
    """What `make_private(wrap_model=False)` returns instead of the module: `cleanup()` ends private training."""

    def __init__(self, module: nn.Module, optimizer: PrivateOptimizer) -> None:
        self._module = module
        self._optimizer = optimizer

    def cleanup(self) -> None:
        """End private training; the model is as it was before."""
        self._optimizer.release()

    remove_hooks = cleanup
