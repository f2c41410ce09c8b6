"""Functions that combine entries along given dimensions: reductions, scans, softmax, sorts, Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample._internal.facts import find_functions
from persample.layouts.algebra.engine import (
    DECLARATIONS,
    Declaration,
    broadcast,
    declare,
    get_argument,
    join_broadcast,
    keep,
    lose,
    move,
    normalise_dims,
)
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import make_reduced, make_root

# ---- one tensor ----


def _combine(call: Call, results: Sequence[Tensor], dims: Any) -> Motion | None:
    """The motion of a call that combines entries of its first tensor along `dims`; dropped dimensions are seen."""
    tensor, where = call.tensors[0], call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]):
        return None
    combined = normalise_dims(dims, tensor.dim())
    if where.dim in combined:
        if call.facts.sorts:  # rows in an order that depends on all samples
            return None
        if call.facts.is_additive:
            return make_uniform_motion(make_reduced(call, results), results)
        if (orders := call.facts.norm_orders) and get_argument(call, 1, "p", "ord", default=orders[-1]) in orders:
            return make_uniform_motion(make_root(call, results), results)
        return lose(call, results, f"of shape {tuple(tensor.shape)} combines samples along dimension {where.dim}")
    dropped = sum(dim < where.dim for dim in combined)
    dims_dropped = [where.dim if result.dim() == tensor.dim() else where.dim - dropped for result in results]
    if any(result.dim() not in (tensor.dim(), tensor.dim() - len(combined)) for result in results):
        return None
    return Motion(tuple(move(where, dim) for dim in dims_dropped))


def _declare_along(names: str, position: int, default: Any = None, *more: Any, **known: Any) -> None:
    """Declare functions that combine entries along an argument `dim`, at this position among the arguments."""

    @declare(*names.split(), *more, **{"is_size_free": True, **known})
    def combine(call: Call, results: Sequence[Tensor]) -> Motion | None:
        dims = get_argument(call, position, "dim", "axis", default=default)
        if isinstance(dims, (bool, Tensor)) or (dims is not None and not _are_dims(dims)):
            return None  # another overload: max(input, other), var(input, unbiased)
        if dims is None and default == "implicit":
            return None
        return _combine(call, results, dims)


def _are_dims(dims: Any) -> bool:
    return isinstance(dims, int) or (isinstance(dims, (tuple, list)) and all(isinstance(dim, int) for dim in dims))


_BY_KEYWORD = 99  # the position of an argument that has no position

_declare_along("sum", 1, is_linear=True, is_additive=True, is_plain_sum=True)
_declare_along("nansum", 1, is_additive=True, is_plain_sum=True)
_declare_along("mean", 1, is_linear=True, is_additive=True)
_declare_along("count_nonzero", 1, is_additive=True, is_plain_sum=True, is_size_free=False)
_declare_along("prod all any amax amin argmax argmin aminmax var std var_mean std_mean logsumexp max min cumsum", 1)
_declare_along("nanmean median nanmedian logcumsumexp cummax cummin", 1, is_size_free=False)
_declare_along("cumprod", 1)
_declare_along("mode", 1, -1, is_size_free=False)
_declare_along("norm", 2, norm_orders=(2, "fro"))
_declare_along("softmax log_softmax softmin", 1, "implicit")
_declare_along("sort argsort", 1, -1, sorts=True)
_declare_along("msort", _BY_KEYWORD, 0, is_size_free=False)
_declare_along("topk", 2, -1, sorts=True)
_declare_along("kthvalue", 2, -1, is_size_free=False)
_declare_along("glu", 1, -1)
_declare_along("", 2, 1, F.normalize)
_declare_along("gumbel_softmax", 4, -1, is_random=True, is_size_free=False)
_declare_along("", 2, None, torch.linalg.vector_norm, norm_orders=(2,))
_declare_along("", 2, None, torch.linalg.norm, is_size_free=False, norm_orders=("fro", None))
_declare_along("", 2, (-2, -1), torch.linalg.matrix_norm, is_size_free=False, norm_orders=("fro",))
_declare_along("", _BY_KEYWORD, None, torch.gradient, is_size_free=False)

_TRANSFORMS: list[tuple[str, Any]] = [
    ("fft ifft rfft irfft hfft ihfft", -1),
    ("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", (-2, -1)),
]
for _names, _default in _TRANSFORMS:
    _declare_along("", 2, _default, *(getattr(torch.fft, name) for name in _names.split()), is_size_free=False)


@declare(torch.fft.fftn, torch.fft.ifftn, torch.fft.rfftn, torch.fft.irfftn, torch.fft.hfftn, torch.fft.ihfftn)
def _transform_all(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Without dimensions, the last ones are transformed, as many as there are sizes."""
    sizes, dims = get_argument(call, 1, "s"), get_argument(call, 2, "dim")
    return _combine(call, results, range(-len(sizes), 0) if dims is None and sizes is not None else dims)


@declare("diff")
def _diff(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) > 1 or get_argument(call, 1, "n", default=1) == 0:  # prepend, append; n = 0 changes nothing
        return None
    return _combine(call, results, get_argument(call, 2, "dim", default=-1))


@declare("renorm")
def _renorm(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Scales down the slices along `dim` that have too large a norm."""
    rank = call.tensors[0].dim()
    kept = get_argument(call, 2, "dim") % rank
    others = [dim for dim in range(rank) if dim != kept]
    return _combine(call, results, others) if others else None


@declare("quantile", "nanquantile")
def _quantile(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """A dimension for several quantiles is added in front."""
    levels, dim = get_argument(call, 1, "q"), get_argument(call, 2, "dim")
    if not isinstance(levels, Tensor) or not levels.dim():
        return _combine(call, results, dim)
    motion = _combine(call, [result[0] for result in results], dim)
    if motion is None or not isinstance(motion.results[0], Layout):
        return motion
    return make_uniform_motion(move(motion.results[0], motion.results[0].dim + 1), results)


# max(input, other) is pointwise.
def _choose_overload(along: Declaration) -> Declaration:
    def choose(call: Call, results: Sequence[Tensor]) -> Motion | None:
        other = get_argument(call, 1, "other")
        return broadcast(call, results) if isinstance(other, Tensor) else along(call, results)

    return choose


for _function in find_functions("max", "min"):
    DECLARATIONS[_function] = _choose_overload(DECLARATIONS[_function])


@declare("bincount")
def _count_values(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The number of rows of each sample is the sample's own, if the values are the samples' numbers in the batch."""
    numbers, where = call.tensors[0], call.where[0]
    is_counted = len(results[0]) == call.batch and not any(call.where[1:]) and tracing.get_trace() is None
    if is_counted and isinstance(where, Layout):
        ids = where.get_ids(len(numbers), call.batch)
        if tuple(numbers.tolist()) == ids:
            return Motion((Layout(0),), depends_on_values=True)
    return lose(call, results, "combines all samples")


@declare("dist", combines_pairs=True)
@declare("histc", "histogram", "histogramdd", "cov", "corrcoef", "trace", *_torch.TRUTH_FUNCTIONS)
def _combine_everything(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return lose(call, results, "combines all samples")


@declare("multinomial", _torch.sample_dirichlet, is_random=True)
def _draw_from_rows(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _combine(call, results, -1)


@declare("stft", "istft")
def _stft(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Time becomes frequencies and frames, or the reverse; a batch dimension is in front."""
    where, last = call.where[0], 1 if call.facts.operator == "stft" else 2
    if isinstance(where, Layout) and where.dim >= call.tensors[0].dim() - last:
        return lose(call, results, f"combines samples along dimension {where.dim}")
    return keep(call, results)


# ---- several tensors ----


def _combine_pairs(call: Call, results: Sequence[Tensor], dim: int) -> Motion | None:
    """The motion of a call that broadcasts its tensors, then combines entries along `dim`, which it may drop."""
    motion, rank = join_broadcast(call), max(tensor.dim() for tensor in call.tensors)
    where, combined = motion and motion.results[0], dim % rank
    if motion is None or not isinstance(where, Layout):
        return motion
    if where.dim == combined:
        return lose(call, results, f"combines samples along dimension {where.dim}")
    is_dropped = results[0].dim() < rank
    return Motion((move(where, where.dim - (is_dropped and combined < where.dim)),), motion.aligned)


@declare("cosine_similarity", combines_pairs=True)
def _cosine_similarity(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _combine_pairs(call, results, get_argument(call, 2, "dim", default=1))


@declare("pairwise_distance", combines_pairs=True)
def _pairwise_distance(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _combine_pairs(call, results, -1)


@declare(torch.linalg.cross, torch.linalg.vecdot)
def _vector_product(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _combine_pairs(call, results, get_argument(call, 2, "dim", default=-1))


@declare("cross")
def _cross(call: Call, results: Sequence[Tensor]) -> Motion | None:
    dim = get_argument(call, 2, "dim")
    return None if dim is None else _combine_pairs(call, results, dim)


@declare("trapezoid", "trapz", "cumulative_trapezoid")
def _trapezoid(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) > 1 and call.tensors[1].dim() != call.tensors[0].dim():  # points along `dim`
        if any(call.where[1:]):
            return None
        return _combine(call, results, call.kwargs.get("dim", -1))
    return _combine_pairs(call, results, call.kwargs.get("dim", -1))
