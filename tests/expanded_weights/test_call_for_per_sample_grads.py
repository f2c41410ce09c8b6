"""call_for_per_sample_grads equals the loop for all test cases; repeated calls."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from persample import ExpandedWeight, call_for_per_sample_grads
from persample.testing.oracle import assert_rows_close, compute_test_loss, find_tensors
from tests.support.case import Case, loop_gradients
from tests.support.cases import CASES, B, D, T
from tests.support.modules import clear_grad_samples, get_grad_samples, read_state


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_loop(case: Case) -> None:
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
        assert torch.equal(ours, theirs), f"the output differs by {(ours - theirs).abs().max()}"
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
def test_the_cases_cannot_hide_a_bug(case: Case) -> None:
    """The rows of the loop differ between samples, and add up to the ordinary gradient."""
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
def test_loss_reduction_mean(case: Case) -> None:
    module, args, kwargs = case.build()
    batch = case.find_batch_size(args)
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, batch)
    outputs = call_for_per_sample_grads(module, loss_reduction="mean", **case.options)(*args, **kwargs)
    (compute_test_loss(outputs, case.out_dim) / batch).backward()
    actual = {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}
    assert_rows_close(actual, expected)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_gradient_of_the_input(case: Case) -> None:
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


def test_second_call_without_clearing_raises() -> None:
    module = nn.Linear(D, D)
    call = call_for_per_sample_grads(module)
    call(torch.randn(B, D)).sum().backward()
    with pytest.raises(RuntimeError, match="clear out the grad_sample parameter of weight"):
        call(torch.randn(B, D))
    clear_grad_samples(module)
    x = torch.randn(B + 1, D)
    compute_test_loss(call(x), 0).backward()
    assert_rows_close(get_grad_samples(module), loop_gradients(module, x), 1e-5)


def test_two_calls_in_one_loss_accumulate() -> None:
    module = nn.Linear(D, D).double()
    call = call_for_per_sample_grads(module)
    a, b = torch.randn(2, B, D).double()
    (compute_test_loss(call(a), 0) + compute_test_loss(call(b), 0)).backward()
    first, second = loop_gradients(module, a), loop_gradients(module, b)
    assert_rows_close(get_grad_samples(module), {name: first[name] + second[name] for name in first})


def test_two_calls_with_different_batch_sizes_raise() -> None:
    call = call_for_per_sample_grads(nn.Linear(D, D))
    loss = call(torch.randn(B, D)).sum() + call(torch.randn(1, D)).sum()
    with pytest.raises(RuntimeError, match="cannot be added"):
        loss.backward()


def test_padding_row_of_a_bare_weight_has_zero_gradient() -> None:
    w = torch.randn(4, D, requires_grad=True)
    ids = torch.tensor([[0, 1, 1], [2, 1, 0]])
    F.embedding(ids, ExpandedWeight(w, 2, "sum"), padding_idx=1).sum().backward()
    assert w.grad_sample[:, 1].abs().max() == 0
    assert w.grad_sample[0, 0].eq(1).all()


def test_same_model_with_other_batch_sizes() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double()
    for batch in (3, 5, 1, 3):
        x = torch.randn(batch, T, D).double()
        compute_test_loss(call_for_per_sample_grads(module)(x), 0).backward()
        assert_rows_close(get_grad_samples(module), loop_gradients(module, x))
        clear_grad_samples(module)


def test_dropout_draws_the_same_random_numbers() -> None:
    module = nn.Sequential(nn.Linear(D, 50), nn.Dropout(0.5), nn.Linear(50, D))
    x = torch.randn(B, D)
    torch.manual_seed(3)
    plain = module(x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    output = call_for_per_sample_grads(module)(x)
    assert torch.equal(output, plain)
    assert torch.equal(torch.get_rng_state(), state)
    output.sum().backward()
    plain.sum().backward()
    for p in module.parameters():
        torch.testing.assert_close(p.grad_sample.sum(0), p.grad)
