"""The floor of a private step computes what a private step needs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.private_floor import Floor
from benchmarks.workloads import select_workloads


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_norms_and_sums_of_the_floor_equal_those_of_autograd(name: str) -> None:
    floor = Floor(select_workloads(name)[0])
    weights = torch.rand(len(floor.x))
    for i, layer in enumerate(floor.layers):
        if i not in floor.inputs:
            continue
        layer.requires_grad_()
        add, squares = floor.measure(i, layer)
        for n in (0, 5):
            rows = torch.autograd.grad(
                layer(floor.inputs[i][n : n + 1]), [*layer.parameters()], floor.grads[i][n : n + 1]
            )
            for row, square in zip(rows, squares, strict=True):
                torch.testing.assert_close(square[n], row.square().sum(), rtol=1e-4, atol=0)
        weighted = floor.grads[i] * weights.view(-1, *[1] * (floor.grads[i].dim() - 1))
        expected = torch.autograd.grad(layer(floor.inputs[i]), [*layer.parameters()], weighted)
        for total, want in zip(add(weights), expected, strict=True):
            torch.testing.assert_close(total.view(want.shape), want, rtol=1e-3, atol=1e-3)
        layer.requires_grad_(False)
    before = [p.clone() for p in floor.parameters]
    floor.run_step()
    assert all((p != old).any() for p, old in zip(floor.parameters, before, strict=True))
