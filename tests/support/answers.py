"""Every answer of a recording against its rows, computed by a loop in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from persample.terms import Dense
from persample.terms.sketch import SparseSketch, TensorSketch
from persample.testing.oracle import Gradients
from tests.support.modules import flatten_rows


def check_answers(grads: Any, rows: Gradients, tolerance: float = 1e-8) -> None:
    """Assert that each answer of a full recording follows from these rows, `{name: (rows, *shape)}`."""
    rows = {name: rows[name] for name in grads.names}
    matrix = flatten_rows(rows)
    count, norms = len(matrix), matrix.norm(dim=1)
    limit, weights = float(norms.median()) or 1.0, torch.linspace(-1, 2, count, dtype=matrix.dtype)
    factors = (limit / norms.clamp(min=1e-30)).clamp(max=1)

    def compare(actual: Any, expected: Any) -> None:
        if isinstance(expected, dict):
            assert actual.keys() == expected.keys()
            for name, part in expected.items():
                compare(actual[name], part)
            return
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-6), check_dtype=False
        )

    def combine(values: Tensor) -> dict[str, Tensor]:
        return {name: torch.tensordot(values, part, 1) for name, part in rows.items()}

    assert grads.row_count == count
    compare(grads.dense(), rows)
    compare(grads.norms(), norms)
    compare(grads.norms(per_parameter=True), {name: part.flatten(1).norm(dim=1) for name, part in rows.items()})
    compare(grads.clip_factors(limit), factors)
    compare(grads.clip(limit), combine(factors))
    by_part = {name: (limit / part.flatten(1).norm(dim=1).clamp(min=1e-30)).clamp(max=1) for name, part in rows.items()}
    compare(
        grads.clip(limit, per_parameter=True),
        {name: torch.tensordot(by_part[name], part, 1) for name, part in rows.items()},
    )
    compare(grads.sum(weights), combine(weights))
    compare(grads.mean(), combine(torch.full((count,), 1 / max(1, count), dtype=matrix.dtype)))
    direction = {
        name: torch.linspace(-1, 1, part[0].numel(), dtype=matrix.dtype).view(part.shape[1:])
        for name, part in rows.items()
    }
    compare(grads.dot(direction), matrix @ flatten_rows({n: p[None] for n, p in direction.items()})[0])
    compare(grads.gram(), matrix @ matrix.mT)
    compare(grads.inner(grads), norms.square())
    if count:
        compare(grads[-1], {name: part[-1] for name, part in rows.items()})
    chosen = grads.names[-1:]
    compare(grads.select(chosen).norms(), rows[chosen[0]].flatten(1).norm(dim=1))
    compare(grads.scale(direction).dense(), {name: part * direction[name] for name, part in rows.items()})
    compare(
        grads.fisher_diagonal(weights.abs()),
        {name: torch.tensordot(weights.abs(), part.square(), 1) for name, part in rows.items()},
    )
    compare(grads.second_moment(), {name: part.square().mean(0) for name, part in rows.items()})
    compare(grads.variance(), {name: part.var(0) for name, part in rows.items()})
    noise = sum(part.var(0).sum() for part in rows.values())
    compare(grads.noise_scale(), noise / (matrix.mean(0).square().sum() - noise / count))
    for method in ("tensor", "sparse"):
        sketches = {
            name: TensorSketch(8, 3, name, part.shape[1:], torch.device("cpu"))
            if method == "tensor"
            else SparseSketch(8, 3, name)
            for name, part in rows.items()
        }
        expected: Any = sum(Dense(part).project(sketches[name]) for name, part in rows.items())
        compare(grads.project(8, seed=3, method=method), expected)
