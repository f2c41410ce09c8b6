"""The errors of persample, and how they name a place in the user's model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

import torch
from torch import nn


class PerSampleError(RuntimeError):
    """Per-sample gradients cannot be computed. The message says where, why, and what can be done."""


class SamplesMixed(PerSampleError):
    """Samples of the batch were combined, so that no sample has a gradient of its own."""


# What helps where a recording does not: part of many refusals.
ROWS_ADVICE = "persample.rows(losses, model), outside of a recording, takes any B losses, for B backward passes."

# Takes a refusal in place of raising it. The recording is given up; the gradients of the weights stay right.
Complain = Callable[[PerSampleError], None]


def raise_or_complain(error: PerSampleError, complain: Complain | None) -> None:
    """Raise an error, or pass it on to who prefers that."""
    if complain is None:
        raise error
    complain(error)


# The place of an op that runs while no module of the model is running.
ELSEWHERE = "the forward pass"


def find_place(names: Mapping[nn.Module, str]) -> str:
    """The innermost module of `names` whose code is running, in words for an error message.

    `names` maps the modules of a model to their paths.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            return f"module '{names[module]}' ({type(module).__name__})" if names[module] else type(module).__name__
        frame = frame.f_back
    return ELSEWHERE


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise an error again if it says that there is no memory left: it shows nothing about the op that raised it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error):
        raise error


def refuse_forward_mode(place: str) -> NoReturn:
    """Refuse forward-mode AD through a recorded model."""
    raise PerSampleError(
        f"Forward-mode AD (torch.autograd.forward_ad, torch.func.jvp, jacfwd) runs through {place}. The recording of a "
        "use of a weight has no forward derivative, so tangents would be lost. Compute the derivative outside the "
        "recording, or in reverse mode (torch.autograd.grad). " + ROWS_ADVICE
    )


def get_op_name(func: object) -> str:
    """The name of a torch function as a user would write it.

    >>> import torch
    >>> get_op_name(torch.add)
    'add'
    """
    return getattr(func, "__name__", None) or repr(func)


STATE_ADVICE = (
    "Later steps and every checkpoint would see it without noise, so that the privacy guarantee would not hold. Remove "
    "the state (track_running_stats=False, max_norm=None, no running averages or code books of samples), keep the "
    "module in eval(), or compute it from the weights alone or from public data outside private training."
)


def refuse_state(name: str, cause: str, model: nn.Module) -> NoReturn:
    """Raise: a parameter or a buffer holds values that were computed from samples."""
    kind = "parameter" if name in dict(model.named_parameters()) else "buffer"
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    raise SamplesMixed(
        f"The {kind} '{name}' (of {owner}) holds values that were computed from samples: {cause}. {STATE_ADVICE}"
    )
