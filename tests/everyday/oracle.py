"""What the rows of a loop are: plain autograd on one sample after the other, with the noise of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.everyday.loop import Batch, Loop, Model, Step

Gradients = dict[str, Tensor]


@dataclass
class Expected:
    """The rows of a step (none if samples are coupled), and the gradient of the batch."""

    rows: Gradients
    gradient: Gradients
    reduction: str
    size: int

    @property
    def norms(self) -> Tensor:
        if not self.rows:
            return torch.ones(1)
        return torch.stack([rows.reshape(self.size, -1).norm(dim=1) for rows in self.rows.values()]).norm(dim=0)

    @property
    def combined(self) -> Gradients:
        """The mean or the sum of the rows."""
        return {name: rows.mean(0) if self.reduction == "mean" else rows.sum(0) for name, rows in self.rows.items()}


def as_module(model: Model) -> nn.Module:
    """The model, or all models of a dict or a list as one module with the names that `record` gives to parameters."""
    if isinstance(model, nn.Module):
        return model
    return nn.ModuleDict(model) if isinstance(model, dict) else nn.ModuleList(model)


def run_step(step: Step, model: Model, batch: Batch) -> None:
    """Make the forward and the backward pass."""
    loss = step(model, batch)
    if loss is not None:
        loss.sum().backward()  # a vector of losses: the slow door


def find_gradients(model: Model, run: Callable[[Model], None]) -> Gradients:
    """The gradients of a plain pass on a copy of the model; zeros for parameters without one."""
    model = copy.deepcopy(model)
    parameters = dict(as_module(model).named_parameters())
    run(model)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in parameters.items()}


def compute_expected(loop: Loop, model: Model, batch: Batch, size: int, seed: int) -> Expected:
    """The rows of a batch by the loop's definition. Asserts that they add up to the gradient of the batch."""
    torch.manual_seed(seed)
    prepared, own = loop.prepare(batch), loop.own or loop.step
    state, noise = torch.get_rng_state(), Noise()
    gradient = find_gradients(model, lambda m: run_step(loop.step, m, copy.deepcopy(prepared)))
    torch.set_rng_state(state)
    with noise:
        own_gradient = find_gradients(model, lambda m: run_step(own, m, copy.deepcopy(prepared)))
    if loop.is_coupled:
        return Expected({}, gradient, "", size)
    rows = []
    for n in range(size):
        sample = copy.deepcopy(loop.take(prepared, n))
        factor, step = _find_share(loop, sample, prepared, size)
        with noise.replay(n):
            row = find_gradients(model, partial(run_step, step, batch=sample))
        rows.append({name: factor * g if factor else torch.zeros_like(g) for name, g in row.items()})
    stacked = {name: torch.stack([row[name] for row in rows]) for name in gradient}
    return Expected(stacked, gradient, _find_reduction(loop, stacked, own_gradient), size)


def _find_share(loop: Loop, sample: Batch, batch: Batch, size: int) -> tuple[float, Step]:
    """The loss of a sample alone, and the factor that makes it the batch size times its share of the batch's loss."""
    if loop.count is not None:
        own = float(loop.count(sample))
        return own and own / float(loop.count(batch)) * size, loop.own or loop.step
    if loop.share is not None:
        return size, partial(_compute_share, loop.share, whole=batch)
    return 1.0, loop.own or loop.step


def _compute_share(share: Any, model: Model, sample: Batch, whole: Batch) -> Tensor:
    return share(model, sample, whole)  # type: ignore[no-any-return]


def _find_reduction(loop: Loop, rows: Gradients, gradient: Gradients) -> str:
    def equals(combine: Callable[[Tensor], Tensor]) -> bool:
        scale = max(float(g.abs().max()) for g in gradient.values() if g.numel())
        allowed = max(1e-9, loop.tolerance / 10) * max(scale, 1e-3)
        return all(bool(((combine(rows[name]) - g).abs() <= allowed).all()) for name, g in gradient.items())

    if len(next(iter(rows.values()))) == 1:
        return "mean"
    is_mean, is_sum = equals(lambda r: r.mean(0)), equals(lambda r: r.sum(0))
    assert is_mean != is_sum, f"{loop}: the rows of the oracle do not add up to the gradient of the batch"
    return "mean" if is_mean else "sum"


class Noise(TorchDispatchMode):
    """Keeps the random numbers of a batch, and replays those of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []
        self._sample: int | None = None
        self._position = 0

    @contextmanager
    def replay(self, sample: int) -> Iterator[None]:
        self._sample, self._position = sample, 0
        with self:
            yield
        assert self._position == len(self._drawn), "the sample alone draws other random numbers than the batch"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if self._sample is None:
            self._drawn.append(result.clone())
            return result
        drawn, self._position = self._drawn[self._position], self._position + 1
        for dim in range(drawn.dim()):
            if drawn.shape[dim] != result.shape[dim]:
                drawn = drawn.narrow(dim, self._sample * result.shape[dim], result.shape[dim])
        return result.copy_(drawn)


def perturb(model: Model) -> Model:
    """Add noise to every parameter: an initial 0 or 1 can hide a missing factor."""
    with torch.no_grad():
        for p in as_module(model).parameters():
            p += 0.1 * torch.randn_like(p)
    return model
