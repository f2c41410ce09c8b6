"""Comparison of an answer with its expected value, with an error that names the answer and the difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from persample._internal.precision import to_double

# Smallest scale that a difference is divided by: entries of an answer that should be zero may have rounding errors.
SMALLEST_SCALE = 1e-3


def assert_answer(answer: str, actual: Any, expected: Tensor, tolerance: float) -> None:
    """Assert that an answer is equal to its expected value, up to `tolerance` relative to its largest entry.

    >>> assert_answer("norms()", torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), 1e-6)
    Traceback (most recent call last):
    AssertionError: norms() is wrong: it differs by 5.0e-02 of the largest expected entry, 1.0e-06 is allowed.
    """
    if not isinstance(actual, Tensor):
        raise AssertionError(f"{answer} is wrong: it is a {type(actual).__name__} and not a tensor.")
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{answer} is wrong: it has shape {tuple(actual.shape)}, the expected shape is {tuple(expected.shape)}."
        )
    if actual.is_complex() != expected.is_complex():
        kind = "complex" if expected.is_complex() else "real"
        raise AssertionError(f"{answer} is wrong: it is {actual.dtype}, and a {kind} tensor is expected.")
    if not expected.numel():
        return
    difference = (to_double(actual) - to_double(expected)).abs()
    scale = to_double(expected).abs().max().clamp(min=SMALLEST_SCALE)
    error = float((difference / scale).max())
    if not error <= tolerance:  # NaN is an error, too
        raise AssertionError(
            f"{answer} is wrong: it differs by {error:.1e} of the largest expected entry, {tolerance:.1e} is allowed."
        )


def assert_precise(answer: str, actual: Tensor, bits: int) -> None:
    """Assert that an answer is computed with at least so many bits, such as 32 for float32."""
    if torch.finfo(actual.dtype).bits < bits:
        raise AssertionError(f"{answer} is wrong: it is {actual.dtype}, and {bits} bits are expected.")
