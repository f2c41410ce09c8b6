"""What is known about a pass, in words, and where the extra passes of a verification are not allowed."""

from __future__ import annotations

from typing import Any

from torch import nn

from persample import _torch
from persample.errors import PerSampleError
from persample.forward import Audit, Tracker
from persample.recording.options import Options

NOT_REPEATABLE = "a second run of the same batch gives other outputs"


class NotVerified(Exception):
    """The model cannot be verified; the message says why."""


def describe(reason: NotVerified, options: Options, is_late: bool = False) -> str:
    """What `repr` says of a pass; `is_late`: earlier passes of this kind were verified."""
    if options.verify == "always":
        raise PerSampleError(f"The option verify='always' is given, but the samples cannot be verified: {reason}.")
    return f"not verified in this step: {reason}" if is_late else f"not verified: {reason}"


def check_unnoticed_by_modes() -> None:
    modes = [mode for mode in _torch.get_function_modes() if not isinstance(mode, Tracker)]
    dispatch_modes = [mode for mode in _torch.get_dispatch_modes() if not isinstance(mode, Audit)]
    if not all(map(_torch.is_default_device, modes)) or dispatch_modes:
        raise NotVerified("a mode of torch is active, which would see more calls; verify='first' allows it")


def check_unnoticed_by_hooks(model: nn.Module) -> None:
    if _torch.get_global_hooks() or any(not _is_own(hook) for m in model.modules() for hook in _torch.get_hooks(m)):
        raise NotVerified("the model has hooks, which would run more often; verify='first' allows it")
    if any(map(_torch.is_compiled, model.modules())):
        raise NotVerified("the model is compiled; verify='first' allows it")


def _is_own(hook: Any) -> bool:
    """Whether a hook belongs to persample or to torch, such as that of `spectral_norm`."""
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).partition(".")[0] in ("persample", "torch")


def shorten(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
