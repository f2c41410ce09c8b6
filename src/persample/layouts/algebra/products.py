"""Products: each dimension of an argument has a letter, as in einsum; letters that the result lacks are summed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.layouts.algebra.engine import broadcast, declare, get_argument, has_same_rows, lose, make_motion, move
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import ADDITIVE, make_reduced

Letters = Sequence[Any]


def _contract(call: Call, results: Sequence[Tensor], letters: Sequence[Letters], out: Letters) -> Motion | None:
    """The motion of a product; `letters[i]` has a letter for each dimension of tensor i, `out` those of the result."""
    if sum(isinstance(value, Tensor) for value in call.kwargs.values()) > 1:
        return None  # keyword arguments may be in any order
    letters, out = [list(of_tensor) for of_tensor in letters], list(out)
    found: Layout | None = None
    letter: Any = None
    size = 0
    for tensor, where, of_tensor in zip(call.tensors, call.where, letters, strict=True):
        if where is None:
            continue
        assert isinstance(where, Layout)
        here = of_tensor[where.dim]
        if found is None:
            found, letter, size = where, here, tensor.shape[where.dim]
        elif here != letter:
            return lose(call, results, "combines each sample with every other")
        elif tensor.shape[where.dim] != size:
            return None
        elif not has_same_rows(found, where):
            if found.ids is not None or where.ids is not None:  # rows in a list may follow the pattern of the others
                return None
            return lose(call, results, "has the samples in different orders in its arguments")
    if found is None:
        return None
    if letter not in out:
        if call.func in ADDITIVE:
            return make_uniform_motion(make_reduced(call), results) if found.ids is None else None
        return lose(call, results, "sums over the samples")
    dim = out.index(letter)
    if results[0].shape[dim] != size:
        return None
    aligned = []
    for i, (tensor, where, of_tensor) in enumerate(zip(call.tensors, call.where, letters, strict=True)):
        if where is None and letter in of_tensor:
            own_dim = of_tensor.index(letter)
            if tensor.shape[own_dim] == size:
                aligned.append((i, move(found, own_dim)))
    return Motion((move(found, dim),), tuple(aligned))


def _matrix_letters(rank: int, rows: str, columns: str) -> list[Any]:
    """Letters of a matrix or a stack of them: batch dimensions are numbered from the right."""
    return [*range(rank - 2, 0, -1), rows, columns]


@declare("matmul", torch.linalg.matmul)
def _matmul(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) != 2:
        return None
    first, second = call.tensors
    if call.func is Tensor.__rmatmul__:
        return None
    left = ["k"] if first.dim() == 1 else _matrix_letters(first.dim(), "n", "k")
    right = ["k"] if second.dim() == 1 else _matrix_letters(second.dim(), "k", "m")
    batch = max(len(left), len(right)) - 2
    out = [*range(batch, 0, -1), *(["n"] if first.dim() > 1 else []), *(["m"] if second.dim() > 1 else [])]
    return _contract(call, results, [left, right], out)


@declare("bmm", "mm", "mv")
def _mm(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _matmul(call, results)


@declare("dot", "vdot")
def _dot(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _contract(call, results, ["k", "k"], "")


@declare("outer", "ger")
def _outer(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _contract(call, results, ["n", "m"], "nm")


@declare("addmm", "baddbmm", "addmv", "addbmm", "addr")
def _add_product(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) != 3 or not all(isinstance(t, Tensor) for t in call.args[:3]) or len(call.args) < 3:
        return None
    name = call.func.__name__.strip("_")
    letters = {
        "addmm": ("nk", "km", "nm"),
        "baddbmm": ("bnk", "bkm", "bnm"),
        "addmv": ("nk", "k", "n"),
        "addbmm": ("bnk", "bkm", "nm"),
        "addr": ("n", "m", "nm"),
    }[name]
    rank = call.tensors[0].dim()
    return _contract(call, results, [letters[2][len(letters[2]) - rank :], letters[0], letters[1]], letters[2])


@declare(F.linear)
def _linear(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) > 2 and call.tensors[2].dim() > 1:  # a bias for each row
        return None
    rank = call.tensors[0].dim()
    letters: list[Letters] = [[*range(rank - 1), "i"], ["o", "i"][2 - call.tensors[1].dim() :], ["o"]]
    return _contract(call, results, letters[: len(call.tensors)], [*range(rank - 1), "o"][: results[0].dim()])


@declare(F.bilinear, torch.bilinear)
def _bilinear(call: Call, results: Sequence[Tensor]) -> Motion | None:
    batch = list(range(call.tensors[0].dim() - 1))
    letters: list[Letters] = [[*batch, "i"], [*batch, "j"], "oij", "o"]
    return _contract(call, results, letters[: len(call.tensors)], [*batch, "o"])


@declare(torch.einsum)
def _einsum(call: Call, results: Sequence[Tensor]) -> Motion | None:
    equation = call.args[0]
    if not isinstance(equation, str) or len(call.tensors) != equation.count(",") + 1:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if any(len(set(part.replace("...", ""))) < len(part.replace("...", "")) for part in parts):
        return None  # a diagonal
    ranks = [tensor.dim() - len(part.replace("...", "")) for tensor, part in zip(call.tensors, parts, strict=True)]
    most = max(ranks) if "..." in inputs else 0
    if not arrow:
        letters = sorted({c for c in inputs if c.isalpha() and inputs.count(c) == 1})
        output = ("..." if "..." in inputs else "") + "".join(letters)
    spelled = [_spell(part, rank) for part, rank in zip(parts, ranks, strict=True)]
    return _contract(call, results, spelled, _spell(output, most))


def _spell(part: str, rank: int) -> list[Any]:
    """The letters of an operand; dimensions of an ellipsis are numbered from the right."""
    before, dots, after = part.partition("...")
    return [*before, *(range(rank, 0, -1) if dots else ()), *after]


@declare(F.scaled_dot_product_attention)
def _attention(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Queries, keys and values are matrices; the dimensions before them are independent."""
    if get_argument(call, 8, "enable_gqa", default=False):
        return None
    in_matrices = [
        isinstance(where, Layout) and where.dim >= tensor.dim() - 2
        for tensor, where in zip(call.tensors, call.where, strict=True)
    ]
    if any(in_matrices[1:3]):  # keys or values
        return lose(call, results, "attends from each sample to the others")
    if any(in_matrices):
        return None
    return broadcast(call, results)


@declare(torch.cdist)
def _cdist(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    if call.tensors[1].dim() != rank:
        return None
    batch = list(range(rank - 2))
    return _contract(call, results, [[*batch, "n", "k"], [*batch, "m", "k"]], [*batch, "n", "m"])


_MATRIX_FUNCTIONS = """
    inv inv_ex det slogdet cholesky cholesky_ex qr svd svdvals eigh eigvalsh eig eigvals matrix_exp pinv lu lu_factor
    matrix_power matrix_rank cond
""".split()


@declare(
    *(getattr(torch.linalg, name) for name in _MATRIX_FUNCTIONS), "inverse", "det", "logdet", "slogdet", "matrix_exp"
)
def _of_matrices(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Functions of each matrix in a stack."""
    tensor, where = call.tensors[0], call.where[0]
    if not isinstance(where, Layout) or any(call.where[1:]) or where.dim >= tensor.dim() - 2:
        return None
    return make_motion(call, results, move(where, where.dim))
