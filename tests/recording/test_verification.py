"""verify=: samples run alone, and what differs from the batch is refused; nothing else notices the extra passes."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError, SamplesMixed, check, record, watch
from persample._torch import get_function_modes
from persample.batches import Arguments
from persample.distributed import Processes
from persample.forward import get_program
from persample.layouts import Layout
from persample.recording.options import Options
from persample.recording.verification import NotVerified, Verification, start_verification
from persample.testing.oracle import assert_rows_close, stack_gradients

B, T, D = 5, 3, 4


class Around(nn.Module):
    """`function(self, linear(x), x)`, with a buffer, a few layers and an attribute that counts the calls."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.function = function
        self.register_buffer("mean", torch.zeros(D))
        self.calls = 0
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(self, self.linear(args[0]), *args, **kwargs)


def verify_plain(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Verify a plain run, without a tracker that could refuse before: all samples lie in dimension 0."""
    size = len(args[0])
    tracker: Any = SimpleNamespace(
        path=SimpleNamespace(has_read_samples=False, make_note=lambda environment: lambda status: None),
        batch=size,
        advice="",
        is_isolated=False,
        find_layout=lambda tensor: Layout(0) if tensor.dim() and len(tensor) == size else None,
    )
    try:
        arguments = Arguments(model.forward, args, kwargs, 0)
        verification = Verification(model, Options(verify="first"), tracker, arguments, ())
    except NotVerified as reason:
        return str(reason)
    return verification.finish(model(*args, **kwargs), has_row=True)


def record_output(model: nn.Module, *args: Any, **options: Any) -> Any:
    """Record the sum of the squares of all outputs that have a gradient."""
    with record(model, loss_reduction="sum", **options) as grads:
        output = model(*args)
        tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
        torch.stack([t.square().sum() for t in tensors if t.requires_grad]).sum().backward()
    return grads


# ---- what must be found ----


class MixInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def mean_in_a_thread(x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x.detach().mean(0)))
    thread.start()
    thread.join()
    return found[0]


def attend(model: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def write_data(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.mean.data.copy_(h.detach().mean(0))
    return h - model.mean


def write_detached(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.mean.detach().add_(x.sum(0))
    return h * model.mean


def initialise_from_the_batch(model: Any, h: Tensor, x: Tensor) -> Tensor:
    if not model.is_initialised:
        model.shift.data.copy_(-h.detach().mean(0))
        model.is_initialised = True
    return h + model.shift


def make_scripted() -> Callable[..., Any]:
    def normalise(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()

    with pytest.warns((DeprecationWarning, FutureWarning)):  # the latter from torch 2.15 on
        scripted = torch.jit.script(normalise)
    return lambda model, h, x: scripted(h)


MIXING: dict[str, Callable[..., Any]] = {
    "attention": attend,
    "thread": lambda m, h, x: h * mean_in_a_thread(x),
    "copy.copy": lambda m, h, x: h * copy.copy(x).mean(0),
    "custom function": lambda m, h, x: MixInForward.apply(h),
    "item": lambda m, h, x: h * x.mean().item(),
    "tolist": lambda m, h, x: h + torch.tensor(x.sum(0).tolist()),
    "numpy": lambda m, h, x: h + torch.from_numpy(x.numpy().max(0)),
    "dlpack": lambda m, h, x: h * torch.from_dlpack(x).mean(0),
    "vmap": lambda m, h, x: h * torch.vmap(lambda column: column - column.mean(), 1, 1)(x),
    "data of a buffer": write_data,
    "a buffer through detach": write_detached,
    "softmax": lambda m, h, x: h.softmax(0),
    "not a number alone": lambda m, h, x: (
        h / (len(x) / (len(x) - 1) * x.var(0, correction=0) if len(x) > 1 else torch.nan)
    ),
    "next sample": lambda m, h, x: h + x.roll(1, 0),
    "a little": lambda m, h, x: h - 0.01 * x.mean(0),
    "batch norm": lambda m, h, x: F.batch_norm(h, None, None, training=True),
    "dropout": lambda m, h, x: F.dropout(h, 0.5) - x.mean(0),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused(name: str) -> None:
    with pytest.raises(SamplesMixed, match=r"changes with the other samples.*first appears in the code of Around") as e:
        verify_plain(Around(MIXING[name]), torch.randn(B, D))
    assert f"shape ({B}, {D})" in str(e.value) and "verify=False" in str(e.value)


def test_mixing_in_a_scripted_function_is_refused() -> None:
    with pytest.raises(SamplesMixed, match="changes with the other samples"):
        verify_plain(Around(make_scripted()), torch.randn(B, D))


def test_parameters_that_the_first_batch_initialises_are_refused_and_kept() -> None:
    model = Around(initialise_from_the_batch, shift=nn.Parameter(torch.zeros(D)), is_initialised=False)
    plain, x = copy.deepcopy(model), torch.randn(B, D)
    plain(x)
    with pytest.raises(SamplesMixed, match="changes with the other samples"):
        verify_plain(model, x)
    assert torch.equal(model.shift, plain.shift) and model.is_initialised and model.calls == 1


@pytest.mark.parametrize("name", ["attention", "custom function", "item", "softmax", "next sample"])
@pytest.mark.parametrize("precision", ["autocast", torch.bfloat16, torch.float16])
def test_mixing_in_half_precision_is_refused(name: str, precision: Any) -> None:
    torch.manual_seed(0)
    model, x = Around(MIXING[name]), torch.randn(32, D)
    if precision != "autocast":
        model, x = model.to(precision), x.to(precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"), pytest.raises(SamplesMixed):
        verify_plain(model, x)


def test_multihead_attention_across_the_batch_under_autocast_is_refused() -> None:
    model = Around(lambda m, h, x: m.attention(h, h, h, need_weights=False)[0], attention=nn.MultiheadAttention(D, 2))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(SamplesMixed, match=r"'attention' \(MultiheadAttention\)"),
    ):
        verify_plain(model, torch.randn(32, T, D))


class Mix(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.detach().mean().item()


def test_the_first_module_is_named() -> None:
    body = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Tanh(), Mix()), nn.Linear(D, D), Mix())
    with pytest.raises(SamplesMixed, match=r"first appears in module 'body.1.1' \(Mix\)"):
        verify_plain(Around(lambda m, h, x: m.body(h), body=body), torch.randn(B, D))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h, x: h * (-1.0) ** torch.arange(len(h))[:, None],
        lambda m, h, x: h + torch.linspace(0, 1, D * 4).view(4, D)[: len(h)],
        lambda m, h, x: h / len(h),
    ],
    ids=["sign", "position", "size"],
)
def test_dependence_on_the_place_in_the_batch_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(SamplesMixed, match="depends on its place in the batch, or on the size of the batch"):
        verify_plain(Around(function), torch.randn(4, D))


@pytest.mark.parametrize("name", ["item", "copy.copy", "numpy", "dropout"])
@pytest.mark.parametrize("options", [{}, {"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}], ids=str)
def test_record_refuses_and_leaves_no_trace(name: str, options: dict[str, Any]) -> None:
    function = MIXING["item"] if name == "dropout" else MIXING[name]
    model, x = Around(lambda m, h, x: m.drop(function(m, h, x)), drop=nn.Dropout(0.5)), torch.randn(B, D)
    state = torch.get_rng_state()
    with pytest.raises(SamplesMixed):
        record_output(model, x, **options)
    assert torch.equal(state, torch.get_rng_state()) and not get_function_modes()
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())


def test_watch_refuses_and_goes_on() -> None:
    model, found = Around(lambda m, h, x: h - (x.mean().item() if m.is_mixing else 0), is_mixing=True), []
    x = torch.randn(B, D)
    with watch(model, lambda grads: found.append(grads.norms()), {"verify": "always"}):
        with pytest.raises(SamplesMixed):
            model(x)
        assert not get_function_modes()
        model.is_mixing = False
        model(x).square().sum().backward()
    assert len(found) == 1


# ---- what must not be refused ----


class Deep(nn.Module):
    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Experts(nn.Module):
    """Rounding may send a token to another expert: in half precision, the best two are often equal."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).argmax(-1)
        return sum(torch.where((best == n)[..., None], expert(x), 0.0) for n, expert in enumerate(self.experts))


@pytest.mark.parametrize(
    "precision", [torch.float32, torch.float64, "autocast", torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "make", [Deep, lambda: nn.LSTM(16, 8, 2, batch_first=True), Experts], ids=["deep", "LSTM", "MoE"]
)
def test_rounding_is_no_difference(make: Callable[[], nn.Module], precision: Any) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, 12, 16)
    if precision != "autocast":
        model, x = model.to(precision), x.to(precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        assert verify_plain(model, x) == "verified with 2 samples"


def test_masked_logits_do_not_hide_a_difference() -> None:
    mask = torch.tensor([0.0, 0.0, 0.0, -1e9])
    assert verify_plain(Around(lambda m, h, x: h + mask), torch.randn(B, D)).startswith("verified")
    with pytest.raises(SamplesMixed):
        verify_plain(Around(lambda m, h, x: h - x.mean().item() + mask), torch.randn(B, D))


def test_infinite_entries_are_compared_as_such() -> None:
    mask = torch.tensor([0.0, 0.0, -torch.inf, torch.nan])
    assert verify_plain(Around(lambda m, h, x: h + mask), torch.randn(B, D)).startswith("verified")


# ---- nothing is noticed ----


class Stateful(nn.Module):
    """Changes everything that a forward pass can change, and uses it after the change."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(D, D), nn.Embedding(7, D, max_norm=0.5)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(D))
        self.norm = nn.InstanceNorm1d(D, track_running_stats=True)
        self.seen, self.cache, self.state = [1], {"a": [torch.zeros(1)]}, None
        self.helper = SimpleNamespace(count=0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        self.seen.append(len(x))
        self.cache["a"].append(x)
        self.cache["b"] = x.shape
        self.seen = [*self.seen]
        self.state = x.detach()
        self.extra = self.linear(x)
        shift = torch.rand(1, generator=self.generator) + random.random() + np.random.rand()
        h = self.extra * self.scale.clone() + self.embedding(ids) * self.scale + shift.item()
        return self.drop(self.norm(h[..., None].repeat(1, 1, 2)).sum(-1) + h)


def describe(model: Stateful) -> list[Any]:
    states = [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(np.random.get_state()[1].astype(int)),
    ]
    tensors = [*model.state_dict().values(), model.state, model.extra.detach(), *states, model.generator.get_state()]
    lists = [model.seen, [t.shape for t in model.cache["a"]], model.cache["b"], list(model.cache), list(vars(model))]
    modules = [
        [len(hooks) for name, hooks in vars(m).items() if "hook" in name and isinstance(hooks, dict)]
        for m in model.modules()
    ]
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    return [*[t.tolist() for t in tensors], *lists, modules, versions, [m.training for m in model.modules()]]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nothing_is_noticed(dropout: float) -> None:
    torch.manual_seed(0)
    model, x, ids = Stateful(dropout), torch.randn(B, D), torch.tensor([0, 1, 2, 3, 6])
    states = []
    for verify in (False, "first"):
        run = copy.deepcopy(model)
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        with record(run, loss_reduction="sum", verify=verify) as grads:
            loss = run(x.clone(), ids).square().sum()
            state = describe(run)
            loss.backward()
        states.append([*state, grads.norms().tolist()])
        assert get_function_modes() == [] and all(p.grad is None for p in run.parameters())
    assert grads.verification == "verified with 2 samples"
    assert states[0] == states[1]


def test_arguments_that_the_model_changes() -> None:
    def change(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h + x.mul_(2)

    x = torch.randn(B, D)
    expected = x * 2
    assert verify_plain(Around(change), x) == "verified with 2 samples"
    assert torch.equal(x, expected)
    found = verify_plain(Around(lambda m, h, x: F.dropout(change(m, h, x))), x)
    assert found == "not verified: the forward pass changes its arguments in place"
    with pytest.raises(SamplesMixed, match="depends on the other samples"):
        verify_plain(Around(lambda m, h, x: change(m, h, x) - x.mean().item()), x)


def test_a_model_that_needs_several_samples_is_verified_with_copies() -> None:
    assert verify_plain(Around(lambda m, h, x: h.view(B, D)), torch.randn(B, D)) == "verified with 2 samples"
    for mix in (lambda x: x.mean(0), lambda x: x.mean().item()):
        with pytest.raises(SamplesMixed, match="changes with the other samples"):
            verify_plain(Around(lambda m, h, x, mix=mix: h.view(B, D) - mix(x)), torch.randn(B, D))


def test_a_run_that_raises_changes_nothing() -> None:
    def refuse_one(m: Any, h: Tensor, x: Tensor) -> Tensor:
        m.mean += 1
        m.seen.append(len(x))
        torch.rand(1)
        if len(x) < 2 or torch.equal(x[0], x[1]):
            raise ValueError("two samples are needed\nreally")
        return h

    model = Around(refuse_one, seen=[])
    torch.manual_seed(0)
    grads = record_output(model, torch.randn(B, D))
    assert grads.verification == "not verified: sample 0 alone raises ValueError: two samples are needed"
    assert model.seen == [B] and model.mean.tolist() == [1.0] * D and model.calls == 1
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(B, D), torch.rand(1)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(PerSampleError, match=r"verify='always' is given, but .* sample 0 alone raises ValueError"):
        record_output(model, torch.randn(B, D), verify="always")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_do_not_see_the_extra_passes(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    x = torch.randn(B, D, requires_grad=True)
    expected = record_output(copy.deepcopy(model), x, verify=False).norms()
    with record(model, loss_reduction="sum") as grads:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(grads.norms(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_beside_other_parts(reentrant: bool) -> None:
    """The row of a part that was verified is not compared where a reentrant checkpoint hides the other parts."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)).double()
    x = torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    with record(model) as grads:
        h = checkpoint(model[0], x, use_reentrant=reentrant)
        model[2](checkpoint(model[1], h, use_reentrant=reentrant)).square().sum().backward()
    losses = (model(x[n]).square().sum() for n in range(B))
    assert_rows_close(grads.dense(), stack_gradients(losses, dict(model.named_parameters())))


def differentiate(model: Any, h: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return h + gradient


def differentiate_functionally(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.func.grad(lambda x: x.square().sum())(x)


def differentiate_if_possible(model: Any, h: Tensor, x: Tensor) -> Tensor:
    try:
        return differentiate(model, h, x)
    except RuntimeError:
        return h


@pytest.mark.parametrize("function", [differentiate, differentiate_functionally, differentiate_if_possible])
def test_a_model_that_differentiates_in_its_forward_pass_is_verified(function: Callable[..., Any]) -> None:
    assert verify_plain(Around(function), torch.randn(B, D)).startswith("verified")


def test_extra_passes_keep_nothing_for_a_backward_pass() -> None:
    kept: list[Any] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            own = x.clone()
            kept.append(weakref.ref(own))
            ctx.save_for_backward(own)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    alive: list[int] = []

    def count(model: Any, h: Tensor, x: Tensor) -> Tensor:
        for _ in range(3):
            h = Keep.apply(h)
        alive.append(sum(ref() is not None for ref in kept))
        return h

    model = Around(count)
    assert verify_plain(model, torch.randn(B, D)).startswith("verified")
    assert alive == [3, 3, 3]  # those of the first pass, whose graph is still needed


def test_gradients_under_autocast_are_the_same() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), torch.randn(B, D)
    norms = []
    for verify in (False, None):
        run = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16), record(run, loss_reduction="sum", verify=verify) as grads:
            (run(x).square().sum() + run(x).sum()).backward()
        norms.append(grads.norms())
    assert torch.equal(*norms) and grads.verification == "verified with 2 samples"


# ---- random numbers ----

DROPOUT: dict[str, Callable[..., Any]] = {
    "F.dropout": lambda m, h, x: F.dropout(h, 0.5),
    "F.dropout in place": lambda m, h, x: F.dropout(h, 0.5, True, True),
    "F.dropout1d": lambda m, h, x: F.dropout1d(h, 0.5),
    "F.alpha_dropout": lambda m, h, x: F.alpha_dropout(h, 0.5, training=True),
    "F.feature_alpha_dropout": lambda m, h, x: F.feature_alpha_dropout(h, 0.5, training=True),
    "torch.dropout": lambda m, h, x: torch.dropout(h, 0.5, True),
    "torch.dropout_": lambda m, h, x: torch.dropout_(h, 0.5, True),
    "attention": lambda m, h, x: F.scaled_dot_product_attention(h, h, h, None, 0.5),
    "attention by name": lambda m, h, x: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5),
    "MultiheadAttention": lambda m, h, x: m.attention(h, h, h)[0],
    "nn.Dropout": lambda m, h, x: m.dropout(h),
    "LSTM": lambda m, h, x: m.lstm(h)[0],
    "packed GRU": lambda m, h, x: m.gru(pack_padded_sequence(h, [T] * len(h), batch_first=True))[1].movedim(1, 0),
    "DropPath": lambda m, h, x: m.path(h),
    "torch.rrelu": lambda m, h, x: torch.rrelu(h, 0.1, 0.9, True),
    "one number for all": lambda m, h, x: h * torch.rand(()) + F.dropout(h, 0.5),
    "Python": lambda m, h, x: h * random.random(),
}

RANDOM: dict[str, Callable[..., Any]] = {
    "randn_like": lambda m, h, x: h + torch.randn_like(h),
    "bernoulli": lambda m, h, x: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "gumbel": lambda m, h, x: F.gumbel_softmax(h, dim=-1),
    "multinomial": lambda m, h, x: h + torch.multinomial(x.flatten(1).exp(), 1)[..., None],
    "numpy": lambda m, h, x: h * float(np.random.rand(len(x))[0]),
    "own generator": lambda m, h, x: h + torch.randn(h.shape, generator=m.generator),
}


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1) < 0.5) * 2 if self.training else x


def make_random(function: Callable[..., Any]) -> nn.Module:
    return Around(
        function,
        attention=nn.MultiheadAttention(D, 2, dropout=0.5, batch_first=True),
        dropout=nn.Dropout(0.5),
        lstm=nn.LSTM(D, D, 2, dropout=0.5, batch_first=True),
        gru=nn.GRU(D, D, 2, dropout=0.5, batch_first=True),
        path=DropPath(),
        generator=torch.Generator(),
    )


@pytest.mark.parametrize("name", DROPOUT)
def test_models_with_dropout_are_verified(name: str) -> None:
    model = make_random(DROPOUT[name])
    x = torch.randn(B, T, D)
    assert verify_plain(model, x) == "verified with 2 samples"
    mixing = make_random(lambda m, h, x: DROPOUT[name](m, h, x) + 1e3 * x.mean().item())
    with pytest.raises(SamplesMixed):
        verify_plain(mixing, x)


@pytest.mark.parametrize("name", RANDOM)
def test_random_models_are_not_verified_and_say_so(name: str) -> None:
    np.random.seed(0)
    model, x = make_random(RANDOM[name]), torch.randn(B, T, D)
    cause = "not verified: the forward pass draws random numbers other than those of dropout"
    assert verify_plain(model, x) == cause
    if name != "multinomial":  # the tracker has its own opinion of it
        assert cause in repr(record_output(model, x, verify="first"))


# ---- all forms of arguments and outputs ----


@dataclass
class Inputs:
    x: Tensor
    factor: Tensor
    name: str = "x"


@dataclass
class Outputs:
    logits: Tensor
    loss: Tensor


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D)

    def forward(self, x: PackedSequence) -> tuple[PackedSequence, Tensor]:
        return self.rnn(x)


def pack() -> PackedSequence:
    return pack_padded_sequence(torch.randn(B, T, D), [1, 3, 2, 3, 2], batch_first=True, enforce_sorted=False)


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(D, D), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, D)


def with_loss(linear: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    logits = linear(x)
    return {"loss": F.cross_entropy(logits, y), "logits": logits, "hidden": (x, logits.exp())}


FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "time first": (lambda: nn.LSTM(D, D), lambda: (x(T, B),), {"batch_dim": 1}),
    "time first, a state": (
        lambda: nn.LSTM(D, D),
        lambda: (x(T, B), (x(1, B), x(1, B))),
        {"batch_dim": 1},
    ),
    "T == B": (lambda: nn.LSTM(D, D), lambda: (x(B, B),), {"batch_dim": 1}),
    "packed": (Packed, lambda: (pack(),), {}),
    "dataclass": (
        lambda: Module(lambda f, i: f(i.x) * i.factor),
        lambda: (Inputs(x(B), torch.rand(B, 1)),),
        {"batch_size": B},
    ),
    "dict": (lambda: Module(lambda f, i: f(i["a"]["b"][0])), lambda: ({"a": {"b": [x(B)]}},), {}),
    "a constant": (
        lambda: Module(lambda f, i, c: f(i) * c),
        lambda: (x(B), torch.rand(D)),
        {"batch_dim": {1: None}},
    ),
    "batch_size": (lambda: Module(lambda f, i, c: f(i) * c), lambda: (x(B), torch.rand(D)), {"batch_size": B}),
    "an integer": (lambda: Module(lambda f, i, n: f(i) * n), lambda: (x(B), 3), {}),
    "tuple": (lambda: Module(lambda f, i: (f(i), (f(i).T, None), 3)), lambda: (x(B),), {}),
    "loss and logits": (lambda: Module(with_loss), lambda: (x(B), torch.arange(B) % D), {}),
    "object": (lambda: Module(lambda f, i: SimpleNamespace(a=f(i))), lambda: (x(B),), {}),
    "rows": (lambda: Module(lambda f, i: f(i).flatten(0, 1)), lambda: (x(B, T),), {}),
    "rows, time first": (lambda: Module(lambda f, i: f(i).flatten(0, 1)), lambda: (x(T, B),), {"batch_dim": 1}),
    "squeezed": (lambda: Module(lambda f, i: f(i).squeeze()), lambda: (x(B),), {}),
    "one output of another shape": (
        lambda: Module(lambda f, i: (f(i), f(i) @ torch.ones(D, len(i)))),
        lambda: (x(B),),
        {},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_arguments_and_outputs(name: str) -> None:
    make, make_args, options = FORMS[name]
    model, args = make(), make_args()
    with record(model, **options) as grads:
        model(*args)
    assert grads.verification == "verified with 2 samples"

    def shift(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() and tensor.dim() == 0 else tensor + float(seen[0])

    def spoil(module: nn.Module, args: Any, output: Any) -> Any:  # a number that depends on all samples
        return torch.utils._pytree.tree_map_only(Tensor, shift, output)

    def see(module: nn.Module, args: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves([vars(a) if isinstance(a, Inputs) else a for a in args])
        seen[:] = [sum(float(leaf.sum()) for leaf in leaves if isinstance(leaf, Tensor))]

    seen = [0.0]
    if name not in ("packed", "object", "loss and logits"):
        model = make()
        model.register_forward_pre_hook(see)
        model.register_forward_hook(spoil)
        with pytest.raises(SamplesMixed), record(model, verify="first", **options):
            model(*args)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda f, i: f(i).amax(), "no output has a part for each sample, or is a sum over them"),
        (lambda f, i: f(i).repeat(1, len(i)), "the outputs of a sample alone have another form, or are not finite"),
        (lambda f, i: [row[None] for row in f(i)], "the outputs of a sample alone have another form"),
        (lambda f, i: f(i) * torch.nan, "the outputs of a sample alone have another form, or are not finite"),
        (lambda f, i: (f(i), 1 / (len(i) - 1), 1 / int(i[0].ne(i[1]).any()))[0], "sample 0 alone raises ZeroDivision"),
        (lambda f, i: (f(i), None)[1], "no forward pass has ended"),
    ],
    ids=["maximum", "shapes", "a list", "nan", "fixed size", "None"],
)
def test_what_cannot_be_verified_says_why(function: Callable[..., Any], cause: str) -> None:
    model = Module(function)
    with record(model) as grads:
        model(x(B))
    assert cause in grads.verification


SUMS: dict[str, Callable[..., Tensor]] = {
    "mean": lambda f, i: f(i).square().mean(),
    "sum": lambda f, i: f(i).square().sum(),
    "dropout": lambda f, i: F.dropout(f(i), 0.5).square().sum(),
}

NO_SUMS: dict[str, Callable[..., Tensor]] = {
    "a number": lambda f, i: (f(i) / i.std().item()).square().mean(),
    "a number of rows": lambda f, i: (f(i).square() * (i > 0)).sum() / len((i > 0).nonzero()),
    "weights by numpy": lambda f, i: (f(i).square() * torch.from_numpy(i.numpy() / i.numpy().max())).mean(),
    "weights by Python": lambda f, i: (f(i).square().sum(1) * torch.tensor(i[:, 0].abs().softmax(0).tolist())).sum(),
}


@pytest.mark.parametrize("batch", [2, 4, 5])
@pytest.mark.parametrize("name", SUMS)
def test_a_model_that_returns_its_loss_is_verified_with_other_batches(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model = Module(SUMS[name])
    with record(model) as grads:
        model(x(batch)).backward()
    assert grads.verification == "verified with two other batches"


@pytest.mark.parametrize("batch", [3, 5])
@pytest.mark.parametrize("name", NO_SUMS)
def test_a_loss_that_is_no_sum_over_the_samples_is_refused(name: str, batch: int) -> None:
    torch.manual_seed(1)  # a batch in which the samples have different numbers of positive entries
    model = Module(NO_SUMS[name])
    with pytest.raises(PerSampleError), record(model):
        model(x(batch)).backward()


def test_a_list_with_one_item_per_sample_is_no_reason_to_refuse() -> None:
    def scale(f: nn.Module, x: Tensor, factors: Any) -> Tensor:
        return f(x) * torch.tensor([factors[n] for n in range(len(x))])[:, None]

    for factors in ([1.0, 2.0, 3.0, 4.0, 5.0], np.arange(5.0), SimpleNamespace(f=(1.0, 2.0, 3.0, 4.0, 5.0))):
        model = Module(lambda f, x, factors: scale(f, x, getattr(factors, "f", factors)))
        with record(model) as grads:
            model(x(B), factors)
        assert grads.verification == "not verified: a list in the arguments may hold one item for each sample"


def test_ids_of_several_samples_without_a_batch_dimension_are_no_reason_to_refuse() -> None:
    model, ids, offsets = (
        nn.EmbeddingBag(7, 3, mode="sum"),
        torch.tensor([1, 4, 4, 2, 6, 0, 5]),
        torch.tensor([0, 3, 4]),
    )
    bags = ids.tensor_split([3, 4])
    expected = stack_gradients((model(bag[None]).square().sum() for bag in bags), dict(model.named_parameters()))
    with record(model, batch_size=3) as grads:
        model(ids, offsets).square().sum().backward()
    assert_rows_close(grads.dense(), expected, 1e-6)
    assert "an argument of shape (7,) has no batch dimension" in grads.verification


def test_arguments_declared_as_constants_do_not_prevent_a_verification() -> None:
    model, scale = Module(lambda f, x, scale: f(x - float(x.mean())) * scale.sum()), torch.ones(7, dtype=torch.long)
    for constant, options in ((scale, {"constants": scale}), (scale[None], {})):
        with (
            pytest.raises(SamplesMixed, match="changes with the other samples"),
            record(model, batch_size=B, **options),
        ):
            model(x(B), constant)


def test_a_model_that_calls_itself_is_not_verified() -> None:
    model = Module(lambda f, x, n=1: model(f(x), n - 1) if n else f(x))
    for verify in (None, "first"):
        with record(model, loss_reduction="sum", verify=verify) as grads:
            model(x(B)).square().sum().backward()
        assert grads.verification == "not verified: the model calls itself" and grads.norms().shape == (B,)
    found: list[Any] = []
    with watch(model, found.append, {}):
        model(x(B)).square().mean().backward()
    assert found[0].verification == "not verified: the model calls itself"


# ---- when ----


CALLS: list[int] = []


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return super().forward(x)


def count_calls(model: nn.Module, size: int = B, **options: Any) -> list[int]:
    CALLS.clear()
    record_output(model, torch.randn(size, D), **options)
    return list(CALLS)


def test_once_for_each_mode_and_form() -> None:
    model = Counting(D, D)
    assert count_calls(model) == [B, 1, 1]
    assert count_calls(model) == [B]
    assert count_calls(model, size=7) == [7]
    model.eval()
    assert count_calls(model) == [B, 1, 1]
    assert count_calls(model) == [B]
    with torch.autocast("cpu", torch.bfloat16):
        assert count_calls(model) == [B, 1, 1]
    assert count_calls(copy.deepcopy(model)) == [B, 1, 1]


def test_always_and_never() -> None:
    model = Counting(D, D)
    assert count_calls(model, verify=False) == [B]
    assert count_calls(model, verify="always") == count_calls(model, verify="always") == [B, 1, 1]


class Switched(nn.Module):
    """Reads numbers from its samples, and uses them from the second call on."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.is_on = False
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x), x)


LATER: dict[str, Callable[..., Tensor]] = {
    "new functions": lambda m, h, x: h * x.std(0).tolist()[0] if m.is_on else h,
    "the same functions": lambda m, h, x: h * (x.std().item() if m.is_on else x.std().item() * 0 + 2),
    "a limit": lambda m, h, x: h.clamp(max=x.max().item() - (2.0 if m.is_on else -100.0)),
    "an array": lambda m, h, x: h * float(x.numpy().mean() if m.is_on else x.numpy().mean() * 0),
    "a decision": lambda m, h, x: h * (2 if (x.amax() < 0 if m.is_on else x.amax() > -100.0) else 3),
    "a size": lambda m, h, x: h * len((x > 0).nonzero()) if m.is_on else h,
}


@pytest.mark.parametrize("name", LATER)
def test_passes_that_may_differ_from_the_first_are_verified(name: str) -> None:
    torch.manual_seed(0)
    model = Switched(LATER[name])
    x = torch.randn(B, D)
    x[0] = -x[0].abs()
    record_output(model, x)
    model.is_on = True
    with pytest.raises(SamplesMixed):
        record_output(model, x)


def test_decisions_are_verified_once() -> None:
    class Deciding(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if (x > 100).any() else 1)

    model = Deciding(D, D)
    assert count_calls(model) == [B, *[1] * B]
    assert count_calls(model) == [B]


class Branching(Counting):
    """Takes one of two paths."""

    takes_other = False

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h.cos() if self.takes_other else h.sin()


def is_verified_anew(model: nn.Module) -> bool:
    return len(count_calls(model)) > 1


ENVIRONMENTS: dict[str, Callable[[nn.Module], Any]] = {
    "eval": lambda model: contextlib.nullcontext(model.eval()),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "another dtype of autocast": lambda model: torch.autocast("cpu", torch.float16),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_path_is_verified_in_each_environment(name: str) -> None:
    """Both paths are known, and both environments, but not this path in this environment."""
    model = Branching(D, D)
    for takes_other in (False, True):
        model.takes_other = takes_other
        with torch.autocast("cpu", torch.bfloat16, enabled=name.startswith("another")):
            assert [is_verified_anew(model) for _ in range(5)][0::4] == [True, False]
    for takes_other in (False, True):
        model.takes_other = takes_other
        with ENVIRONMENTS[name](model):
            assert [is_verified_anew(model) for _ in range(2)] == [True, False]


def test_what_is_kept_of_passes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.forward.program._MAX_STATUSES", 3)
    model = Counting(D, D)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        record_output(model.to(dtype), torch.randn(B, D, dtype=dtype))
    kept = get_program(model)
    assert 0 < len(kept.statuses) <= 3 and 0 < len(kept.environments) <= 3


def test_with_an_output_that_cannot_be_compared_it_is_not_verified() -> None:
    """Each row of the second output has the size of the batch."""

    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            return h, h[:, :1] * torch.from_numpy(h.detach().numpy()[:, 0].copy())

    found = record_output(TwoOutputs(), torch.randn(B, D)).verification
    assert found == f"not verified: an output of shape ({B}, {B}) has another form if a sample is alone"


@pytest.mark.parametrize("is_equal", [False, True])
def test_with_an_output_that_depends_on_samples_out_of_sight_it_is_not_verified(is_equal: bool) -> None:
    def function(model: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h, model.linear.weight.detach() if is_equal else torch.from_numpy(h.detach().numpy().mean(0))

    expected = "verified with 2 samples" if is_equal else f"not verified: an output of shape ({D},) depends on samples"
    assert record_output(Around(function), torch.randn(B, D)).verification.startswith(expected)


def test_an_output_that_is_padded_to_the_longest_sample_is_compared() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(D, D, batch_first=True)

        def forward(self, packed: Any) -> Any:
            output, (h, _) = self.lstm(packed)
            return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0], h

    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 4, D), torch.tensor([4, 3, 2]), batch_first=True)
    assert record_output(Recurrent(), packed).verification == "verified with 2 samples"


def test_a_pass_with_new_decisions_is_verified_however_many_there_were() -> None:
    """The model takes seven decisions, which in the last pass one sample takes for all others."""

    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor, bits: Tensor) -> Tensor:
            taken = [bool((column > 0).any()) for column in bits.unbind(1)]
            return self.linear(x) * (2 if all(taken) else 1)

    model, x = Deciding(), torch.randn(B, D)
    for number in range(128):
        bits = torch.tensor([number >> place & 1 for place in range(7)]).expand(B, 7).contiguous()
        if number == 127:
            bits[2:] = 0
            with pytest.raises(SamplesMixed):
                record_output(model, x, bits)
        else:
            assert record_output(model, x, bits).verification.startswith("verified with")


def test_one_sample_waits_for_a_larger_batch() -> None:
    model = Counting(D, D)
    assert count_calls(model, size=1) == [1] and count_calls(model, size=1, verify="always") == [1]
    assert count_calls(model) == [B, 1, 1]


class SeeingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def register_hook(kind: str) -> Callable[[nn.Module], None]:
    def nothing(*args: Any) -> None:
        pass

    def register(model: nn.Module) -> None:
        getattr(model[1], f"register_{kind}")(nothing)  # type: ignore[index]

    return register


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_not_by_default_where_hooks_would_notice(kind: str) -> None:
    model = nn.Sequential(Counting(D, D), nn.Tanh())
    register_hook(kind)(model)
    assert "hooks" in record_output(model, torch.randn(B, D)).verification
    assert count_calls(model) == [B]
    assert count_calls(model, verify="first") == [B, 1, 1]


def test_not_by_default_where_others_would_notice() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert count_calls(Counting(D, D)) == [B]
    finally:
        handle.remove()
    with SeeingMode():
        assert count_calls(Counting(D, D)) == [B]
        assert count_calls(Counting(D, D), verify="first") == [B, 1, 1]
    model = Counting(D, D)
    model.compile(backend="eager")
    assert "compiled" in record_output(model, torch.randn(B, D)).verification
    with torch.device("cpu"):  # the mode of a device makes no difference
        assert count_calls(Counting(D, D)) == [B]
    torch.set_default_device("cpu")
    try:
        assert count_calls(Counting(D, D)) == [B, 1, 1]
    finally:
        torch.set_default_device(None)


def test_hooks_of_torch_are_no_reason_not_to_verify() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(Counting(D, D)), nn.Tanh())
    assert count_calls(model) == [B, 1, 1]


@pytest.mark.parametrize("options", [{}, {"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}], ids=str)
@pytest.mark.parametrize(("verify", "text"), [(None, "verified with 2 samples"), (False, "not verified: verify=False")])
def test_repr_says_whether_it_was_verified(options: dict[str, Any], verify: Any, text: str) -> None:
    for _ in range(2):
        assert f"\n  {text})" in repr(record_output(nn.Linear(D, D), torch.randn(B, D), verify=verify, **options))


def test_not_where_several_processes_share_the_batch() -> None:
    class Others(Processes):
        pass

    model = Counting(D, D)
    arguments, tracker = Arguments(model.forward, (torch.randn(B, D),), {}, 0), SimpleNamespace(batch=B)
    found = start_verification(model, Options(verify="first"), Others(), tracker, arguments, ())  # type: ignore[arg-type]
    assert found == "not verified: several processes share the batch"
    with pytest.raises(PerSampleError, match="cannot be verified: several processes"):
        start_verification(model, Options(verify="always"), Others(), tracker, arguments, ())  # type: ignore[arg-type]
    assert count_calls(model) == [B, 1, 1]  # it was not remembered


def test_a_compiled_step_is_not_verified_and_does_not_prevent_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(D, D), torch.randn(B, D)
    finish, finished = Verification.finish, []
    monkeypatch.setattr(Verification, "finish", lambda *args: finished.append(finish(*args)) or finished[-1])
    step = persample.compile(model, lambda m, x: m(x).square().mean(), lambda grads: grads.norms(), backend="eager")
    step(x)
    assert not finished
    record_output(model, x)
    assert len(finished) == 1


@pytest.mark.parametrize("verify", [True, "last", 0, -2, 1.5])
def test_wrong_option(verify: Any) -> None:
    with pytest.raises(PerSampleError, match="verify must be 'first', 'always', False, None or a number"):
        record_output(nn.Linear(D, D), torch.randn(B, D), verify=verify)


# ---- check ----


def test_check_names_the_place_unless_told_not_to() -> None:
    model, batch = nn.Sequential(nn.Linear(D, D), Mix()), torch.randn(B, D)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    report = check(model, batch, loss_fn)
    assert report.outcome == "refused" and report.coupled and "'1' (Mix)" in str(report.refusal)
    assert check(model, batch, loss_fn, verify=False).outcome == "wrong"


# ---- verify=n: again, after at most n passes ----


def mix_in_thread(m: Around, h: Tensor, x: Tensor) -> Tensor:
    """Mix samples if asked to, out of sight of all modes of torch."""
    thread = threading.Thread(target=lambda: h.data.add_(h.data.roll(1, 0) * float(m.mixes)))
    thread.start()
    thread.join()
    return h


@pytest.mark.parametrize("every", [1, 3])
def test_a_number_repeats_the_verification(every: int) -> None:
    """The samples are drawn each time, and nobody's random numbers are used for it."""
    model, x, rows = Around(mix_in_thread, mixes=False), torch.randn(B, D), []
    state = torch.get_rng_state(), random.getstate()
    for _ in range(30):
        grads = record_output(model, x, verify=every)
        assert grads.verification == "verified with 2 samples"
        rows.append(grads.row_verification)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    found = [i for i, row in enumerate(rows) if row.startswith("row ")]
    assert found[0] == 0 and len({rows[i] for i in found}) > 2
    assert all(b - a <= every for a, b in pairwise([*found, len(rows)]))
    model.mixes = True
    with pytest.raises(SamplesMixed):
        for _ in range(every):
            record_output(model, x, verify=every)


def test_a_number_tries_again_what_was_not_verified() -> None:
    def fail_alone(m: Around, h: Tensor, x: Tensor) -> Tensor:
        if m.fails and (len(x) < 2 or bool(x[0].eq(x[1]).all())):
            raise ValueError("two samples are needed")
        return h

    model = Around(fail_alone, fails=True)
    assert record_output(model, torch.randn(B, D), verify=50).verification.startswith("not verified: ")
    model.fails = False
    assert record_output(model, torch.randn(B, D), verify=50).verification.startswith("verified with ")
