"""Hooks on the gradients of parameters, which do not run when gradients are kept per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from persample import _torch
from persample.errors import PerSampleError

# Packages whose own hooks on parameters are known: our refusals, and the wrappers that recordings support.
_KNOWN = ("persample.", "torch.distributed.", "torch.nn.parallel.")


def refuse_parameter_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Raise if a parameter has a hook of the user's on its gradient."""
    if not _torch.has_gradient_hooks(parameters.values()):
        return
    for name, parameter in parameters.items():
        for hooks in _torch.get_gradient_hooks(parameter):
            if hooks:
                _refuse(name, hooks)


def _refuse(name: str, hooks: Mapping[int, Any]) -> None:
    for hook in hooks.values():
        if not str(getattr(hook, "__module__", None)).startswith(_KNOWN):
            raise PerSampleError(
                f"'{name}' has a hook on its gradient: {getattr(hook, '__qualname__', hook)!r}. The gradients are kept "
                "per sample, and the hook would not run. Remove it with the remove() of its handle, and apply it to "
                "the recorded gradients. Or leave the parameter out: `parameters` selects what is recorded."
            )
