"""Functions that compute each entry of the result from entries at the same place, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import _torch
from persample.layouts.algebra.engine import broadcast, declare, follow, keep, lose, move
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion

_UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj conj_physical cos cosh deg2rad digamma erf erfc
    erfinv exp exp2 expm1 floor frac frexp i0 imag invert isfinite isinf isnan isneginf isposinf isreal lgamma log
    log10 log1p log2 logical_not logit mvlgamma nan_to_num polygamma rad2deg real reciprocal
    resolve_conj resolve_neg round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc celu elu
    gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus
    softshrink softsign tanhshrink threshold zero_ fill
""".split()

_BROADCASTING = """
    addcdiv addcmul and atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp clamp_max
    clamp_min copysign eq float_power floor_divide floordiv fmax fmin fmod ge gcd gt heaviside hypot igamma igammac lcm
    ldexp le lerp logaddexp logaddexp2 logical_and logical_or logical_xor lt masked_fill maximum minimum mod ne
    nextafter or polar pow remainder rshift lshift xlogy xor complex isclose rfloordiv rlshift rmod rpow rrshift
    rtruediv
""".split()

_RANDOM = """
    bernoulli poisson uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ binomial normal
""".split()

# All other functions of torch.special are pointwise.
_SPECIAL = {*torch.special.__all__} - {"logsumexp", "softmax", "log_softmax"}

_POINTWISE = {"is_pointwise": True, "is_size_free": True}
_DROPOUT = {"is_random": True, **_POINTWISE}


@declare(*_UNARY, *_BROADCASTING, *_SPECIAL, "unravel_index", **_POINTWISE)
@declare(*_RANDOM, *_torch.RANDOM_FUNCTIONS, is_random=True, **_POINTWISE)
@declare("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", training_at=2, **_DROPOUT)
@declare("dropout1d", "dropout2d", "dropout3d", training_at=2, **_DROPOUT)  # a dropped channel belongs to one sample
@declare("rrelu", training_at=3, **_DROPOUT)
@declare("add", "sub", "rsub", "neg", "pos", is_linear=True, **_POINTWISE)
@declare("mul", "div", is_bilinear=True, **_POINTWISE)
@declare("clone", "detach", "contiguous", moves_entries=True, **_POINTWISE)
@declare("requires_grad_", returns_argument=True, **_POINTWISE)
@declare("tril", "triu", reads_positions=True, is_size_free=True)
def combine_entries(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return broadcast(call, results)


@declare("where", is_pointwise=True, is_size_free=True, lists_entries=True)
def choose_entries(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return broadcast(call, results) if len(call.args) + len(call.kwargs) > 1 else None


@declare(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[0]
    is_by_channel = isinstance(where, Layout) and where.dim == 1 and call.tensors[1].numel() > 1
    return None if is_by_channel else keep(call, results)


@declare("index_fill", writes_entries=True)
def _index_fill(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """A constant written over entries of a sample belongs to that sample."""
    return None if call.has_loose_rows() else keep(call, results)


@declare("isin")
def _isin(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Each entry of the first argument is looked up in the second one, as in a set."""
    return _compare_with_constants(call, results, of_entries=0)


@declare("bucketize")
def _bucketize(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _compare_with_constants(call, results, of_entries=0)


@declare("searchsorted")
def _searchsorted(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Values are looked up in one sequence, or in the sequence with the same index in all dimensions but the last."""
    sequence, where = call.tensors[0], call.where[0]
    if sequence.dim() == 1:
        return _compare_with_constants(call, results, of_entries=1)
    if isinstance(where, Layout) and where.dim == sequence.dim() - 1:
        return lose(call, results, f"combines samples along dimension {where.dim}")
    return follow(call, results, [range(tensor.dim()) for tensor in call.tensors], range(sequence.dim()))


def _compare_with_constants(call: Call, results: Sequence[Tensor], of_entries: int) -> Motion | None:
    """The motion of a function of each entry of one argument and of all entries of the others, which are constants.

    A trial would hardly notice samples in the other arguments: few values are equal.
    """
    where = call.where[of_entries] if len(call.where) > of_entries else None
    if any(w for i, w in enumerate(call.where) if i != of_entries):
        return lose(call, results, "compares each sample with all others")
    return make_uniform_motion(move(where, where.dim), results) if isinstance(where, Layout) else None


@declare("view_as_real", "view_as_complex", torch.linalg.vander, F.one_hot)
def _last_dim_changes(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """A dimension is added or removed at the end; entries keep their place in the other dimensions.

    The largest class of the batch may decide how many zeros `one_hot` appends, as the longest sequence decides padding.
    """
    where = call.where[0]
    return keep(call, results) if isinstance(where, Layout) and where.dim < results[0].dim() else None


@declare(torch.broadcast_tensors)
def _broadcast_tensors(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Each tensor is expanded by itself."""
    layouts = []
    for tensor, where, result in zip(call.tensors, call.where, results, strict=True):
        offset = result.dim() - tensor.dim()
        layouts.append(move(where, where.dim + offset) if isinstance(where, Layout) else None)
        if isinstance(where, Layout) and result.shape[where.dim + offset] != tensor.shape[where.dim]:
            return None
    return Motion(tuple(layouts))
