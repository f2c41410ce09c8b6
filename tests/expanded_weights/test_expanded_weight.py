"""The names that the package exports, the ExpandedWeight tensor, and the helpers for rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
import persample.expanded_weights
from persample.expanded_weights import (
    HANDLED_FUNCTIONS,
    ExpandedWeight,
    forward_helper,
    is_batch_first,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from tests.support.expanded_weights import (
    BATCH,
    compute_loss,
    loop_over_samples,
    make_expanded,
    make_rows,
    make_weight,
)

every_reduction = pytest.mark.parametrize("reduction", ["sum", "mean"])


# ---- names ----


@pytest.mark.parametrize(
    "name",
    [
        "ExpandedWeight",
        "HANDLED_FUNCTIONS",
        "call_for_per_sample_grads",
        "forward_helper",
        "implements_per_sample_grads",
        "is_batch_first",
        "set_grad_sample_if_exists",
        "standard_kwargs",
        "sum_over_all_but_batch_and_last_n",
        "unpack_expanded_weight_or_tensor",
    ],
)
def test_name_is_exported(name: str) -> None:
    assert name in persample.expanded_weights.__all__
    assert hasattr(persample.expanded_weights, name)


@pytest.mark.parametrize("name", ["ExpandedWeight", "call_for_per_sample_grads", "implements_per_sample_grads"])
def test_name_is_exported_from_persample(name: str) -> None:
    assert name in persample.__all__
    assert getattr(persample, name) is getattr(persample.expanded_weights, name)


def test_registry_is_an_attribute_of_the_tensor() -> None:
    assert ExpandedWeight.handled_functions is HANDLED_FUNCTIONS


@pytest.mark.parametrize(
    "func",
    [
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.embedding,
        F.layer_norm,
        F.group_norm,
        F.instance_norm,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.lstm,
        torch.gru,
    ],
    ids=lambda func: func.__name__,
)
def test_function_has_a_rule(func: Callable[..., Any]) -> None:
    assert HANDLED_FUNCTIONS[func] is not None


# ---- the tensor ----


def test_tensor_shares_the_storage_of_its_original() -> None:
    w = make_weight(2, 3)
    e = ExpandedWeight(w, BATCH, "sum")
    assert isinstance(e, Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        assert Tensor.data_ptr(e) == w.data_ptr()


def test_change_of_the_original_is_visible() -> None:
    w, x = make_weight(2, 3), make_rows(BATCH, 3)
    e = ExpandedWeight(w, BATCH, "sum")
    with torch.no_grad():
        w.fill_(2.0)
    assert torch.equal(e.data, torch.full((2, 3), 2.0, dtype=torch.float64))
    assert torch.equal(F.linear(x, e), F.linear(x, w))


@every_reduction
def test_attributes(reduction: str) -> None:
    w = nn.Parameter(torch.ones(2, 3))
    e = ExpandedWeight(w, 7, reduction)
    assert e.orig_weight is w
    assert (e.batch_size, e.loss_reduction) == (7, reduction)
    assert e.batch_first is True
    assert e.allow_smaller_batches is False


def test_setters() -> None:
    e = make_expanded(2, 3)
    e.set_batch_first(False)
    e.set_allow_smaller_batches(True)
    assert (e.batch_first, e.allow_smaller_batches) == (False, True)
    e.set_batch_first()
    e.set_allow_smaller_batches(False)
    assert (e.batch_first, e.allow_smaller_batches) == (True, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.half, torch.complex128])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_properties_of_the_original(dtype: torch.dtype, device: str) -> None:
    w = torch.ones(2, 3, 4, dtype=dtype, device=device, requires_grad=True).transpose(0, 1)
    e = ExpandedWeight(w, BATCH, "sum")
    assert e.shape == torch.Size([3, 2, 4])
    assert (e.dtype, e.device, e.is_cuda) == (dtype, torch.device(device), False)
    assert (e.size(), e.size(1), e.dim()) == (torch.Size([3, 2, 4]), 2, 3)
    assert (e.data_ptr(), e.get_device()) == (w.data_ptr(), w.get_device())


def test_data_is_the_data_of_the_original() -> None:
    w = make_weight(2, 3)
    data = ExpandedWeight(w, BATCH, "sum").data
    assert type(data) is Tensor
    assert not data.requires_grad
    assert torch.equal(data, w)
    assert data.data_ptr() == w.data_ptr()


@pytest.mark.parametrize("text_of", [repr, str, "{}".format])
def test_repr_shows_the_values(text_of: Callable[[Tensor], str]) -> None:
    text = text_of(ExpandedWeight(torch.tensor([12.5, -0.25], requires_grad=True), BATCH, "sum"))
    assert "ExpandedWeight" in text
    assert "12.5" in text and "-0.25" in text


def test_flattening_for_cudnn_returns_none() -> None:
    assert torch._cudnn_rnn_flatten_weight([make_expanded(4, 3)], 4, 3, 2, 4, 0, 1, False, False) is None


def test_recurrent_function_with_samples_in_dimension_1() -> None:
    weights, x, state = [make_weight(9, 4), make_weight(9, 3)], make_rows(2, BATCH, 4), make_rows(1, BATCH, 3)

    def gru(x: Tensor, state: Tensor, *weights: Tensor) -> Tensor:
        return torch.gru(x, state, weights, False, 1, 0.0, True, False, False)[0]

    expanded_weights = [ExpandedWeight(w, BATCH, "sum") for w in weights]
    for e in expanded_weights:
        e.set_batch_first(False)
    compute_loss(gru(x, state, *expanded_weights), "sum", batch_dim=1).backward()
    torch.testing.assert_close(
        [w.grad_sample for w in weights], loop_over_samples(gru, [x, state], weights, batch_dim=1)
    )


# ---- the helpers ----


@pytest.mark.parametrize(
    ("names", "flat", "args", "kwargs"),
    [
        ((), (1, 2), (1, 2), {}),
        (("bias",), (1, 2, 3), (1, 2), {"bias": 3}),
        (["weight", "bias"], [1, None, 3], (1,), {"weight": None, "bias": 3}),
        (("input", "weight"), (1, 2), (), {"input": 1, "weight": 2}),
        ((), (), (), {}),
    ],
)
def test_standard_kwargs_splits_a_flattened_call(names: Any, flat: Any, args: Any, kwargs: dict[str, Any]) -> None:
    found_args, found_kwargs = standard_kwargs(names, flat)
    assert tuple(found_args) == args
    assert found_kwargs == kwargs


def test_forward_helper_runs_on_the_originals() -> None:
    w, b, x = make_expanded(4, 3), make_expanded(4), make_rows(BATCH, 3)
    plain = F.linear(x, w.orig_weight, b.orig_weight)
    for result in (forward_helper(F.linear, (x, w, b), {}), forward_helper(F.linear, [x, w], {"bias": b})):
        assert type(result) is Tensor
        assert torch.equal(result, plain)


def test_forward_helper_passes_the_originals_themselves() -> None:
    w, x = make_expanded(4, 3), make_rows(BATCH, 3)
    received: list[Any] = []
    forward_helper(lambda *args, **kwargs: received.extend([*args, *kwargs.values()]), (x, w, 2), {"again": w})
    assert [id(value) for value in received] == [id(value) for value in (x, w.orig_weight, 2, w.orig_weight)]


@pytest.mark.parametrize("flag", [True, False])
def test_is_batch_first_reads_the_expanded_weights(flag: bool) -> None:
    weights = [make_expanded(2), make_expanded(3)]
    for w in weights:
        w.set_batch_first(flag)
    assert is_batch_first(weights) is flag
    assert is_batch_first((make_rows(2), weights[0], None, 3)) is flag


@pytest.mark.parametrize("args", [[], (make_rows(2), 3, None), [make_weight(2)]])
def test_is_batch_first_without_expanded_weights(args: Any) -> None:
    assert is_batch_first(args) is None


@every_reduction
def test_set_grad_sample_scales_by_the_batch_size_and_accumulates(reduction: str) -> None:
    e = make_expanded(2, reduction=reduction)
    first, second = make_rows(BATCH, 2), make_rows(BATCH, 2)
    scale = BATCH if reduction == "mean" else 1
    set_grad_sample_if_exists(e, lambda original: first)
    torch.testing.assert_close(e.orig_weight.grad_sample, scale * first, rtol=0, atol=0)
    set_grad_sample_if_exists(ExpandedWeight(e.orig_weight, BATCH, reduction), lambda original: second)
    torch.testing.assert_close(e.orig_weight.grad_sample, scale * (first + second))


def test_set_grad_sample_calls_the_function_with_the_original() -> None:
    e = make_expanded(2)
    asked: list[Any] = []

    def gradient(original: Tensor) -> Tensor:
        asked.append(original)
        return torch.zeros(BATCH, 2)

    set_grad_sample_if_exists(e, gradient)
    assert len(asked) == 1 and asked[0] is e.orig_weight


@pytest.mark.parametrize("value", [None, 3, "text", torch.ones(2), (1, 2)])
def test_set_grad_sample_ignores_values_without_a_gradient(value: Any) -> None:
    set_grad_sample_if_exists(value, lambda original: pytest.fail("asked for a gradient"))
    assert not hasattr(value, "grad_sample")


@every_reduction
def test_set_grad_sample_pads_a_smaller_batch_with_zeros(reduction: str) -> None:
    e = make_expanded(2, reduction=reduction)
    e.set_allow_smaller_batches(True)
    contribution = make_rows(BATCH - 1, 2)
    set_grad_sample_if_exists(e, lambda original: contribution)
    scale = BATCH if reduction == "mean" else 1
    expected = torch.cat([scale * contribution, torch.zeros(1, 2, dtype=torch.float64)])
    torch.testing.assert_close(e.orig_weight.grad_sample, expected, rtol=0, atol=0)


def test_unpack_returns_the_original_or_a_tensor_without_grad() -> None:
    e, plain = make_expanded(2), make_rows(2)
    assert unpack_expanded_weight_or_tensor(e) is e.orig_weight
    assert unpack_expanded_weight_or_tensor(plain) is plain
    assert torch.equal(unpack_expanded_weight_or_tensor(e, torch.neg), -e.orig_weight)
    assert torch.equal(unpack_expanded_weight_or_tensor(plain, func=torch.neg), -plain)


@pytest.mark.parametrize("value", [None, 3, (1, 2)])
def test_unpack_returns_none_for_other_values(value: Any) -> None:
    assert unpack_expanded_weight_or_tensor(value) is None
    assert unpack_expanded_weight_or_tensor(value, lambda original: pytest.fail("called")) is None


@pytest.mark.parametrize(
    ("shape", "kept", "letters"),
    [
        ((3, 4), 1, "bi->bi"),
        ((3, 4, 5), 1, "bti->bi"),
        ((3, 2, 4, 5), 1, "bsti->bi"),
        ((3, 2, 4, 5), 2, "bsij->bij"),
        ((3, 4, 5), 2, "bij->bij"),
        ((3, 4, 5), 0, "bij->b"),
        ((3,), 0, "b->b"),
    ],
)
def test_sum_over_all_but_batch_and_last_n(shape: tuple[int, ...], kept: int, letters: str) -> None:
    tensor = make_rows(*shape)
    torch.testing.assert_close(sum_over_all_but_batch_and_last_n(tensor, kept), torch.einsum(letters, tensor))
