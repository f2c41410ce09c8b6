"""The dtypes of indices, and conversions of tensors to wider dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

# The dtypes of indices and masks.
INDEX_DTYPES = {torch.bool, torch.uint8, torch.int64, torch.int32}


def widen(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that sums can be accumulated in: float32 in place of float16 and bfloat16."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def to_double(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; integers and booleans stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def promote(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors in the widest of their dtypes: under autocast, activations and gradients differ."""
    dtype = tensors[0].dtype
    if all([tensor.dtype == dtype for tensor in tensors]):
        return tensors
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)
