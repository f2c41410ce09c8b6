"""Products, whose equations are written as in einsum, and functions of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import _torch
from persample.layouts.algebra.engine import Letters, broadcast, declare, follow, get_argument, keep, lose, move
from persample.layouts.call import Call
from persample.layouts.ids import make_layout
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion

# The products that have one equation. The first letters of an operand are missing if it has fewer dimensions.
_EQUATIONS: dict[Any, str] = {
    "dot": "k,k->",
    "vdot": "k,k->",
    "outer": "n,m->nm",
    "addmm": "nm,nk,km->nm",
    "baddbmm": "bnm,bnk,bkm->bnm",
    "addmv": "n,nk,k->n",
    "addbmm": "nm,bnk,bkm->nm",
    "addr": "nm,n,m->nm",
    "bilinear": "...i,...j,oij,o->...o",
    "cdist": "...nk,...mk->...nm",
}


@declare("dot", "vdot", is_additive=True, is_plain_sum=True, combines_pairs=True)
@declare("outer", "bilinear", torch.cdist)
@declare("addmm", "baddbmm", "addmv", "addbmm", "addr", is_size_free=True)
def _multiply(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if not all(isinstance(argument, Tensor) for argument in call.args[: len(call.tensors)]):
        return None  # another overload: addmm(beta, input, alpha, mat1, mat2)
    return _follow_equation(call, results, _EQUATIONS[call.facts.operator])


@declare("matmul", "rmatmul", torch.linalg.matmul, is_size_free=True, is_additive=True, is_plain_sum=True)
@declare("bmm", "mm", "mv", is_size_free=True)
def _multiply_matrices(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) != 2:
        return None
    is_reflected = call.facts.operator == "rmatmul"
    first, second = reversed(call.tensors) if is_reflected else call.tensors
    left, right = "k" if first.dim() == 1 else "...nk", "k" if second.dim() == 1 else "...km"
    out = "..." + "n" * (first.dim() > 1) + "m" * (second.dim() > 1)
    return _follow_equation(call, results, f"{right},{left}->{out}" if is_reflected else f"{left},{right}->{out}")


@declare(F.linear, is_size_free=True, shares_weights=True)
def _apply_linear(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) > 2 and call.tensors[2].dim() > 1:  # a bias for each row
        return None
    return _follow_equation(call, results, "...i,oi,o->...o" if call.tensors[1].dim() > 1 else "...i,i->...")


@declare("inner", is_additive=True, is_plain_sum=True)
def _inner(call: Call, results: Sequence[Tensor]) -> Motion | None:
    left, right = ([(i, dim) for dim in range(tensor.dim() - 1)] for i, tensor in enumerate(call.tensors))
    if not all(tensor.dim() for tensor in call.tensors):
        return broadcast(call, results)
    return follow(call, results, [[*left, "k"], [*right, "k"]], [*left, *right])


@declare(torch.tensordot, _torch.tensordot)
def _tensordot(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The letters of a dimension are those of its partner, if it has one, else its own."""
    dims = call.args[2:4] if call.func is _torch.tensordot else get_argument(call, 2, "dims", default=2)
    first, second = call.tensors
    if isinstance(dims, int):
        pairs = {second_dim: first.dim() - dims + second_dim for second_dim in range(dims)}
    elif isinstance(dims, Tensor):
        return None
    else:
        of_first, of_second = ([dim] if isinstance(dim, int) else dim for dim in dims)
        pairs = {b % second.dim(): a % first.dim() for a, b in zip(of_first, of_second, strict=True)}
    left = list(range(first.dim()))
    right: list[Any] = [pairs.get(dim, f"second {dim}") for dim in range(second.dim())]
    out = [letter for letter in (*left, *right) if letter not in pairs.values()]
    return follow(call, results, [left, right], out)


@declare("kron")
def _kron(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Index i of one tensor and j of the other, of size n, become index `i * n + j`."""
    (i, where), *others = [(i, where) for i, where in enumerate(call.where) if where is not None]
    if others:
        return lose(call, results, "combines each sample with every other")
    assert isinstance(where, Layout)
    tensor, other = call.tensors[i], call.tensors[1 - i]
    dim = where.dim + results[0].dim() - tensor.dim()
    of_other = dim - results[0].dim() + other.dim()
    size = other.shape[of_other] if of_other >= 0 else 1
    ids = where.get_ids(tensor.shape[where.dim], call.batch)
    repeated = tuple(n for n in ids for _ in range(size)) if i == 0 else ids * size
    return make_uniform_motion(make_layout(dim, repeated, call.batch, where.loose), results)


@declare(torch.chain_matmul, torch.linalg.multi_dot)
def _chain(call: Call, results: Sequence[Tensor]) -> Motion | None:
    ranks = [tensor.dim() for tensor in call.tensors]
    letters = [[i, i + 1] for i in range(len(ranks))]
    if ranks[0] == 1:
        letters[0] = [1]
    if ranks[-1] == 1:
        letters[-1] = [len(ranks) - 1]
    return follow(call, results, letters, [*letters[0][: ranks[0] - 1], *letters[-1][1:]])


@declare(torch.einsum, is_size_free=True, is_additive=True, is_plain_sum=True)
def _apply_einsum(call: Call, results: Sequence[Tensor]) -> Motion | None:
    equation = call.args[0]
    if not isinstance(equation, str) or len(call.tensors) != equation.count(",") + 1:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = sorted({c for c in inputs if c.isalpha() and inputs.count(c) == 1})
        output = ("..." if "..." in inputs else "") + "".join(letters)
    return _follow_equation(call, results, f"{inputs}->{output}")


def _follow_equation(call: Call, results: Sequence[Tensor], equation: str) -> Motion | None:
    """The motion of a product in the notation of einsum."""
    inputs, _, output = equation.partition("->")
    letters = [_spell(part, tensor.dim()) for part, tensor in zip(inputs.split(","), call.tensors, strict=False)]
    return follow(call, results, letters, _spell(output, results[0].dim()))


def _spell(part: str, rank: int) -> Letters:
    """The letters of an operand; dimensions of an ellipsis are numbered from the right."""
    before, dots, after = part.partition("...")
    if not dots:
        return part[len(part) - rank :]
    return [*before, *range(rank - len(before) - len(after), 0, -1), *after]


# ---- functions of each matrix in a stack: inverses, factorisations, solutions of linear systems ----

_OF_ONE_MATRIX = """
    inv inv_ex det slogdet cholesky cholesky_ex qr svd svdvals eigh eigvalsh eig eigvals matrix_exp pinv lu lu_factor
    lu_factor_ex ldl_factor ldl_factor_ex matrix_power matrix_rank cond
""".split()


@declare(*(getattr(torch.linalg, name) for name in _OF_ONE_MATRIX))
@declare("inverse", "pinverse", "det", "logdet", "slogdet", "matrix_exp", "matrix_power", "cholesky")
@declare("cholesky_inverse", "qr", "svd")
def _of_matrices(call: Call, results: Sequence[Tensor]) -> Motion | None:
    where = call.where[0]
    if isinstance(where, Layout) and where.dim >= call.tensors[0].dim() - 2:
        return lose(call, results, f"combines samples along dimension {where.dim}, within a matrix")
    return keep(call, results)


# Functions that solve a linear system for each column of a matrix, and the position of that matrix.
_SOLVERS = {
    torch.linalg.solve: 1, torch.linalg.solve_ex: 1, torch.linalg.solve_triangular: 1, torch.linalg.lu_solve: 2,
    torch.linalg.ldl_solve: 2, torch.cholesky_solve: 0, Tensor.cholesky_solve: 0, torch.lu_solve: 0, Tensor.lu_solve: 0,
}  # fmt: skip


@declare(*_SOLVERS, torch.linalg.householder_product, "orgqr", "triangular_solve", "lu_unpack")
def _of_pairs(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """The dimensions before the matrices are independent, and so are the columns of a right-hand side."""
    ranks = [_find_matrix_rank(call, i) for i in range(len(call.tensors))]
    rank = max(ranks)
    if rank < 2 or set(ranks) != {rank}:
        return None
    samples = [i for i, where in enumerate(call.where) if where is not None]
    where = call.where[samples[0]]
    assert isinstance(where, Layout)
    if samples == [_SOLVERS.get(call.func)] and where.dim == rank - 1 == call.tensors[samples[0]].dim() - 1:
        is_left = call.kwargs.get("left", True) and not call.kwargs.get("adjoint", False)
        return make_uniform_motion(move(where, where.dim), results) if is_left and len(results) == 1 else None
    letters = [[*range(rank - 2), *[None] * (tensor.dim() - rank + 2)] for tensor in call.tensors]
    return follow(call, results, letters, range(rank - 2))


def _find_matrix_rank(call: Call, position: int) -> int:
    """The number of dimensions of an argument, with one more for a vector: pivots, or a right-hand side."""
    tensor = call.tensors[position]
    is_pivots = not tensor.is_floating_point() and not tensor.is_complex()
    is_factors = call.facts.operator in ("linalg_householder_product", "orgqr") and position == 1
    first = call.tensors[0]
    is_solve = call.func in (torch.linalg.solve, torch.linalg.solve_ex) and position == 1
    is_vector = is_solve and tensor.dim() > 0 and tensor.shape == first.shape[:-1]
    return tensor.dim() + (is_pivots or is_factors or is_vector)
