"""Small terms are joined: one norm and one product answer for all of them, with the same results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import record
from persample.gradients import stack as joined
from persample.gradients.stack import SmallStacks, Stack
from persample.terms import Dense, Outer, Sum
from persample.testing import loop_gradients

pytestmark = pytest.mark.quick

B, T, D = 3, 4, 5


class Layers(nn.Module):
    """Layers of one shape, a norm, an embedding and a layer whose term is not small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, D)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.large = nn.Linear(D, 700)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)) + x)
        return self.large(x)


def make_model(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Layers().to(dtype), torch.randint(7, (B, T))


def compute_losses(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().flatten(1).mean(1)


def record_clip(model: nn.Module, ids: Tensor, weights: Tensor | None = None, **options: Any) -> Any:
    """The recording of a step that is not the first one, in which uses have no tap."""
    for _ in range(2):
        with record(model, keep="clip", **{"max_norm": 0.1, **options}) as grads:
            losses = compute_losses(model, ids)
            (losses if weights is None else losses * weights).sum().backward()
    return grads


def clip_rows(rows: dict[str, Tensor], max_norm: float, samples: list[int]) -> dict[str, Tensor]:
    norms = torch.stack([row.flatten(1).double().norm(dim=1) for row in rows.values()]).norm(dim=0)
    factors = (max_norm / norms).clamp(max=1)
    return {name: torch.tensordot(factors[samples], row[samples].double(), 1) for name, row in rows.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most", [0, 100, 2**13, 2**20])
def test_the_answers_do_not_depend_on_the_limit(monkeypatch: pytest.MonkeyPatch, most: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(joined, "_MAX_ENTRIES", most)
    model, ids = make_model(dtype)
    grads = record_clip(model, ids)
    rows = loop_gradients(model, ids, lambda m, i: compute_losses(m, i).sum())
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for name, norms in grads.norms(per_parameter=True).items():
        torch.testing.assert_close(
            norms.double(), rows[name].flatten(1).double().norm(dim=1), rtol=tolerance, atol=1e-7
        )
    for name, part in clip_rows(rows, 0.1, [0, 1, 2]).items():
        torch.testing.assert_close(grads.clip()[name].double(), part, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_that_is_not_finite_is_left_out(bad: float) -> None:
    model, ids = make_model()
    weights = torch.ones(B, dtype=torch.float64)
    weights[1] = bad
    grads = record_clip(model, ids, weights, nonfinite="zero")
    rows = loop_gradients(model, ids, lambda m, i: compute_losses(m, i).sum())
    for name, part in clip_rows(rows, 0.1, [0, 2]).items():
        torch.testing.assert_close(grads.clip()[name], part)
        assert grads.norms(per_parameter=True)[name][1] == 0
    assert grads.nonfinite_count == 1


def test_contributions_that_cancel_are_exact() -> None:
    """Two positions that are nearly equal, with opposite gradients: in float32, the sum has no correct digit."""
    torch.manual_seed(0)
    input = torch.randn(B, 1, D).repeat(1, 2, 1) * torch.tensor([[1.0], [1 + 2e-7]])
    grad = torch.randn(B, 1, 4).repeat(1, 2, 1) * torch.tensor([[1e3], [-1e3]])
    stacks = SmallStacks()
    assert stacks.add(Stack(["a"], Outer(input, grad)))
    found = stacks.join()
    assert found is not None
    rows = torch.einsum("nto,nti->noi", grad.double(), input.double())
    weights = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(found.compute_squares(), rows.flatten(1).square().sum(1).float())
    torch.testing.assert_close(found.sum(weights)["a"], torch.tensordot(weights.double(), rows, 1).float())
    in_float32 = torch.einsum("nto,nti->noi", grad, input)
    assert ((in_float32 - rows).flatten(1).norm(dim=1) > 1e-3 * rows.flatten(1).norm(dim=1)).any()


def test_terms_that_are_not_joined() -> None:
    small = Dense(torch.ones(B, D))
    stacks = SmallStacks()
    assert stacks.add(Stack(["a"], small)) and stacks.add(Stack(["b", "c"], Dense(torch.ones(2 * B, D))))
    others = [
        Dense(torch.ones(B, D, dtype=torch.float64)),
        Dense(torch.ones(B, D, dtype=torch.complex64)),
        Dense(torch.ones(B, D, dtype=torch.bfloat16)),
        Dense(torch.ones(B, 2**13)),
        Outer(torch.ones(B, 1, 90), torch.ones(B, 1, 90)),
        Sum([small, small]),
    ]
    assert not any(stacks.add(Stack(["d"], term)) for term in others)
    found = stacks.join()
    assert found is not None and found.names == ["a", "b", "c"] and stacks.join() is None
    torch.testing.assert_close(found.compute_squares(), torch.full((B,), 3.0 * D))
    torch.testing.assert_close(found.compute_part_squares(), torch.full((3, B), float(D)))


def test_a_second_pass_is_refused() -> None:
    model, ids = make_model()
    with record(model, keep="clip", max_norm=1.0) as grads:
        compute_losses(model, ids).sum().backward()
        with pytest.raises(Exception, match="second backward pass"):
            F.relu(model(ids)).sum().backward()
    assert grads.norms().isfinite().all()
