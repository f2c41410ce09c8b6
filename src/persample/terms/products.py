"""Products of real matrices, by the faster of two libraries.

On a CPU, `a @ b` calls MKL, which does not use the widest instructions of processors of other makers than its own.
oneDNN does. Measured (AMD EPYC with AVX-512, one thread, float32, ms, MKL / oneDNN), for `(m, k) @ (k, n)`:

    512, 1600, 128    2.0 / 1.1      256, 1024, 256      1.2 / 0.6      512, 256, 784      1.8 / 0.8
    4096, 1024, 256    20 / 11       128, 2048, 512      2.4 / 1.2      10, 256, 512     0.04 / 0.03

Stacks of small matrices are left to MKL, which computes several of them at a time with several threads. Both libraries
accumulate in float32. The forward pass of a recording is not computed here: it has the same bits as a plain one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing

# Smaller products are faster with MKL: a call of oneDNN takes longer to start.
_MIN_MULTIPLICATIONS = 2**21
_MIN_SIZE = 16  # of each dimension


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, for two matrices.

    >>> multiply(torch.eye(2), torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    onednn = _find_onednn(a, b)
    if onednn is None:
        return a @ b
    # oneDNN copies its first argument if it is the transpose of a matrix. Then bᵀ aᵀ may be faster.
    if a.stride(1) != 1 and b.numel() + len(a) * b.shape[1] < a.numel():
        return onednn(b.mT, a).mT.contiguous()
    return onednn(a, b.mT)


def _find_onednn(a: Tensor, b: Tensor) -> _torch.Product | None:
    """The function of oneDNN for this product, None if it is not available or not faster."""
    sizes = (*a.shape, b.shape[1])
    if math.prod(sizes) < _MIN_MULTIPLICATIONS or min(sizes) < _MIN_SIZE:
        return None
    if tracing.get_trace() is not None:
        return None
    if not (_is_supported(a) and _is_supported(b) and _is_dense(b) and (a.stride(-1) == 1 or _is_dense(a))):
        return None
    return _torch.find_onednn_product()


def _is_supported(tensor: Tensor) -> bool:
    is_float = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return is_float and type(tensor) is Tensor and not tensor.requires_grad


def _is_dense(tensor: Tensor) -> bool:
    """Whether the entries of a matrix lie together; else oneDNN takes a thousand times as long for its second."""
    rows, columns = tensor.shape
    return tensor.stride() in ((columns, 1), (1, rows))
