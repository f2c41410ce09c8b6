"""Matrix products: y = x W and y = W x for samples x, in stacks (bmm), as bilinear forms and as einsum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.facts import find_functions
from persample.rules.registry import Terms, register_rule
from persample.terms import Blocks, Dense, Folded, Outer, sum_to_shape

_PRODUCTS = [*find_functions("mm", "matmul"), torch.linalg.matmul]


def _make_product_term(input: Tensor, grad: Tensor) -> Outer:
    """The term of W in y = x W: `(in, out)`, the transpose of the term of a linear layer."""
    return Outer(grad.conj(), input.conj())


@register_rule(
    *_PRODUCTS,
    accepts=lambda input, dim: dim < input.dim() - 1,
    when=lambda input, other: other.dim() == 2 and input.dim() >= 2,
    reads_result=False,
    stacks=True,
)  # fmt: skip
def samples_times_weight(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"other": _make_product_term(input.flatten(1, -2), grad.flatten(1, -2))}


@register_rule(
    *_PRODUCTS,
    accepts=lambda other, dim: dim != other.dim() - 2,
    batched=("other",),
    when=lambda input, other: input.dim() == 2 and other.dim() >= 2,
    reads_result=False,
)  # fmt: skip
def weight_times_samples(grad: Tensor, input: Tensor, other: Tensor) -> Terms:
    return {"input": Outer(other.mT.flatten(1, -2), grad.mT.flatten(1, -2))}


@register_rule(
    torch.addmm, Tensor.addmm, accepts=lambda mat1, dim: dim == 0, batched=("mat1",), reads_result=False, stacks=True
)
def addmm(grad: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, beta: complex = 1, alpha: complex = 1) -> Terms:
    of_input, of_product = (grad if factor == 1 else grad * factor.conjugate() for factor in (beta, alpha))
    return {"input": Dense(sum_to_shape(of_input, input.shape)), "mat2": _make_product_term(mat1, of_product)}


@register_rule(*find_functions("bmm"), accepts=lambda input, dim: dim == 1, reads_result=False)
def bmm(grad: Tensor, input: Tensor, mat2: Tensor) -> Terms:
    terms = [_make_product_term(x, g) for x, g in zip(input.unbind(1), grad.unbind(1), strict=True)]
    return {"mat2": Blocks(terms, range(len(mat2)), len(mat2), single=True)}


@register_rule(
    F.bilinear, batched=("input1", "input2"), accepts=lambda input, dim: dim < input.dim() - 1, reads_result=False
)
def bilinear(grad: Tensor, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Terms:
    pairs = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2).flatten(1, -2)
    grad = grad.flatten(1, -2)
    return {"weight": Folded(Outer(pairs, grad), weight.shape, range(1)), "bias": Dense(grad.sum(1))}


# ---- einsum ----


def _parse(equation: str) -> tuple[str, str, str] | None:
    """The labels of the two operands and of the result; None if a label is repeated in one of them or is implicit."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation or operands.count(",") != 1:
        return None
    first, second = operands.split(",")
    return None if any(len(set(part)) < len(part) for part in (first, second, result)) else (first, second, result)


def _is_product(equation: Any, operands: Any, weight: int) -> bool:
    """Whether each label of the weight is either a label of the samples or one of the result."""
    labels = _parse(equation) if isinstance(equation, str) and len(operands) == 2 else None
    if labels is None or not all(isinstance(t, Tensor) for t in operands):
        return False
    weight_labels, sample_labels, result_labels = labels[weight], labels[1 - weight], labels[2]
    sizes = [dict(zip(own, t.shape, strict=True)) for own, t in zip(labels, operands, strict=False)]
    same_sizes = all(sizes[1].get(label, size) == size for label, size in sizes[0].items())  # no broadcasting
    return same_sizes and all((label in sample_labels) != (label in result_labels) for label in weight_labels)


def compute_einsum_term(
    grad: Tensor, labels: tuple[str, str, str], samples: Tensor, weight: Tensor, position: int
) -> Folded:
    """The term of the operand at `position`; the other operand has the samples.

    A label of the weight is summed over (`inner`, also a label of the samples) or part of the result (`outer`). The
    labels that samples and result share are positions. All remaining labels of the samples are summed first.
    """
    weight_labels, sample_labels, result_labels = labels[position], labels[1 - position], labels[2]
    inner = [label for label in weight_labels if label in sample_labels]
    outer = [label for label in weight_labels if label in result_labels]
    shared = [label for label in sample_labels if label in result_labels]
    for dim in reversed([d for d, label in enumerate(sample_labels) if label not in shared and label not in inner]):
        samples = samples.sum(1 + dim)
        sample_labels = sample_labels.replace(sample_labels[dim], "")

    def reorder(rows: Tensor, row_labels: str, last: list[str]) -> Tensor:
        """`(batch, *row_labels)` to `(batch, positions, last)`."""
        rows = rows.permute(0, *(1 + row_labels.index(label) for label in [*shared, *last]))
        return rows.reshape(len(rows), rows.shape[1 : 1 + len(shared)].numel(), rows.shape[1 + len(shared) :].numel())

    out_dims = [weight_labels.index(label) for label in outer]
    term = Outer(reorder(samples, sample_labels, inner), reorder(grad, result_labels, outer))
    return Folded(term, weight.shape, out_dims)


def _register_einsum(weight: int) -> None:
    names = ("first", "second")

    @register_rule(
        torch.einsum,
        accepts=lambda input, dim: True,
        batched=(names[1 - weight],),
        when=lambda equation, *operands: _is_product(equation, operands, weight),
        reads_result=False,
    )
    def einsum(grad: Tensor, equation: str, first: Tensor, second: Tensor) -> Terms:
        labels, operands = _parse(equation), (first, second)
        assert labels is not None
        return {names[weight]: compute_einsum_term(grad, labels, operands[1 - weight], operands[weight], weight)}


_register_einsum(weight=0)
_register_einsum(weight=1)
