"""Functions that compute each entry of the result from entries at the same place, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.layouts.algebra.engine import broadcast, declare, get_argument, make_motion, move
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion

_UNARY = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
    conj conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 imag invert isfinite
    isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit mvlgamma nan_to_num neg
    negative polygamma positive rad2deg real reciprocal resolve_conj resolve_neg round rsqrt sgn sigmoid sign signbit
    sin sinc sinh sqrt square tan tanh trunc entr log_ndtr ndtr ndtri expit celu elu gelu hardshrink hardsigmoid
    hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus softshrink softsign tanhshrink
    threshold rrelu clone detach contiguous float double half bfloat16 int long short bool char byte requires_grad
    dropout alpha_dropout feature_dropout feature_alpha_dropout bernoulli normal_ uniform_ random_ exponential_
    geometric_ cauchy_ log_normal_ zero_ fill fill_ tril triu
""".split()

_BROADCASTING = """
    add addcdiv addcmul and arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
    clamp clamp_max clamp_min clip copysign div divide eq float_power floor_divide floordiv fmax fmin fmod ge gcd
    greater greater_equal gt heaviside hypot igamma igammac lcm ldexp le lerp less less_equal logaddexp logaddexp2
    logical_and logical_or logical_xor lt masked_fill maximum minimum mod mul multiply ne nextafter not_equal or polar
    pow remainder rshift lshift rsub sub subtract true_divide truediv xlogy xlog1py xor zeta complex isclose
""".split()


@declare(*_UNARY, *_BROADCASTING)
def _pointwise(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if any(result.shape != results[0].shape for result in results):
        return None
    return broadcast(call, results)


# dropout1d to dropout3d drop whole channels, which belong to one sample wherever the batch dimension is.
@declare(F.dropout1d, F.dropout2d, F.dropout3d)
def _channel_dropout(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return broadcast(call, results)


@declare(torch.where, Tensor.where)
def _where(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return broadcast(call, results) if len(call.args) + len(call.kwargs) > 1 else None


@declare(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]) or (where.dim == 1 and call.tensors[1].numel() > 1):
        return None
    return make_motion(call, results, move(where, where.dim))


@declare(torch.view_as_real, torch.view_as_complex, F.one_hot)
def _last_dim_changes(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """A dimension is added or removed at the end; entries keep their place in the other dimensions."""
    if call.func is F.one_hot and get_argument(call, 1, "num_classes", default=-1) < 0:
        return None  # the number of classes is the largest of all samples
    where = call.where[0]
    if not isinstance(where, Layout) or where.dim >= results[0].dim():
        return None
    return make_motion(call, results, move(where, where.dim))


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
