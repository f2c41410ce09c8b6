"""Sums of outer products: what every matrix product contributes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from persample.terms.base import Term, promoted


@dataclass(frozen=True)
class Outer(Term):
    """`g_n = sum_t grad[n, t] ⊗ conj(input[n, t])`, a matrix `(out, in)` for each sample.

    `input` is `(batch, t, in)`, what came in; `grad` is `(batch, t, out)`, the gradient of what went out.
    """

    input: Tensor
    grad: Tensor

    def dense(self) -> Tensor:
        input, grad = promoted(self.input, self.grad)
        return grad.mT @ input.conj()
