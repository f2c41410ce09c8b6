"""Functions of each matrix in a stack: inverses, factorisations, solutions of linear systems."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from persample.layouts.algebra.engine import declare, follow, keep, lose, move
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion

_FUNCTIONS = """
    inv inv_ex det slogdet cholesky cholesky_ex qr svd svdvals eigh eigvalsh eig eigvals matrix_exp pinv lu lu_factor
    lu_factor_ex ldl_factor ldl_factor_ex matrix_power matrix_rank cond
""".split()


@declare(*(getattr(torch.linalg, name) for name in _FUNCTIONS))
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
