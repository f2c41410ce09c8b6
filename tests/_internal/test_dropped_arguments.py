"""Arguments that torch does not hand over to function modes reach the function all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, check, record, watch
from persample._internal.functions import DROPPED
from persample.testing import loop_gradients
from tests.support.cases import Calls, param

B, D = 4, 3

# Functions whose call is complete although an argument is not among those handed over.
COMPLETE = {
    ("_ops.py", "__call__"): "self is the function itself",
    ("_tensor.py", "wrapped"): "self and args are handed over as sargs; torch 2.10",
    ("_tensor.py", "__dlpack__"): "args and kwargs are made of the arguments",
    ("autograd/__init__.py", "backward"): "grad_variables are given as grad_tensors",
    ("autograd/__init__.py", "grad"): "inputs are given as a tuple",
    ("functional.py", "einsum"): "args are the equation and the operands",
    ("__init__.py", "sym_sum"): "args are symbolic integers, no tensors; torch 2.15",
}


def find_hand_overs() -> Iterator[tuple[str, str, list[str]]]:
    """File, function and missing arguments of each call of `handle_torch_function` in torch."""
    root = Path(torch.__file__).parent
    files = [*root.glob("*.py"), *(root / "nn").rglob("*.py"), *(root / "autograd").glob("*.py")]
    for file in [file for file in files if file.name != "overrides.py" and "handle_torch_function" in file.read_text()]:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                given = function.args
                own = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
                nested = {
                    inner
                    for f in ast.walk(function)
                    if isinstance(f, ast.FunctionDef) and f is not function
                    for inner in ast.walk(f)
                }
                for call in ast.walk(function):
                    if (
                        isinstance(call, ast.Call)
                        and call not in nested
                        and "handle_torch_function" in ast.unparse(call.func)
                    ):
                        passed = [*call.args[2:], *(keyword.value for keyword in call.keywords)]
                        names = {node.id for part in passed for node in ast.walk(part) if isinstance(node, ast.Name)}
                        yield str(file.relative_to(root)), function.name, [a.arg for a in own if a.arg not in names]


def test_all_functions_that_drop_an_argument_are_known() -> None:
    found = [(file, name, missing) for file, name, missing in find_hand_overs()]
    assert len(found) > 150
    dropped = {
        (name, argument) for file, name, missing in found for argument in missing if (file, name) not in COMPLETE
    }
    assert dropped == {(func.__name__, argument) for func, (argument, _) in DROPPED.items()}


WEIGHTED = {
    "sum": lambda out, y, w: F.l1_loss(out, y, reduction="sum", weight=w),
    "none": lambda out, y, w: F.l1_loss(out, y, reduction="none", weight=w).square().sum(),
    "by position": lambda out, y, w: F.l1_loss(out, y, None, None, "sum", w),
    "legacy reduction": lambda out, y, w: F.l1_loss(out, y, size_average=False, weight=w),
    "keywords": lambda out, y, w: F.l1_loss(weight=w, reduction="sum", target=y, input=out),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_l1_loss(name: str) -> None:
    loss, model = WEIGHTED[name], nn.Linear(D, 2)
    x, y, w = torch.randn(B, D), torch.randn(B, 2), torch.rand(B, 2)
    expected = loop_gradients(model, (x, y, w), lambda m, batch: loss(m(batch[0]), *batch[1:]))
    for _ in range(2):  # the second time from the cache, also of calls without a weight
        with record(model, loss_reduction="sum") as grads:
            value = loss(model(x), y, w)
            value.backward()
        torch.testing.assert_close(value, loss(model(x), y, w))
        torch.testing.assert_close(grads.dense(), {key: rows.float() for key, rows in expected.items()})
        with record(model, loss_reduction="sum") as grads:
            F.l1_loss(model(x), y, reduction="sum").backward()
    torch.testing.assert_close(value, loss(model(x), y, w))


def test_weighted_l1_loss_with_shared_weights() -> None:
    """A sum divided by a constant sum of weights: the mean of the rows is the gradient."""
    model, x, y, w = nn.Linear(D, 2), torch.randn(B, D), torch.randn(B, 2), torch.rand(1, 2).expand(B, 2)
    with record(model, constants=[w]) as grads:
        loss = F.l1_loss(model(x), y, weight=w)
        loss.backward()
    model.zero_grad()
    plain = F.l1_loss(model(x), y, weight=w)
    plain.backward()
    torch.testing.assert_close(loss, plain)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads.mean()[name], p.grad)


def test_weighted_l1_loss_inside_a_model_and_between_weights() -> None:
    def forward(m: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        of_weights = F.l1_loss(m.v, m.t, weight=m.w, reduction="sum")
        return F.l1_loss(m.a(x), y, reduction="none", weight=w) * of_weights

    model = Calls(forward, a=nn.Linear(D, 2), v=param(5), t=torch.randn(5), w=torch.rand(5))
    batch = (torch.randn(B, D), torch.randn(B, 2), torch.rand(B, 2))
    expected = loop_gradients(model, batch, lambda m, batch: m(*batch).sum())
    with record(model, loss_reduction="sum") as grads:
        model(*batch).sum().backward()
    torch.testing.assert_close(grads.dense(), {key: rows.float() for key, rows in expected.items()})


def test_weighted_l1_loss_while_a_watched_model_rests() -> None:
    model, x = nn.Linear(D, 2), torch.randn(B, D)
    out, y, w = torch.randn(B, 2), torch.randn(B, 2), torch.rand(B, 2)
    expected = F.l1_loss(out, y, weight=w)
    with watch(model, lambda grads: None, {"keep": "norms"}):
        model(x).sum().backward()
        torch.testing.assert_close(F.l1_loss(out, y, weight=w), expected)


def test_check_with_a_weighted_l1_loss() -> None:
    model = nn.Sequential(nn.Linear(D, 2), nn.Dropout(0.5))
    batch = (torch.randn(B, D), torch.randn(B, 2), torch.rand(B, 2))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y, w = batch
        return F.l1_loss(model(x), y, reduction="none", weight=w).sum(1).mean()

    assert check(model, batch, loss_fn).ok


def test_an_output_argument_that_is_dropped_is_refused() -> None:
    model = Calls(
        lambda m, x: torch.chain_matmul(x, m.v, m.w, out=m.out), v=param(D, 2), w=param(2, 2), out=torch.empty(B, 2)
    )
    with record(model), torch.no_grad(), pytest.raises(PerSampleError, match=r"chain_matmul\(out=\.\.\.\)"):
        model(torch.randn(B, D))


def test_an_option_without_effect_on_values() -> None:
    x = torch.empty(2, 1, 3)
    with pytest.raises(RuntimeError), record(nn.Linear(3, 2)):
        x.dim_order(ambiguity_check=True)
