"""`explain()` and `check()` list the functions that were tried rather than known."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

import persample
from persample.layouts import MEMO
from tests.support.cases import Calls

B, D = 3, 4
KINDS: list[dict[str, Any]] = [{}, {"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}]


def double(x: Tensor) -> Tensor:
    """A function that persample does not know."""
    if has_torch_function_unary(x):
        return handle_torch_function(double, (x,), x)  # type: ignore[no-any-return]
    return x * 2


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.block_diag(double(double(self.linear(x))))  # block_diag is not declared


def make_model() -> nn.Module:
    return Calls(lambda m, x: m.head(m.first(x).tanh()), first=nn.Linear(D, D), head=Head())


def run(model: nn.Module, **options: Any) -> Any:
    with persample.record(model, loss_reduction="sum", **options) as grads:
        model(torch.randn(B, D)).square().sum().backward()
    return grads


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_tried_functions_are_listed_in_each_step(options: dict[str, Any]) -> None:
    """Also if the motion is that of an earlier trial."""
    MEMO.clear()
    model = make_model()
    for _ in range(3):
        found = run(model, **options).explain()
        names = [(tried.name, tried.place, tried.calls) for tried in found.tried]
        assert names == [("double", "module 'head' (Head)", 2), ("block_diag", "module 'head' (Head)", 1)]
        assert "double, in module 'head' (Head), 2 calls" in str(found)
        assert found.parameters.keys() == {"first.weight", "first.bias", "head.linear.weight", "head.linear.bias"}


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_nothing_is_listed_for_a_model_of_known_functions(options: dict[str, Any]) -> None:
    found = run(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D)), **options).explain()
    assert not found.tried and "none was tried" in str(found)


def test_terms_are_described_as_far_as_they_are_kept() -> None:
    model = Calls(lambda m, x: m.used(x), used=nn.Linear(D, D), unused=nn.Linear(D, D))
    assert set(run(model).explain().parameters.values()) == {"Outer", "Dense", "not used"}
    assert set(run(model, keep="norms").explain().parameters.values()) == {"norms only", "not used"}


def test_a_recomputation_does_not_count() -> None:
    model = Calls(lambda m, x: checkpoint(m.head, x, use_reentrant=False), head=Head())
    assert [tried.calls for tried in run(model).explain().tried] == [2, 1]


def test_check_lists_them() -> None:
    report = persample.check(make_model(), torch.randn(5, D), lambda m, x: m(x).square().sum(), loss_reduction="sum")
    assert report.ok and [tried.name for tried in report.tried] == ["double", "block_diag"]
    assert "block_diag, in module 'head' (Head), 1 call" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["tried"][1] == {
        "name": "block_diag",
        "place": "module 'head' (Head)",
        "calls": 1,
    }
    known = persample.check(nn.Linear(D, D), torch.randn(5, D), lambda m, x: m(x).square().mean())
    assert known.ok and known.tried == [] and "Tried" not in str(known)
