"""Direct tests: what they find, and how to watch a private optimizer from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DirectTest:
    """The result of a test of one claim.

    `p_value` bounds the probability of such a finding in a training whose claim is right. Findings that a right
    training cannot have get 0, and findings that need no explanation get 1.

    >>> DirectTest("noise", "the deviation is 0.50 of what is claimed", p_value=1e-30).p_value < 1e-4
    True
    """

    name: str
    finding: str
    p_value: float


class NotTested(Exception):
    """A test cannot be made; the message says why."""


def get_parameters(optimizer: Any) -> list[Tensor]:
    """The trainable parameters of a private optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def get_unit(optimizer: Any) -> float:
    """Size of a clipped gradient in `p.grad`."""
    is_mean = optimizer.loss_reduction == "mean"
    divisor = optimizer.expected_batch_size * optimizer.accumulated_iterations if is_mean else 1
    bound = 1.0 if getattr(optimizer, "normalize_clipping", False) else float(optimizer.max_grad_norm)
    return bound / divisor


def read_release(optimizer: Any, unit: float) -> list[Tensor]:
    """The gradients that the wrapped optimizer gets, as real vectors for each parameter, in units of the bound."""
    return [
        flatten(torch.zeros_like(p) if p.grad is None else p.grad).float() / unit for p in get_parameters(optimizer)
    ]


def flatten(values: Tensor) -> Tensor:
    """A real vector with the entries of a tensor; a complex entry becomes two."""
    values = values.detach()
    return (torch.view_as_real(values) if values.is_complex() else values).flatten()


@contextmanager
def make_uncounted_steps(optimizer: Any) -> Iterator[None]:
    """Let `step()` release a gradient that the wrapped optimizer does not use and that the accountant does not count.

    Bound, noise and gradients are restored at the end.
    """
    inner, names = optimizer.original_optimizer, ("step_hook", "check_step", "max_grad_norm", "noise_multiplier")
    before = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    step = vars(inner).get("step")  # a scheduler of the learning rate replaces the method
    inner.step = lambda *args, **kwargs: None
    optimizer.step_hook = optimizer.check_step = None
    try:
        yield
    finally:
        del inner.step
        if step is not None:
            inner.step = step
        for name, value in before.items():
            setattr(optimizer, name, value)
        optimizer.zero_grad()


def release_empty_batch(optimizer: Any) -> list[Tensor]:
    """What a step without samples releases; inside of `make_uncounted_steps`."""
    optimizer.zero_grad()
    if not hasattr(optimizer, "row_count"):  # of Opacus, which requires rows
        for p in get_parameters(optimizer):
            p.grad_sample = p.new_zeros(0, *p.shape)  # type: ignore[attr-defined]
    unit = get_unit(optimizer)
    optimizer.step()
    return read_release(optimizer, unit)


def combine(p_values: Sequence[float]) -> float:
    """A bound of the probability that the smallest of some p-values is so small (Bonferroni)."""
    return min(1.0, len(p_values) * min(p_values))
