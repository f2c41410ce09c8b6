"""Curvature from rows: labels for the Fisher matrix, and the Kronecker factors of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from persample import _torch
from persample._internal.precision import promote, widen
from persample.errors import PerSampleError
from persample.terms import Folded, Joined, Outer, Patches, Term, is_complex, iterate_samples

# How positions that share a weight are combined; see `compute_kronecker_factors`.
KroneckerKind = Literal["expand", "reduce"]


class KroneckerFactors(NamedTuple):
    """The Fisher matrix of a weight, as a matrix `(out, in)`, is approximately the product `grad ⊗ input`.

    `input` is `(in, in)`, the second moment of the layer's inputs; `grad` is `(out, out)`, that of the gradients of its
    outputs. The entries of the weight are in the order of `weight.flatten()`, except if `out` are not its first
    dimensions (some einsums).
    """

    input: Tensor
    grad: Tensor


@torch.no_grad()
def sample_labels(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`logits.shape[:-1]`: a label for each row of logits, drawn from the softmax over the last dimension.

    With these labels and the cross entropy as the loss, the second moment of the rows is an unbiased estimate of the
    Fisher matrix. With the labels of the data it is the empirical Fisher matrix, which is another matrix.

    >>> sample_labels(torch.tensor([[50.0, 0.0], [0.0, 50.0]]))
    tensor([0, 1])
    """
    with _torch.DisableTorchFunction():
        rows = logits.detach().float().softmax(-1).flatten(0, -2)
        return rows.multinomial(1, generator=generator).view(logits.shape[:-1])


def check_kind(kind: str) -> None:
    """Refuse an unknown kind of factors."""
    if kind not in ("expand", "reduce"):
        raise PerSampleError(f"kind must be 'expand' or 'reduce', got {kind!r}.")


def compute_kronecker_factors(term: Term, kind: KroneckerKind, scale: float) -> KroneckerFactors | None:
    """The factors of a weight, None if the term does not hold inputs and gradients of outputs.

    For N rows with positions t, "expand" is A = mean over n and t of a aᵀ, G = 1/N sum over n and t of g gᵀ. "reduce"
    is the same for one position, with the mean of a and the sum of g over the positions of a row (Eschenhagen et al.,
    2023). Positions without a gradient, such as padding, do not count.

    Args:
        scale: the factor of the gradients.
    """
    if not has_both_sides(term):
        return None
    totals: list[Tensor] = []  # of the inputs, of the gradients, and the number of positions
    for input, grad in _iterate_sides(term):
        is_used = (grad != 0).any(2)
        if kind == "reduce":
            sizes = is_used.sum(1, keepdim=True).clamp(min=1).to(input.dtype)
            input, grad = (input * is_used[:, :, None]).sum(1) / sizes, grad.sum(1)
            is_used = is_used.any(1)
        input = input.masked_fill(~is_used.unsqueeze(-1), 0).flatten(0, -2)
        grad = grad.flatten(0, -2)
        parts = [input.mT @ input, grad.mT @ grad, is_used.sum()]
        totals = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
    return KroneckerFactors(totals[0] / totals[2].clamp(min=1), totals[1] * (scale**2 / max(1, term.batch)))


def find_sides(term: Term, rows: int, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`(..., rows)` and `(..., columns)`: the vectors of both sides of gradients that are read as matrices.

    The gradients of a layer's outputs and its inputs at each position, or else the columns and the rows of the matrices
    themselves; for some samples at a time.
    """
    if _is_matrix(term, rows, columns):
        yield from ((grad, input) for input, grad in _iterate_sides(term))
        return
    for _, (block,) in iterate_samples(term):
        matrices = block.reshape(len(block), rows, columns)
        yield matrices.mT, matrices


def _is_matrix(term: Term, rows: int, columns: int) -> bool:
    """Whether a term holds both sides of a matrix of these sizes."""
    if isinstance(term, Joined):
        return all(_is_matrix(part, rows, columns) for part in term.terms)
    sizes = (term.shape[0], term.shape[1:].numel()) if term.shape else ()
    return has_both_sides(term) and not isinstance(term, Folded) and sizes == (rows, columns)


def has_both_sides(term: Term) -> bool:
    """Whether a term holds the inputs of a layer and the gradients of its outputs."""
    if isinstance(term, Joined):
        return all(map(has_both_sides, term.terms))
    is_product = isinstance(term, (Outer, Folded)) or (isinstance(term, Patches) and term.groups == 1)
    return is_product and not is_complex(term)


def _iterate_sides(term: Term) -> Iterator[tuple[Tensor, Tensor]]:
    """`(rows, positions, in)` and `(rows, positions, out)`, for some rows at a time."""
    if isinstance(term, Joined):
        for part in term.terms:
            yield from _iterate_sides(part)
        return
    step = max(1, 2**22 // max(1, _count_entries(term) // max(1, term.batch)))
    for start in range(0, max(1, term.batch), step):
        yield _find_sides(term.some(start, min(start + step, term.batch)))


def _count_entries(term: Term) -> int:
    """The number of entries of both sides."""
    if isinstance(term, Patches):
        return term.grad.numel() + term.grad[:, :, 0].numel() * term.shape[1:].numel()
    outer = term.term if isinstance(term, Folded) else term
    assert isinstance(outer, Outer)
    return outer.input.numel() + outer.grad.numel()


def _find_sides(term: Term) -> tuple[Tensor, Tensor]:
    """Both sides of a term, in one dtype, float32 or wider."""
    if isinstance(term, Patches):
        input = term.extract_patches().squeeze(1).mT
        grad = term.grad.movedim(2, -1).flatten(1, -2)
    else:
        outer = term.term if isinstance(term, Folded) else term
        assert isinstance(outer, Outer)
        input, grad = outer.input, outer.grad
    input, grad = promote(widen(input), widen(grad))
    return input, grad
