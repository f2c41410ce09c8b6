"""The loop oracle."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.testing import assert_rows_close, loop_gradients
from persample.testing.oracle import compute_test_loss, stack_gradients

pytestmark = pytest.mark.quick

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def differentiate(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of one sample in float64, by hand."""
    probabilities = F.softmax(F.linear(x.double(), model.weight.double(), model.bias.double()), -1)
    of_logits = (probabilities - F.one_hot(y, 2)).detach()
    return {"weight": torch.outer(of_logits, x.double()), "bias": of_logits}


def test_gradients_of_each_sample() -> None:
    model = nn.Linear(3, 2)
    rows = loop_gradients(model, (X, Y), nn.CrossEntropyLoss())
    by_hand = [differentiate(model, x, y) for x, y in zip(X, Y, strict=True)]
    assert_rows_close(rows, {name: torch.stack([sample[name] for sample in by_hand]) for name in rows})


def test_loss_of_model_and_batch_with_samples_in_dimension_1() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 4, 3)
    rows = loop_gradients(model, {"x": x}, lambda model, batch: model(batch["x"]).sin().sum(), batch_dim=1)
    expected = loop_gradients(model, x.transpose(0, 1), lambda model, x: model(x).sin().sum())
    assert_rows_close(rows, expected)


def test_model_is_unchanged() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.InstanceNorm1d(1, track_running_stats=True))
    model(torch.randn(4, 1, 3)).sum().backward()
    before = {name: (id(p), p.dtype, p.grad.clone()) for name, p in model[0].named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    loop_gradients(model, X[:, None], lambda model, x: model(x).square().sum())
    for name, p in model[0].named_parameters():
        assert before[name][:2] == (id(p), p.dtype) and torch.equal(p.grad, before[name][2])
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


def test_parameters_that_some_losses_do_not_use() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    parameters = {"used": used, "unused": unused, "frozen": frozen}
    inputs = torch.randn(2, requires_grad=True)
    rows = stack_gradients(((used * inputs).sum() if n else inputs.sum() for n in range(2)), parameters)
    assert list(rows) == ["used"] and torch.equal(rows["used"], torch.stack([torch.zeros(2), inputs.detach()]))
    assert inputs.grad is None and used.grad is None


def test_loss_is_a_sum_over_samples_with_a_different_gradient_for_each_entry() -> None:
    outputs = torch.randn(3, 5, 2, requires_grad=True, dtype=torch.float64)
    alone = sum(compute_test_loss([outputs[n : n + 1], torch.arange(3)]) for n in range(3))
    loss = compute_test_loss([outputs, torch.arange(3)])
    torch.testing.assert_close(loss, alone)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert len(gradient.flatten().unique()) == outputs.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: {"b": rows["a"]}, r"parameters \['b'\]"),
        (lambda rows: {"a": rows["a"][:1]}, r"a: shape \(1, 3\)"),
        (lambda rows: {"a": rows["a"].float()}, "a: torch.float32"),
        (
            lambda rows: {"a": rows["a"] * torch.tensor([[1.0], [1.01]])},
            "a: differs by 1.00e-02 of the scale of its row",
        ),
    ],
)
def test_rows_that_differ(change: object, message: str) -> None:
    rows = {"a": torch.rand(2, 3, dtype=torch.float64) + torch.tensor([[1000.0], [0.1]])}
    assert_rows_close(rows, rows)
    with pytest.raises(AssertionError, match=message):
        assert_rows_close(change(rows), rows)  # type: ignore[operator]


def test_importing_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'pytest', 'hypothesis', 'pyarrow', 'PIL'])); "
        "from persample.testing import check_rule, check_term, loop_gradients; import torch; "
        "check_rule(torch.nn.functional.linear, weight=torch.randn(4, 3), input=torch.randn(5, 3))"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
