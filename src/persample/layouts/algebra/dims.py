"""Functions that combine entries along given dimensions: reductions, scans, softmax, sorts, Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.layouts.algebra.engine import (
    DECLARATIONS,
    Declaration,
    broadcast,
    declare,
    find_functions,
    get_argument,
    lose,
    move,
    normalise_dims,
)
from persample.layouts.call import Call
from persample.layouts.functions import SORTS
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import ADDITIVE, make_reduced


def _combine(call: Call, results: Sequence[Tensor], dims: Any) -> Motion | None:
    """The motion of a call that combines entries of its first tensor along `dims`; dropped dimensions are seen."""
    tensor, where = call.tensors[0], call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]):
        return None
    combined = normalise_dims(dims, tensor.dim())
    if where.dim in combined:
        if call.func in SORTS:  # rows in an order that depends on all samples
            return None
        if call.func in ADDITIVE:
            return make_uniform_motion(make_reduced(call), results)
        return lose(call, results, f"of shape {tuple(tensor.shape)} combines samples along dimension {where.dim}")
    dropped = sum(dim < where.dim for dim in combined)
    dims_dropped = [where.dim if result.dim() == tensor.dim() else where.dim - dropped for result in results]
    if any(result.dim() not in (tensor.dim(), tensor.dim() - len(combined)) for result in results):
        return None
    return Motion(tuple(move(where, dim) for dim in dims_dropped))


def _declare_along(names: str, position: int, default: Any = None, *more: Any) -> None:
    """Declare functions that combine entries along an argument `dim`, at this position among the arguments."""

    @declare(*names.split(), *more)
    def combine(call: Call, results: Sequence[Tensor]) -> Motion | None:
        dims = get_argument(call, position, "dim", "axis", default=default)
        if isinstance(dims, (bool, Tensor)) or (dims is not None and not _are_dims(dims)):
            return None  # another overload: max(input, other), var(input, unbiased)
        if dims is None and default == "implicit":
            return None
        return _combine(call, results, dims)


def _are_dims(dims: Any) -> bool:
    return isinstance(dims, int) or (isinstance(dims, (tuple, list)) and all(isinstance(dim, int) for dim in dims))


_declare_along("sum mean nansum nanmean prod all any amax amin argmax argmin aminmax var std var_mean std_mean", 1)
_declare_along("logsumexp count_nonzero", 1)
_declare_along("max min median nanmedian", 1)
_declare_along("mode", 1, -1)
_declare_along("norm", 2)
_declare_along("cumsum cumprod logcumsumexp cummax cummin", 1)
_declare_along("softmax log_softmax softmin", 1, "implicit")
_declare_along("sort argsort", 1, -1)
_declare_along("topk kthvalue", 2, -1)
_declare_along("glu", 1, -1)
_declare_along("", 2, 1, F.normalize)
_declare_along("", 2, None, torch.linalg.vector_norm, torch.linalg.norm)

_TRANSFORMS: list[tuple[str, Any]] = [
    ("fft ifft rfft irfft hfft ihfft", -1),
    ("fft2 ifft2 rfft2 irfft2", (-2, -1)),
    ("fftn ifftn rfftn irfftn", None),
]
for _names, _default in _TRANSFORMS:
    _declare_along("", 2, _default, *(getattr(torch.fft, name) for name in _names.split()))
_declare_along("", 1, None, torch.fft.fftshift, torch.fft.ifftshift)


# max(input, other) is pointwise.
def _choose_overload(along: Declaration) -> Declaration:
    def choose(call: Call, results: Sequence[Tensor]) -> Motion | None:
        other = get_argument(call, 1, "other")
        return broadcast(call, results) if isinstance(other, Tensor) else along(call, results)

    return choose


for _function in find_functions("max", "min"):
    DECLARATIONS[_function] = _choose_overload(DECLARATIONS[_function])


@declare(F.cosine_similarity, torch.cosine_similarity)
def _cosine_similarity(call: Call, results: Sequence[Tensor]) -> Motion | None:
    ranks = {tensor.dim() for tensor in call.tensors}
    wheres = {where for where in call.where if where is not None}
    dim = get_argument(call, 2, "dim", default=1)
    if len(ranks) > 1 or len(wheres) != 1:
        return None
    (where,) = wheres
    (rank,) = ranks
    assert isinstance(where, Layout)
    if where.dim == dim % rank:
        return lose(call, results, f"combines samples along dimension {where.dim}")
    layout = move(where, where.dim - (dim % rank < where.dim))
    size = results[0].shape[layout.dim]
    aligned = tuple(
        (i, move(where, where.dim))
        for i, (tensor, own) in enumerate(zip(call.tensors, call.where, strict=True))
        if own is None and tensor.shape[where.dim] == size > 1
    )
    return Motion((layout,), aligned)
