"""Recordings with keep="norms" and keep="clip" equal full recordings."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record
from persample.testing.oracle import compute_test_loss
from tests.support.case import Case
from tests.support.cases import STREAMED_CASES, B, Calls, D


def record_case(case: Case, **keep: Any) -> Any:
    module, args, kwargs = case.build()
    with record(module, **case.record_options, **keep) as grads:
        compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    return grads


@pytest.mark.parametrize("case", STREAMED_CASES, ids=str)
def test_norms_equal_a_full_recording(case: Case) -> None:
    everything, norms = record_case(case), record_case(case, keep="norms")
    torch.testing.assert_close(norms.norms(), everything.norms())
    for name, part in norms.norms(per_parameter=True).items():
        torch.testing.assert_close(part, everything.norms(per_parameter=True)[name])
    torch.testing.assert_close(norms.clip_factors(1.0), everything.clip_factors(1.0))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("case", STREAMED_CASES, ids=str)
def test_clip_equals_a_full_recording(case: Case, passes: int) -> None:
    everything = record_case(case)
    limit = float(everything.norms().median()) / 2
    clipped = record_case(case, keep="clip", max_norm=limit, passes=passes)
    torch.testing.assert_close(clipped.norms(), everything.norms())
    expected = everything.clip(limit)
    for name, part in clipped.clip(limit).items():
        torch.testing.assert_close(part, expected[name].to(part), rtol=1e-5, atol=1e-7)
    assert f"in {passes} backward pass" in repr(clipped)


def make_small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(B, D), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("memory", [0, 2**30])
def test_number_of_passes_depends_on_memory(memory: int) -> None:
    module, x, y = make_small()
    with record(module, keep="clip", max_norm=0.1, memory=memory) as grads:
        F.cross_entropy(module(x), y).backward()
    assert grads.passes == (1 if memory else 2)
    assert f"{memory} allowed" in repr(grads)


def test_two_passes_give_the_gradients_of_one() -> None:
    module, x, y = make_small()
    x.requires_grad_()
    with record(module, keep="clip", max_norm=0.1, passes=2, keep_grad=True):
        F.cross_entropy(module(x), y).backward()
    found, kept, x.grad = x.grad, module[0].weight.grad.clone(), None
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    torch.testing.assert_close(found, x.grad)
    torch.testing.assert_close(kept, module[0].weight.grad)


def test_terms_are_freed_during_backward() -> None:
    module, x, y = make_small()
    x.requires_grad_()
    activations: list[weakref.ref[Tensor]] = []
    alive_at_the_end: list[bool] = []

    def check_activation(grad: Tensor) -> None:
        gc.collect()
        alive_at_the_end.append(activations[0]() is not None)

    module[1].register_forward_hook(lambda m, args, output: activations.append(weakref.ref(output)))
    with record(module, keep="norms") as grads:
        loss = F.cross_entropy(module(x), y)
        x.register_hook(check_activation)
        loss.backward()
    assert alive_at_the_end == [False]
    assert grads.norms().shape == (B,)


def test_answers_that_were_not_kept_raise() -> None:
    module, x, y = make_small()
    with record(module, keep="norms") as grads:
        F.cross_entropy(module(x), y).backward()
    for ask in (lambda: grads.dense(), lambda: grads.sum(), lambda: grads.gram(), lambda: grads.clip(1.0)):
        with pytest.raises(PerSampleError, match="kept norms only"):
            ask()
    with record(module, keep="clip", max_norm=0.5) as grads:
        F.cross_entropy(module(x), y).backward()
    with pytest.raises(PerSampleError, match=r"clipped at 0\.5"):
        grads.clip(0.25)


@pytest.mark.parametrize(
    "keep", [{"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}, {"keep": "clip", "max_norm": 1.0, "passes": 2}]
)
def test_second_backward_is_refused(keep: dict[str, Any]) -> None:
    module, x, y = make_small()
    with pytest.raises(PerSampleError, match="second backward pass"), record(module, **keep):
        F.cross_entropy(module(x), y).backward()
        F.cross_entropy(module(x), y).backward()


@pytest.mark.parametrize("passes", [None, 1, 2])
def test_second_backward_to_other_parameters_is_refused(passes: int | None) -> None:
    module = Calls(lambda m, h: (m.a(h), m.b(h)), a=nn.Linear(D, 3), b=nn.Linear(D, 3))
    with (
        pytest.raises(PerSampleError, match="second backward pass"),
        record(module, keep="clip", max_norm=0.3, passes=passes),
    ):
        first, second = module(torch.randn(B, D))
        first.sum().backward()
        second.sum().backward()


def test_clipped_sum_may_be_changed() -> None:
    module, x, y = make_small()
    with record(module, keep="clip", max_norm=0.5) as grads:
        F.cross_entropy(module(x), y).backward()
    before = grads.clip()["0.weight"].clone()
    grads.clip()["0.weight"].add_(1)
    assert torch.equal(grads.clip()["0.weight"], before)


@pytest.mark.parametrize("passes", [1, 2])
def test_empty_batch(passes: int) -> None:
    module = nn.Linear(D, 3)
    with record(module, keep="clip", max_norm=0.5, passes=passes) as grads:
        module(torch.randn(0, D)).sum().backward()
    assert torch.equal(grads.clip()["weight"], torch.zeros(3, D))


def test_backward_after_the_block() -> None:
    module, x, y = make_small()
    with record(module, keep="clip", max_norm=0.5) as grads:
        loss = F.cross_entropy(module(x), y)
    loss.backward()
    assert grads.passes == 1
    with record(module, keep="clip", max_norm=0.5, passes=2) as grads:
        loss = F.cross_entropy(module(x), y)
    loss.backward()
    with pytest.raises(PerSampleError, match="inside the block"):
        grads.clip()


def test_reentrant_checkpoint_is_refused() -> None:
    module = Calls(lambda m, h: checkpoint(m.a, h, use_reentrant=True) * 2, a=nn.Linear(D, D))
    with pytest.raises(PerSampleError, match="use_reentrant=False"), record(module, keep="norms"):
        module(torch.randn(B, D, requires_grad=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "clip"}, "max_norm"),
        ({"max_norm": 1.0}, "max_norm"),
        ({"keep": "gold"}, "'gold'"),
        ({"keep": "clip", "max_norm": -1.0}, "positive"),
        ({"keep": "clip", "max_norm": 1.0, "passes": 3}, "passes"),
        ({"passes": 2}, "passes"),
        ({"loss_reduction": "max"}, "'max'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PerSampleError, match=message), record(nn.Linear(2, 2), **options):
        pass
    with pytest.raises(PerSampleError, match="int"), record(3):  # type: ignore[arg-type]
        pass


def test_clipped_sum_can_be_read_again_unless_it_was_changed() -> None:
    module, x, y = make_small()
    with record(module, keep="clip", max_norm=0.1) as grads:
        F.cross_entropy(module(x), y).backward()
    first, second = grads.clip(), grads.clip()
    for name, part in first.items():
        assert torch.equal(part, second[name])
        assert part.data_ptr() != second[name].data_ptr()
    first["0.weight"].add_(1)
    with pytest.raises(PerSampleError, match="changed in place"):
        grads.clip()


@pytest.mark.parametrize(("free", "passes"), [(0, 2), (2**40, 1), (None, 1)])
def test_number_of_passes_depends_on_free_memory(
    free: int | None, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persample.gradients.clip_intake._SMALL", 0)
    monkeypatch.setattr("persample.gradients.clip_intake.find_free_memory", lambda devices: free)
    module, x, y = make_small()
    with record(module, keep="clip", max_norm=0.1) as grads:
        F.cross_entropy(module(x), y).backward()
    assert grads.passes == passes
    assert f"{2**30 if free is None else free // 2} allowed" in repr(grads)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, 1e-22, float("nan")])
def test_a_bound_whose_square_vanishes_is_refused(max_norm: float) -> None:
    """Squared norms of 1e-44 are too small for float32: rows would be three times as long as the bound."""
    model, x = nn.Linear(200, 200), torch.randn(4, 8, 200)
    with record(model) as grads:
        (model(x) * 1e-23).sum().backward()
    answers: list[Callable[[], Any]] = [
        lambda: grads.clip(max_norm),
        lambda: grads.clip(max_norm, per_parameter=True),
        lambda: grads.clip_factors(max_norm),
        lambda: record(model, keep="clip", max_norm=max_norm).__enter__(),
        lambda: record(model, keep="clip", max_norm={"weight": max_norm, "bias": 1.0}).__enter__(),
    ]
    for answer in answers:
        with pytest.raises(PerSampleError, match="max_norm must be positive and at least"):
            answer()
