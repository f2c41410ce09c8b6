"""A verified call compares the row of a sample with its gradient alone: mixing that outputs do not show is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import SamplesMixed, record, watch
from persample.testing import loop_gradients
from persample.testing.oracle import assert_rows_close

pytestmark = pytest.mark.quick

B, D = 5, 4
KEEP: list[dict[str, Any]] = [{}, {"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}]
AGREES = f"row {B - 1} is the gradient of the sample alone"


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any], gate: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.gate = nn.Parameter(torch.full((D,), gate))
        self.norm = nn.LayerNorm(D)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + torch.from_numpy(grad.numpy().mean(0))


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().mean(0))


def with_hook(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if h.requires_grad:
        h.register_hook(lambda g: g + torch.from_numpy(g.numpy().mean(0).copy()))
    return m.b(h)


HIDDEN: dict[str, Callable[..., Any]] = {
    "ReZero": lambda m, x: x + m.a(x) + m.gate * (m.b(x) - by_numpy(x)),
    "adaLN-zero": lambda m, x: m.a(x) + m.gate * m.norm(m.b(x).detach() - by_numpy(x)),
    "one number": lambda m, x: m.a(x) + m.gate * x.detach().numpy().mean().item() * 9,
    "backward of a function": lambda m, x: m.b(MixedBackward.apply(m.a(x))),
    "hook": with_hook,
}


def assert_equal_rows(grads: Any, model: nn.Module, x: Tensor, compute_loss: Callable[..., Tensor]) -> None:
    expected, dense = loop_gradients(model, x, compute_loss), grads.dense()
    assert not any(dense[name].any() for name in dense.keys() - expected.keys())
    assert_rows_close({name: dense[name] for name in expected}, expected, 1e-10)


def run(model: nn.Module, *args: Any, **options: Any) -> Any:
    with record(model, **options) as grads:
        output = model(*args)
        (output * torch.linspace(-1, 2, D)).square().mean(-1).mean().backward()
    return grads


@pytest.mark.parametrize("options", KEEP, ids=str)
@pytest.mark.parametrize("name", HIDDEN)
def test_mixing_behind_equal_outputs_is_refused_in_every_step(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Model(HIDDEN[name]), torch.randn(B, D)
    for _ in range(3):
        state = torch.get_rng_state()
        with pytest.raises(SamplesMixed):
            run(model, x, **options)
        assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["ReZero", "adaLN-zero", "one number"])
def test_the_message_names_the_parameter(name: str) -> None:
    with pytest.raises(SamplesMixed, match=rf"row of sample \d for 'gate', in its batch of {B}.*verify=False"):
        run(Model(HIDDEN[name]), torch.randn(B, D))


@pytest.mark.parametrize("name", HIDDEN)
def test_watch_refuses_it_too(name: str) -> None:
    model, x = Model(HIDDEN[name]), torch.randn(B, D)
    with pytest.raises(SamplesMixed), watch(model, lambda grads: None):
        model(x).square().mean().backward()


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("seed", range(6))
def test_mixing_is_not_hidden_by_rounding_of_another_parameter(seed: int, size: float) -> None:
    """The gradient of a layer before the norm of a single feature is rounding alone, of any size."""

    def function(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return h + m.gate * (h.detach() + 0.3 * by_numpy(h)) + size * F.layer_norm(m.b(x)[:, :1].cos(), (1,))

    torch.manual_seed(seed)
    with pytest.raises(SamplesMixed, match="for 'gate'"):
        run(Model(function), torch.randn(B, D))


CALLED: dict[str, Callable[[nn.Module, Tensor, Any], None]] = {
    "part": lambda m, x, record: record(nn.Sequential(m, nn.Tanh()), lambda whole: whole[0](x)),
    "parts": lambda m, x, record: record(nn.Sequential(m, nn.Linear(D, D)), lambda whole: whole[1](whole[0](x))),
    "one of several models": lambda m, x, record: record({"actor": m, "other": nn.Tanh()}, lambda _: m(x)),
    "input with gradient, in float64": lambda m, x, record: record(
        m.double(), lambda whole: whole(x.double().requires_grad_())
    ),
}


@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("name", HIDDEN)
def test_mixing_is_refused_however_the_model_is_called(name: str, called: str) -> None:
    torch.manual_seed(0)

    def run(model: Any, call: Callable[[Any], Tensor]) -> None:
        with record(model):
            (call(model) * torch.linspace(-1, 2, D)).square().mean(-1).mean().backward()

    with pytest.raises(SamplesMixed):
        CALLED[called](Model(HIDDEN[name]), torch.randn(B, D), run)


# ---- what must not be refused ----


def change_after(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    m.seen = h
    return m.b(h).mul(2).add_(1)


SEPARABLE: dict[str, Callable[..., Any]] = {
    "linear": lambda m, x: m.b(m.a(x).tanh()),
    "last op is a use": lambda m, x: m.a(x),
    "weights used twice": lambda m, x: m.a(m.a(x).tanh()) * m.gate,
    "derived weight": lambda m, x: F.linear(m.a(x).tanh(), m.b.weight.t() * m.gate),
    "gate": lambda m, x: x + m.a(x) + m.gate * m.norm(m.b(x)),
    "checkpoint": lambda m, x: checkpoint(lambda h: m.b(m.a(h).tanh()), x, use_reentrant=False),
    "attribute": change_after,
    "zero gradients": lambda m, x: m.a(x) + 0 * m.b(x),
    "softmax, whose bias has no gradient": lambda m, x: m.b(x).softmax(-1) + (m.a(x) + m.gate.sum()).log_softmax(-1),
    "clamped": lambda m, x: m.b(m.a(x).relu() * 1e-4) * 1e3,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", KEEP, ids=str)
@pytest.mark.parametrize("name", SEPARABLE)
def test_rows_that_agree(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Model(SEPARABLE[name], 0.7).to(dtype), torch.randn(B, D, dtype=dtype)
    grads = run(model, x, **options)
    assert (grads.verification, grads.row_verification) == ("verified with 2 samples", AGREES)
    assert "row" not in repr(grads).splitlines()[-2]
    assert run(model, x, **options).row_verification == ""  # once is enough


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", [torch.float32, "autocast", torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(6)]),
        lambda: nn.Sequential(nn.Conv1d(12, 32, 3), nn.GroupNorm(4, 32), nn.GELU(), nn.Conv1d(32, 16, 3)),
        lambda: nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU())]),
    ],
    ids=["transformer", "convolutions", "deep"],
)
def test_rounding_is_no_difference(make: Callable[[], nn.Module], precision: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = make(), torch.randn(16, 12, 16)
    if precision != "autocast":
        model, x = model.to(precision), x.to(precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"), record(model) as grads:
        model(x).float().square().mean().backward()
    assert grads.verification == "verified with 2 samples" and "row 15 is" in grads.row_verification


@pytest.mark.parametrize("seed", [37, 141, 147, 200, 275])  # with 1e-14 in place of zero
def test_rounding_that_a_layer_enlarges_is_no_difference(seed: int) -> None:
    """The norm of a single feature is zero but for rounding errors, divided by the root of eps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 1), nn.LayerNorm(1), nn.Linear(1, 3)).double()
    with record(model) as grads:
        model(torch.randn(5, 4).double()).square().sum().backward()
    assert grads.verification.startswith("verified")


def test_several_calls_and_outputs_that_depend_on_each_other() -> None:
    def both(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.a(x).tanh()
        return h, m.b(h)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        (h, y), (z, _) = model(x), model(2 * x)
        return (h * y + z.square()).sum()

    torch.manual_seed(0)
    model, x = Model(both).double(), torch.randn(B, D, dtype=torch.double)
    with record(model) as grads:
        compute_loss(model, x).backward()
    assert grads.row_verification == AGREES
    assert_equal_rows(grads, model, x, compute_loss)


def with_attribute(m: Any, x: Tensor) -> Tensor:
    m.extra = m.b(x)
    return m.a(x)


LEAKS: dict[str, tuple[Callable[..., Any], Callable[[Any, Tensor], Tensor]]] = {
    "tied weights in the loss": (lambda m, x: m.a(x), lambda m, x: F.linear(m(x), m.b.weight).square().sum()),
    "an attribute in the loss": (with_attribute, lambda m, x: (m(x) + m.extra).square().sum()),
    "a part called directly": (lambda m, x: m.a(x), lambda m, x: m(m.b(x)).square().sum() + 0 * m(x).sum()),
}


@pytest.mark.parametrize("name", LEAKS)
def test_gradients_that_reach_weights_in_other_ways_are_no_reason_to_refuse(name: str) -> None:
    function, compute_loss = LEAKS[name]
    torch.manual_seed(0)
    model, x = Model(function).double(), torch.randn(B, D, dtype=torch.double)
    with record(model) as grads:
        compute_loss(model, x).backward()
    model.extra = None  # which has a graph, and would not be copied
    assert_equal_rows(grads, model, x, compute_loss)
    assert grads.row_verification.startswith(("no row was compared: the loss or an argument uses weights", "row 4 is"))


def test_gradients_that_the_loop_changes_are_those_of_the_row() -> None:
    torch.manual_seed(0)
    model, x = Model(SEPARABLE["linear"]), torch.randn(B, D)
    with record(model) as grads:
        output = model(x)
        output.register_hook(lambda g: g * 2)
        output[:, 0].mul_(3)
        output.square().sum().backward()
    assert grads.row_verification == AGREES or grads.row_verification.startswith("no row was compared")


def test_gradients_of_inputs_do_not_count() -> None:
    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        return model(x.detach() + 0.1 * gradient.sign()).square().sum() + model(x).sum()

    torch.manual_seed(0)
    model, x = Model(SEPARABLE["linear"]).double(), torch.randn(B, D, dtype=torch.double)
    with record(model) as grads:
        compute_loss(model, x).backward()
    assert_equal_rows(grads, model, x, compute_loss)
    assert grads.row_verification == AGREES


def test_repr_says_why_no_row_was_compared() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))
    text = repr(run(model, torch.randn(B, D)))
    assert text.endswith("\n  no row was compared: the forward pass draws random numbers\n  verified with 2 samples)")


def test_rows_of_a_reentrant_checkpoint_are_not_compared() -> None:
    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    x = torch.randn(B, D, dtype=torch.double)
    for _ in range(2):  # the first checkpoint of a process initialises torch's random numbers
        model = Model(lambda m, x: m.b(checkpoint(m.a, x.clone().requires_grad_(), use_reentrant=True))).double()
        with record(model) as grads:
            compute_loss(model, x).backward()
        assert_equal_rows(grads, model, x, compute_loss)
    assert grads.row_verification == "no row was compared: the model has a reentrant checkpoint"


def test_sparse_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Linear(6, D)).double()
    assert run(model, torch.arange(B)).row_verification == AGREES


def test_a_pass_without_backward_is_verified_again() -> None:
    model, x = Model(HIDDEN["ReZero"]), torch.randn(B, D)
    with record(model):
        model(x)
    with record(model), torch.no_grad():
        model(x)
    with pytest.raises(SamplesMixed):
        run(model, x)


def test_nothing_is_kept_and_nothing_changes() -> None:
    torch.manual_seed(0)
    model, x = Model(SEPARABLE["checkpoint"]), torch.randn(B, D)
    found = []
    for verify in (False, None):
        own = copy.deepcopy(model)
        grads = run(own, x, verify=verify, keep_grad=True)
        found.append([grads.norms(), own.a.weight.grad, torch.tensor(own.a.weight._version)])
    assert grads.row_verification == AGREES
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
