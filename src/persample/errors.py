"""The errors of persample, and how they name a place in the user's model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

import torch
from torch import nn

# Families of errors: the code of each, and a pattern of its messages. The first that fits counts. `explanations.md` has
# a page for each, which `persample explain` prints.
FAMILIES = {
    "E8": r"not finite",
    "E9": r"has kept|that keeps|keep='everything'|which an answer before needed",
    "E7": r"changed in place",
    "E6": r"create_graph|Forward-mode AD",
    "E5": r"autograd\.Function|has no rule|The rule of|its rule expects",
    "E10": r"torch\.jit|ScriptModule|before scripting|compiled step|cannot be compiled|Compiled autograd",
    "E11": r"cannot be nested|omething else|inside a recording|several losses",
    "E12": r"processes|DistributedDataParallel|fully_shard|[Pp]arallelism",
    "E2": r"loss_reduction|sum over the samples|divisor=",
    "E1": r"mixe[sd]|combines samples|on the other samples|its place in the batch|Broadcasting would|no single sample",
    "E4": r"ambiguous|forward pass (of|gets)|parts? of (one|tensors|the batch)",
    "E3": r"was not recorded|does not belong to the current step",
    "E13": r"\bmust\b|\bneeds?\b|\brequires?\b|, got |\bnames\b",
}


def find_code(message: str) -> str | None:
    """The code of the family that a message belongs to.

    >>> find_code("The samples of the batch are mixed in Linear: ...")
    'E1'
    """
    return next((code for code, pattern in FAMILIES.items() if re.search(pattern, message)), None)


class PerSampleError(RuntimeError):
    """Per-sample gradients cannot be computed. The message says where, why, and what can be done.

    Attributes:
        code: names the page that explains errors like this one: `persample explain E1`; None if there is none.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.code = find_code(str(self))
        if self.code is not None:
            self.add_note(f"More about errors like this one: persample explain {self.code}")


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
