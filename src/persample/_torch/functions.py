"""Torch functions without a public name, and the operators of `torch.ops`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from persample._torch.lookup import find, read

pack_padded_sequence: Any = find("torch._pack_padded_sequence", "PackedSequence")
pad_packed_sequence: Any = find("torch._pad_packed_sequence", "PackedSequence")
pad_sequence: Any = find("torch._C._nn.pad_sequence", "pad_sequence")
grouped_mm: Any = find("torch._grouped_mm", "grouped_mm")
cudnn_rnn_flatten_weight: Any = find("torch._cudnn_rnn_flatten_weight", "ExpandedWeight in recurrent layers")

_OpOverload: Any = find("torch._ops.OpOverload", "Operators of torch.ops")
_OpOverloadPacket: Any = find("torch._ops.OpOverloadPacket", "Operators of torch.ops")


def get_operator_name(func: Any) -> str | None:
    """The name "library::operator" of an operator of `torch.ops`, None for any other function."""
    if isinstance(func, _OpOverload):
        func = func.overloadpacket
    return str(func._qualified_op_name) if isinstance(func, _OpOverloadPacket) else None


def get_schema(operator: Any) -> Any:
    """The arguments and results that an operator of `torch.ops` declares."""
    return read(operator, "_schema", "persample.compile")


def find_signatures(name: str) -> list[dict[str, Any]]:
    """The parameters of each overload of an operator of torch, with their defaults."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [{a.name: a.default_value for a in get_schema(overload).arguments} for overload in overloads]


# torch.tensordot with two lists of dimensions, which torch.tensordot calls.
tensordot: Callable[..., Any] = find("torch._VF.tensordot", "tensordot() with weights")

# Whether all or any entries are true; torch.distributions and compiled code call them.
TRUTH_FUNCTIONS: list[Callable[..., Any]] = [
    find(f"torch.{name}", "torch.distributions") for name in ("_is_all_true", "_is_any_true")
]

# Draws random numbers for each row; torch.distributions calls it.
sample_dirichlet: Callable[..., Any] = find("torch._sample_dirichlet", "torch.distributions")

# Draw random numbers for each entry; torch.distributions calls them.
RANDOM_FUNCTIONS: list[Callable[..., Any]] = [
    find(f"torch.{name}", "torch.distributions")
    for name in ("_standard_gamma", "_standard_gamma_grad", "_dirichlet_grad")
]


@cache
def is_mutating(operator: Any) -> bool:
    """Whether an operator of `torch.ops` declares that it writes into an argument."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and schema.is_mutable
