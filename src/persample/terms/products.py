"""Products of real matrices, by torch's own kernels or, where `libraries.py` chooses it, by oneDNN.

Measured (AMD EPYC with AVX-512, one thread, float32, ms, MKL / oneDNN), for `(m, k) @ (k, n)`:

    512, 1600, 128    2.0 / 1.1      256, 1024, 256      1.2 / 0.6      512, 256, 784      1.8 / 0.8
    4096, 1024, 256    20 / 11       128, 2048, 512      2.4 / 1.2      10, 256, 512     0.04 / 0.03

Stacks of small matrices are left to MKL, which computes several of them at a time with several threads. Both libraries
accumulate in float32. The forward pass of a recording is not computed here, as it has the same bits as a plain one; the
gradients of inputs of large linear layers are.

If a result has few rows or columns, the libraries add up its products one after the other, and the error grows with
their number if all are equal: measured, 3e-5 for 2,048 and 1.4e-3 for 100,000, and 1.6e-5 at most for results of
32 x 32 and larger. Such products are computed in parts. GPUs are assumed to do so for all results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from persample import _torch
from persample._internal import tracing
from persample.terms.libraries import get_library, get_product

# Smaller products are faster with MKL: a call of oneDNN takes longer to start.
_MIN_MULTIPLICATIONS = 2**21
_MIN_SIZE = 16  # of each dimension
MAX_LENGTH = 2048  # of vectors whose products are added up one after the other
_MIN_BLOCKED_SIZE = 32
_COPIED_COLUMNS, _COLUMN_GAP = 256, 16
_BAD_STRIDE = 512  # numbers of four bytes: such rows meet in a few places of a cache
_MIN_TANH_SIZE = 2**14  # a conversion takes some 5 µs


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, for two matrices.

    >>> multiply(torch.eye(2), torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    onednn = _find_onednn(a, b)
    if onednn is None:
        return multiply_stacks(a, b)
    # oneDNN copies its first argument if it is the transpose of a matrix. Then bᵀ aᵀ may be faster.
    if a.stride(1) != 1 and b.numel() + len(a) * b.shape[1] < a.numel():
        return onednn(b.mT, a).mT.contiguous()
    return onednn(a, b.mT)


def multiply_stacks(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, for two matrices or two stacks of matrices, such that the error does not grow with their inner size.

    >>> multiply_stacks(torch.ones(2, 1, 5000), torch.ones(2, 5000, 3)).shape
    torch.Size([2, 1, 3])
    """
    if not _needs_parts(a, b):
        return a @ b
    size = a.shape[-1]
    count = -(-size // MAX_LENGTH)
    parts = zip(a.tensor_split(count, -1), b.tensor_split(count, -2), strict=True)
    first, second = next(parts)
    total = first @ second
    for first, second in parts:
        total += first @ second
    return total


def multiply_rows(a: Tensor) -> Tensor:
    """`a @ a.mH`, for a stack of matrices: the inner products of the rows of each.

    If rows lie 2048 bytes apart, or a multiple of that, the wide kernels of MKL read them at half of their speed. With
    "mkl", blocks of their columns are copied. Measured with these kernels on an AMD EPYC (one thread, float32, ms,
    without / with copies), for `batch, rows, columns`:

        16, 64, 4096    6.6 / 4.1      16, 64, 1024    1.7 / 0.9
        8, 128, 2048    4.5 / 2.8      32, 50, 512     1.0 / 0.7

    Without conflicts (16, 64, 768) and with many rows (8, 256, 3072) there is nothing to gain.

    >>> multiply_rows(torch.ones(2, 1, 3)).shape
    torch.Size([2, 1, 1])
    """
    if not _has_conflicts(a):
        return multiply_stacks(a, a.mH)
    copied = a.new_empty(*a.shape[:2], _COPIED_COLUMNS + _COLUMN_GAP)
    products: Tensor | None = None
    for columns in a.split(_COPIED_COLUMNS, 2):
        part = copied.narrow(2, 0, columns.shape[2]).copy_(columns)
        products = part @ part.mT if products is None else products.baddbmm_(part, part.mT)
    assert products is not None
    return products


def _has_conflicts(a: Tensor) -> bool:
    rows, columns = a.shape[1:]
    is_slow = 24 <= rows <= 128 and columns >= _BAD_STRIDE and a.stride(1) % _BAD_STRIDE == 0
    return is_slow and _is_supported(a) and tracing.get_trace() is None and get_library() == "mkl"


def _needs_parts(a: Tensor, b: Tensor) -> bool:
    if a.shape[-1] <= MAX_LENGTH or tracing.get_trace() is not None:
        return False
    is_blocked = a.device.type == "cpu" and min(a.shape[-2], b.shape[-1]) >= _MIN_BLOCKED_SIZE
    return not is_blocked and a.dtype in (torch.float32, torch.complex64)


def make_accumulator(like: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that adds `a @ b` to a matrix in place, for several matrices `a` that are stored as `like` is.

    >>> total = torch.zeros(2, 3)
    >>> make_accumulator(torch.eye(2), torch.ones(2, 3))(total, 2 * torch.eye(2))
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """
    onednn = _find_onednn(like, b)
    if onednn is None:
        return lambda total, a: total.addmm_(a, b)
    transposed = b.mT
    return lambda total, a: total.add_(onednn(a, transposed))


def compute_tanh(x: Tensor) -> Tensor:
    """`x.tanh()`, contiguous. oneDNN's tanh is as precise as torch's own (1.4 half units), and 4 times as fast.

    >>> compute_tanh(torch.zeros(2))
    tensor([0., 0.])
    """
    can_convert = x.numel() >= _MIN_TANH_SIZE and tracing.get_trace() is None and _is_supported(x)
    if not can_convert or get_product() is None:
        return x.tanh().contiguous()
    return x.contiguous().to_mkldnn().tanh_().to_dense()


def _find_onednn(a: Tensor, b: Tensor) -> _torch.Product | None:
    """The function of oneDNN for this product, None if it is not available or not faster."""
    can_use = prefers_onednn(len(a), b) and _is_supported(a) and (a.stride(-1) == 1 or _is_dense(a))
    return get_product() if can_use else None


def prefers_onednn(rows: int, b: Tensor) -> bool:
    """Whether `multiply(a, b)` is computed by oneDNN for a contiguous matrix `a` with this number of rows.

    >>> prefers_onednn(1, torch.ones(2, 2))
    False
    """
    size, columns = b.shape
    if min(rows, size, columns) < _MIN_SIZE or rows * b.numel() < _MIN_MULTIPLICATIONS:
        return False
    if tracing.get_trace() is not None or (size > MAX_LENGTH and min(rows, columns) < _MIN_BLOCKED_SIZE):
        return False
    return _is_supported(b) and _is_dense(b) and get_product() is not None


def _is_supported(tensor: Tensor) -> bool:
    is_float = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return is_float and type(tensor) is Tensor and not tensor.requires_grad


def _is_dense(tensor: Tensor) -> bool:
    """Whether the entries of a matrix lie together; else oneDNN takes a thousand times as long for its second."""
    rows, columns = tensor.shape
    return tensor.stride() in ((columns, 1), (1, rows))
