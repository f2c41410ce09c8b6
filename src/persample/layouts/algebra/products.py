"""Products: each dimension of an argument has a letter, as in einsum; letters that the result lacks are summed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import _torch
from persample.layouts.algebra.engine import (
    DIFFERENT_ORDERS,
    broadcast,
    cross,
    declare,
    get_argument,
    lose,
    merge_rows,
    move,
)
from persample.layouts.call import Call
from persample.layouts.ids import make_layout
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion, make_uniform_motion
from persample.layouts.reductions import make_reduced

Letters = Sequence[Any]


def _contract(call: Call, results: Sequence[Tensor], letters: Sequence[Letters], out: Letters) -> Motion | None:
    """The motion of a product; `letters[i]` has a letter for each dimension of tensor i, `out` those of the result."""
    letters, out = [list(of_tensor) for of_tensor in letters], list(out)
    joined = _join_samples(call, results, letters, out)
    if joined is None or isinstance(joined, Motion):
        return joined
    found, letter, size = joined
    if letter not in out:
        if call.facts.is_additive:
            return make_uniform_motion(make_reduced(call, results), results)
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


def _join_samples(
    call: Call, results: Sequence[Tensor], letters: Sequence[Letters], out: list[Any]
) -> tuple[Layout, Any, int] | Motion | None:
    """The layout, the letter and the size of the dimension that all samples lie in; the motion if there are others."""
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
            cause = "combines each sample with every other"
            if letter not in out or here not in out:
                return lose(call, results, cause)
            return cross(call, results, cause, move(found, out.index(letter)), move(where, out.index(here)))
        elif tensor.shape[where.dim] != size:
            return None
        else:
            found = merge_rows(found, where, size, call.batch)
            if found is None:
                return lose(call, results, DIFFERENT_ORDERS)
    return None if found is None else (found, letter, size)


def _matrix_letters(rank: int, rows: str, columns: str) -> list[Any]:
    """Letters of a matrix or a stack of them: batch dimensions are numbered from the right."""
    return [*range(rank - 2, 0, -1), rows, columns]


@declare("matmul", "rmatmul", torch.linalg.matmul, is_size_free=True, is_additive=True, is_plain_sum=True)
@declare("bmm", "mm", "mv", is_size_free=True)
def multiply_matrices(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) != 2:
        return None
    first, second = call.tensors
    if call.facts.operator == "rmatmul":
        first, second = second, first
    left = ["k"] if first.dim() == 1 else _matrix_letters(first.dim(), "n", "k")
    right = ["k"] if second.dim() == 1 else _matrix_letters(second.dim(), "k", "m")
    batch = max(len(left), len(right)) - 2
    out = [*range(batch, 0, -1), *(["n"] if first.dim() > 1 else []), *(["m"] if second.dim() > 1 else [])]
    letters = [right, left] if call.facts.operator == "rmatmul" else [left, right]
    return _contract(call, results, letters, out)


@declare("dot", "vdot", is_additive=True, is_plain_sum=True, combines_pairs=True)
def _dot(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _contract(call, results, ["k", "k"], "")


@declare("outer")
def _outer(call: Call, results: Sequence[Tensor]) -> Motion | None:
    return _contract(call, results, ["n", "m"], "nm")


@declare("inner", is_additive=True, is_plain_sum=True)
def _inner(call: Call, results: Sequence[Tensor]) -> Motion | None:
    left, right = ([(i, dim) for dim in range(tensor.dim() - 1)] for i, tensor in enumerate(call.tensors))
    if not all(tensor.dim() for tensor in call.tensors):
        return broadcast(call, results)
    return _contract(call, results, [[*left, "k"], [*right, "k"]], [*left, *right])


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
    return _contract(call, results, [left, right], out)


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
    out = [*letters[0][: ranks[0] - 1], *letters[-1][1:]]
    return _contract(call, results, letters, out)


@declare("addmm", "baddbmm", "addmv", "addbmm", "addr", is_size_free=True)
def multiply_and_add(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) != 3 or not all(isinstance(t, Tensor) for t in call.args[:3]) or len(call.args) < 3:
        return None
    letters = {
        "addmm": ("nk", "km", "nm"),
        "baddbmm": ("bnk", "bkm", "bnm"),
        "addmv": ("nk", "k", "n"),
        "addbmm": ("bnk", "bkm", "nm"),
        "addr": ("n", "m", "nm"),
    }[call.facts.operator]
    rank = call.tensors[0].dim()
    return _contract(call, results, [letters[2][len(letters[2]) - rank :], letters[0], letters[1]], letters[2])


@declare(F.linear, is_size_free=True, shares_weights=True)
def apply_linear(call: Call, results: Sequence[Tensor]) -> Motion | None:
    if len(call.tensors) > 2 and call.tensors[2].dim() > 1:  # a bias for each row
        return None
    rank = call.tensors[0].dim()
    letters: list[Letters] = [[*range(rank - 1), "i"], ["o", "i"][2 - call.tensors[1].dim() :], ["o"]]
    return _contract(call, results, letters[: len(call.tensors)], [*range(rank - 1), "o"][: results[0].dim()])


@declare("bilinear")
def _bilinear(call: Call, results: Sequence[Tensor]) -> Motion | None:
    batch = list(range(call.tensors[0].dim() - 1))
    letters: list[Letters] = [[*batch, "i"], [*batch, "j"], "oij", "o"]
    return _contract(call, results, letters[: len(call.tensors)], [*batch, "o"])


@declare(torch.einsum, is_size_free=True, is_additive=True, is_plain_sum=True)
def apply_einsum(call: Call, results: Sequence[Tensor]) -> Motion | None:
    equation = call.args[0]
    if not isinstance(equation, str) or len(call.tensors) != equation.count(",") + 1:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
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


@declare(torch.cdist)
def _cdist(call: Call, results: Sequence[Tensor]) -> Motion | None:
    rank = call.tensors[0].dim()
    if call.tensors[1].dim() != rank:
        return None
    batch = list(range(rank - 2))
    return _contract(call, results, [[*batch, "n", "k"], [*batch, "m", "k"]], [*batch, "n", "m"])
