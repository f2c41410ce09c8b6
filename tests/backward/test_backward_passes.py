"""What the old system did wrong in silence, and what it kept, recomputed or refused for no reason."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import ExpandedWeight, PerSampleError, call_for_per_sample_grads, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, find_tensors
from tests.support.case import Case
from tests.support.cases import CASES, B, Calls, D, T, param


def rows_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}


def by_loop(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return Case("", lambda: module, list).loop_gradients(module, (x,), {}, len(x))


def clear(module: nn.Module) -> None:
    for p in module.parameters():
        del p.grad_sample


def test_a_wrapper_called_again_without_clearing_raises() -> None:
    module = nn.Linear(D, D)
    call = call_for_per_sample_grads(module)
    call(torch.randn(B, D)).sum().backward()
    with pytest.raises(RuntimeError, match="clear out the grad_sample parameter of weight"):
        call(torch.randn(B, D))
    clear(module)
    x = torch.randn(B + 1, D)
    compute_test_loss(call(x), 0).backward()
    assert_rows_close(rows_of(module), by_loop(module, x), 1e-5)


def test_two_calls_of_one_loss_add_up() -> None:
    module = nn.Linear(D, D).double()
    call = call_for_per_sample_grads(module)
    a, b = torch.randn(2, B, D).double()
    (compute_test_loss(call(a), 0) + compute_test_loss(call(b), 0)).backward()
    first, second = by_loop(module, a), by_loop(module, b)
    assert_rows_close(rows_of(module), {name: first[name] + second[name] for name in first})


def test_two_calls_with_different_batches_do_not_broadcast() -> None:
    call = call_for_per_sample_grads(nn.Linear(D, D))
    loss = call(torch.randn(B, D)).sum() + call(torch.randn(1, D)).sum()
    with pytest.raises(RuntimeError, match="cannot be added"):
        loss.backward()


def test_a_second_backward_raises_as_usual() -> None:
    loss = call_for_per_sample_grads(nn.Linear(D, D))(torch.randn(B, D)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_backward_over_a_retained_graph_adds_as_usual() -> None:
    module, x = nn.Linear(D, D).double(), torch.randn(B, D).double()
    loss = compute_test_loss(call_for_per_sample_grads(module)(x), 0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_rows_close(rows_of(module), {name: 2 * rows for name, rows in by_loop(module, x).items()})


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(D, D), (B, D)),
        (nn.Conv1d(D, D, 2), (B, D, T)),
        (nn.LayerNorm(D), (B, D)),
        (nn.GroupNorm(2, D), (B, D, T)),
        (nn.LSTM(D, D, batch_first=True), (B, T, D)),
        (Calls(lambda m, h: h * m.g, g=param(D)), (B, D)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_input_changed_in_place_raises(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    output = call_for_per_sample_grads(module)(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (output[0] if isinstance(output, tuple) else output).sum().backward()


def test_a_gradient_penalty_is_refused() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    x = torch.randn(B, D, requires_grad=True)
    output = call_for_per_sample_grads(module)(x)
    with pytest.raises(PerSampleError, match="create_graph"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


def test_a_gradient_of_the_input_alone_leaves_no_grad_sample() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1)).double()
    x = torch.randn(B, D, requires_grad=True, dtype=torch.float64)
    loss = compute_test_loss(call_for_per_sample_grads(module)(x), 0)
    torch.autograd.grad(loss, x, retain_graph=True)
    assert not rows_of(module)
    loss.backward()
    assert_rows_close(rows_of(module), by_loop(module, x.detach()))


def test_a_failed_backward_leaves_nothing_behind() -> None:
    module, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double(), torch.randn(B, D).double()
    failing = [True]

    def fail(grad: Tensor) -> None:
        if failing.pop():
            raise ValueError("for this test")
        failing.append(False)

    middle: list[Tensor] = []
    hook = module[1].register_forward_hook(lambda m, args, output: middle.append(output))
    loss = compute_test_loss(call_for_per_sample_grads(module)(x), 0)
    hook.remove()
    middle[0].register_hook(fail)
    with pytest.raises(ValueError, match="for this test"):
        loss.backward(retain_graph=True)
    assert not rows_of(module)
    failing.append(False)
    loss.backward()
    assert_rows_close(rows_of(module), by_loop(module, x))


FREED = ("mlp", "tied weights", "cnn", "language model, tied head", "lstm", "encoder layer", "checkpoint")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in FREED], ids=str)
def test_activations_are_freed_after_backward(case: Case) -> None:
    module, args, kwargs = case.build()
    made: list[weakref.ref[Tensor]] = []

    def remember(m: nn.Module, inputs: Any, output: Any) -> None:
        if (
            not isinstance(m, nn.Embedding) or output.shape[0] == B
        ):  # a position embedding is a weight, not an activation
            made.extend(map(weakref.ref, find_tensors(output)))

    hooks = [m.register_forward_hook(remember) for m in module.modules()]
    loss = compute_test_loss(call_for_per_sample_grads(module, **case.options)(*args, **kwargs), case.out_dim)
    loss.backward()
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert loss.grad_fn is not None  # the graph is still there: what it had saved must not be
    assert len(made) > 1
    assert all(ref() is None for ref in made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: nn.Linear(D, 5), (B, T, D)),
        (lambda: nn.Conv1d(D, 6, 3, padding=1, groups=2), (B, D, 8)),
        (lambda: nn.Conv2d(D, 6, 3, stride=2, dilation=2), (B, D, 8, 7)),
        (lambda: nn.Conv3d(2, 3, 2), (B, 2, 4, 3, 3)),
        (lambda: nn.LayerNorm(D), (B, T, D)),
        (lambda: nn.GroupNorm(2, D), (B, D, T)),
        (lambda: nn.InstanceNorm1d(D, affine=True), (B, D, T)),
        (lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 2)), (B, D)),
    ],
)
def test_lower_precision(module: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case("", module, lambda: [torch.randn(shape)], double=False)
    built, (x,), _ = case.build()
    built, x = built.to(dtype), x.to(dtype)
    compute_test_loss(call_for_per_sample_grads(built)(x), 0).backward()
    actual = {name: rows.double() for name, rows in rows_of(built).items()}
    assert all(rows.dtype == dtype for rows in rows_of(built).values())
    exact = module().double()
    exact.load_state_dict({key: value.double() for key, value in built.state_dict().items()})
    expected = by_loop(exact, x.double())
    assert_rows_close(actual, expected, {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype])


def test_embedding_in_lower_precision() -> None:
    module, ids = nn.Embedding(5, D).bfloat16(), torch.randint(0, 5, (B, T))
    call_for_per_sample_grads(module)(ids).sum().backward()
    counts = F.one_hot(ids, 5).sum(1).unsqueeze(-1).expand(B, 5, D)
    assert torch.equal(module.weight.grad_sample, counts.bfloat16())


def test_autocast() -> None:
    module = nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        plain = module(x)
        output = call_for_per_sample_grads(module)(x)
    assert torch.equal(output, plain)
    compute_test_loss(output.float(), 0).backward()
    assert_rows_close(rows_of(module), by_loop(module, x), 0.1)


def test_a_gradient_that_is_not_contiguous() -> None:
    module = nn.Conv2d(3, 4, 2)
    x, weights = torch.randn(B, 3, 5, 5), torch.randn(4, 4, 4, B)
    (call_for_per_sample_grads(module)(x) * weights.permute(3, 0, 1, 2)).sum().backward()
    for n in range(B):
        (expected,) = torch.autograd.grad((module(x[n : n + 1])[0] * weights[..., n]).sum(), module.weight)
        torch.testing.assert_close(module.weight.grad_sample[n], expected)


def test_gradient_expanded_from_a_sum() -> None:
    module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    x = torch.randn(B, 3, 5, 5).to(memory_format=torch.channels_last)
    call_for_per_sample_grads(module)(x).sum().backward()
    (expected,) = torch.autograd.grad(module(x[1:2]).sum(), module.weight)
    torch.testing.assert_close(module.weight.grad_sample[1], expected)


def test_the_pad_row_gets_nothing_from_a_bare_weight_either() -> None:
    w = torch.randn(4, D, requires_grad=True)
    ids = torch.tensor([[0, 1, 1], [2, 1, 0]])
    F.embedding(ids, ExpandedWeight(w, 2, "sum"), padding_idx=1).sum().backward()
    assert w.grad_sample[:, 1].abs().max() == 0
    assert w.grad_sample[0, 0].eq(1).all()


def test_same_model_again_with_another_batch_size() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double()
    for batch in (3, 5, 1, 3):
        x = torch.randn(batch, T, D).double()
        compute_test_loss(call_for_per_sample_grads(module)(x), 0).backward()
        assert_rows_close(rows_of(module), by_loop(module, x))
        clear(module)


def test_dropout_draws_from_the_same_stream() -> None:
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


def test_importing_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'sklearn', 'scipy', 'pyarrow', 'PIL', 'matplotlib'])); "
        "import persample, persample.cli, torch; "
        "m = torch.nn.Linear(2, 2); persample.call_for_per_sample_grads(m)(torch.ones(3, 2)).sum().backward(); "
        "assert m.weight.grad_sample.shape == (3, 2, 2)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_part_that_all_samples_lack() -> None:
    """A layer that is called with no rows has zeros for every sample, in the shape of its weights."""

    def forward(m: Any, h: Tensor, there: Tensor) -> Tensor:
        out = m.a(h)
        out[there] = m.b(h[there])
        return out

    module, h = Calls(forward, a=nn.Linear(D, D), b=nn.Linear(D, D)), torch.randn(B, D)
    with record(module) as grads:
        module(h, torch.zeros(B, dtype=torch.bool)).square().mean().backward()
    for rows in (grads.dense()["b.weight"], grads.dense()["b.bias"]):
        assert rows.shape[0] == B and not rows.any()
    for answer in (grads.clip(1.0), grads.second_moment(), grads.variance(), grads.mean()):
        for name, p in module.named_parameters():
            assert answer[name].shape == p.shape
            assert bool(answer[name].any()) == (name[0] == "a")
    with record(module, parameters=["b.weight", "b.bias"]) as none:
        module(h, torch.zeros(B, dtype=torch.bool)).square().mean().backward()
    assert not none.gram().any() and not none.norms().any() and not none.project(4).any()
