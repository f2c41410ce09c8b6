"""The torch functions without a declared motion, and what follows from the name and the arguments of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.facts import T, describe
from persample._internal.tree import find_tensors
from persample.errors import get_op_name

_ARITHMETIC = "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split()
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)}

# ---- moves ----

describe(
    "fliplr", "flipud", "rot90", "diagonal", "hsplit", "vsplit", "dsplit", "atleast_1d", "atleast_2d", "atleast_3d",
    "as_strided", "hstack", "vstack", "dstack", "column_stack", "alias_copy", "slice_copy", "unfold_copy", "data",
    torch.fft.fftshift, torch.fft.ifftshift, torch.linalg.diagonal, moves_entries=True,
)  # fmt: skip
describe("gather", "take_along_dim", "masked_select", moves_entries=True, picks_entries=True)
describe(
    "index_copy", "index_add", "index_reduce", "index_put", "scatter", "scatter_add", "scatter_reduce",
    "masked_scatter", T.__setitem__, writes_entries=True,
)  # fmt: skip
describe(T.copy_, writes_entries=True, combines_pairs=True)
describe(torch.nonzero, T.nonzero, "argwhere", "nonzero_static", "unique", "unique_consecutive", lists_entries=True)

# ---- new tensors ----

describe(
    T.type, T.cpu, T.cuda, T.float, T.double, T.half, T.bfloat16, T.int, T.long, T.short, T.bool, T.char, T.byte,
    T.cfloat, T.cdouble, T.chalf, T.to, T.pin_memory, "xpu", "mtia", "ipu", casts=True, is_size_free=True,
)  # fmt: skip
describe("tensor", "as_tensor", "asarray", casts=True, is_size_free=True, imports_data=True)
describe("zeros_like", "ones_like", "empty_like", "full_like", makes_like=True, is_size_free=True)
describe("rand_like", "randn_like", "randint_like", makes_like=True, is_size_free=True, is_random=True)
describe("new_zeros", "new_ones", "new_empty", makes_new=True, makes_sized=True)
describe(T.new, "new_empty_strided", "new_full", "new_tensor", makes_new=True)
describe("arange", "zeros", "ones", "empty", "eye", makes_sized=True)
describe(torch.rand, "randn", "randint", "randperm", is_random=True)

# ---- losses ----

describe(F.gaussian_nll_loss, is_additive=True, is_pointwise_loss=True, has_entries=True)
describe(F.triplet_margin_with_distance_loss, is_additive=True)

# ---- what leaves torch ----

describe(T.tolist, T.item, T.__int__, T.__long__, T.__float__, T.__index__, reads_values=True)
describe(T.numpy, T.__array__, reads_values=True, exposes_memory=True)
describe(
    T.__dlpack__, T.__cuda_array_interface__.__get__, T.data_ptr, "const_data_ptr", T.storage, T.untyped_storage,
    T.share_memory_, exposes_memory=True,
)  # fmt: skip
describe(
    "dtype", "device", "ndim", T.requires_grad.__get__, "layout", "is_cuda", "is_leaf", "grad_fn", "is_sparse",
    "is_quantized", "is_mps", "is_meta", "is_nested", "itemsize", "is_cpu", "is_xpu", "is_mkldnn", "is_ipu",
    "is_maia", "is_mtia", "is_sparse_csr", "is_vulkan", "is_xla", "retains_grad", "dim", "ndimension", "stride",
    "storage_offset", "is_contiguous", "element_size", "is_floating_point", "is_complex",
    "is_conj", "is_neg", "is_inference", "is_signed", "get_device", "is_tensor", "is_shared", "is_pinned",
    "is_coalesced", "is_distributed", "is_same_size", "sparse_dim", "dense_dim", reads_metadata=True,
)  # fmt: skip
describe("shape", "size", "numel", "nelement", "nbytes", T.__len__, reads_metadata=True, reads_size=True)
describe("equal", "allclose", compares_tensors=True)

# ---- the graph ----

describe("diag")
describe("native_dropout", is_random=True, training_at=2)
describe(torch.batch_norm, "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", statistics_at=3)
describe("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", statistics_at=3)
describe("batch_norm_update_stats", statistics_at=1)
describe(torch.embedding_bag)
describe(torch.autograd.grad, T.backward, torch.autograd.backward, differentiates=True)
describe(T.register_hook, registers_hook=True, returns_argument=True)
describe(T.register_post_accumulate_grad_hook, registers_hook=True)
describe(T.retain_grad, returns_argument=True)


@cache
def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument.

    >>> is_inplace(Tensor.add_), is_inplace(Tensor.__add__), is_inplace(Tensor.__ilshift__)
    (True, False, True)
    """
    name = get_op_name(func)
    return name in _INPLACE or (name.endswith("_") and not name.endswith("__"))


def find_results(result: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors in the result of a call, or in its first argument if the call returns None (`x[i] = y`)."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(find_tensors(args[0] if result is None and args else result))


def find_bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[Tensor, int]:
    """The bag of each index in `input`, and the number of bags; the arguments are as in `F.embedding_bag`."""
    if input.dim() == 2:
        return torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1]), len(input)
    assert offsets is not None  # torch raises otherwise
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(len(input), device=input.device)
    return torch.searchsorted(starts.contiguous(), positions.to(starts.dtype), right=True) - 1, len(starts)


# ---- arguments that torch drops ----


# The argument that a Python function of torch leaves out when it hands its call over to a function mode, and its
# default. Modes would compute something else than the caller asked for; the frame of the function has the argument.
DROPPED: dict[Any, tuple[str, Any]] = {
    F.l1_loss: ("weight", None),
    torch.chain_matmul: ("out", None),
    Tensor.dim_order: ("ambiguity_check", False),
}


def find_dropped(func: Callable[..., Any]) -> dict[str, Any]:
    """The argument that was left out of a call of `func`, by name; empty if it was not given.

    Must be called by the mode that the function has handed its call to: it reads the frames below.
    """
    if func not in DROPPED:
        return {}
    name, default = DROPPED[func]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    value = default if frame is None else frame.f_locals.get(name, default)
    return {} if value is default else {name: value}
