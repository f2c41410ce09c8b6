"""call_for_per_sample_grads against the oracle, over the list of awkward modules."""

from __future__ import annotations

import copy

import pytest
import torch

from persample import call_for_per_sample_grads
from persample.testing.oracle import assert_rows_close, compute_test_loss, find_tensors
from tests.support.case import Case
from tests.support.cases import CASES
from tests.support.modules import read_state


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_loop(case: Case) -> None:
    module, args, kwargs = case.build()
    batch = case.find_batch_size(args)
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, batch)
    plain = copy.deepcopy(module)
    torch.manual_seed(1)
    plain_outputs = list(find_tensors(plain(*args, **kwargs)))

    before = read_state(module)
    torch.manual_seed(1)
    outputs = call_for_per_sample_grads(module, **case.options)(*args, **kwargs)
    compute_test_loss(outputs, case.out_dim).backward()

    for ours, theirs in zip(find_tensors(outputs), plain_outputs, strict=True):
        assert torch.equal(ours, theirs), f"the output is off by {(ours - theirs).abs().max()}"
    actual = {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}
    assert_rows_close(actual, expected)
    after = read_state(module)
    assert before.keys() == after.keys()
    for key in ("grads", "hooks", "training", "keys"):
        assert before[key] == after[key], key
    for name, (identity, value) in before["parameters"].items():
        assert after["parameters"][name][0] == identity
        assert "max_norm" in case.name or torch.equal(after["parameters"][name][1], value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_itself(case: Case) -> None:
    """Rows differ between samples, and add up to the ordinary gradient: a case that hides a bug is none."""
    module, args, kwargs = case.build()
    batch = case.find_batch_size(args)
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, batch)
    compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    for name, p in module.named_parameters():
        if name in expected:
            if "scale" not in case.name or "embedding" not in case.name:
                torch.testing.assert_close(expected[name].sum(0), p.grad, rtol=1e-8, atol=1e-8)
            assert expected[name].abs().max() > 0
            assert batch == 1 or not torch.allclose(expected[name][0], expected[name][1]), name


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_mean_undoes_the_mean(case: Case) -> None:
    module, args, kwargs = case.build()
    batch = case.find_batch_size(args)
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, batch)
    outputs = call_for_per_sample_grads(module, loss_reduction="mean", **case.options)(*args, **kwargs)
    (compute_test_loss(outputs, case.out_dim) / batch).backward()
    actual = {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}
    assert_rows_close(actual, expected)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_gradient_of_the_input_is_the_plain_one(case: Case) -> None:
    module, args, kwargs = case.build()
    if not isinstance(args[0], torch.Tensor) or not args[0].dtype.is_floating_point or "out=" in case.name:
        pytest.skip("no gradient of the first argument to compare")
    inputs = args[0].detach().clone().requires_grad_()
    compute_test_loss(copy.deepcopy(module)(inputs, *args[1:], **kwargs), case.out_dim).backward()
    expected, inputs.grad = inputs.grad, None
    compute_test_loss(
        call_for_per_sample_grads(module, **case.options)(inputs, *args[1:], **kwargs), case.out_dim
    ).backward()
    torch.testing.assert_close(inputs.grad, expected)
