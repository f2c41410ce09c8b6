"""Tests of check(): reports on models that are right, wrong, refused or random; the preserved state of the model."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, SamplesMixed, check
from persample.checking import Report
from persample.rules.registry import FURTHER_RULES, register_rule
from persample.terms import Dense
from tests.support.modules import read_state

BATCH = 16
X, Y = torch.randn(BATCH, 6), torch.arange(BATCH) % 3
IDS = torch.arange(BATCH * 5).view(BATCH, 5) % 7


class Around(nn.Module):
    """Module with a net of two layers and a given function as its forward pass."""

    def __init__(self, use: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.use = use
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.use(self, *args, **kwargs)


def make_mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


def run_check(model: nn.Module, batch: Any = (X, Y), loss_fn: Any = F.cross_entropy, **options: Any) -> Report:
    return check(model, batch, loss_fn, **options)


def get_rules(report: Report) -> dict[str, list[str]]:
    return {p.name: p.rules for p in report.parameters}


# ---- right gradients ----


class Tied(nn.Module):
    """Embedding that is also the weight of the head, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh())


def compute_next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_tied_embedding() -> None:
    report = run_check(Tied(), IDS, compute_next_token_loss)
    assert report.ok and report.outcome == "right" and report.refusal is None and report.coupled is False
    assert (report.samples, report.batch_size, report.dtype, report.tolerance) == (4, BATCH, "float64", 1e-9)
    weight, bias, *unused = report.parameters
    assert (weight.name, weight.shape, weight.verdict) == ("embedding.weight", (7, 6), "right")
    assert (weight.rules, weight.term, weight.norms) == (["embedding", "linear"], "Rows + Outer", "rows + dense")
    assert weight.dense_bytes == 4 * BATCH * 7 * 6
    rows, outer = BATCH * 5 * (8 + 6 * 4), BATCH * 5 * (6 + 7) * 4
    assert weight.kept_bytes == rows + outer
    assert weight.error is not None and weight.error < 1e-12
    assert (bias.term, bias.norms, bias.kept_bytes) == ("Dense", "dense", bias.dense_bytes)
    assert [(p.name, p.verdict, p.rules, p.error) for p in unused] == [
        ("unused.weight", "unused", [], None),
        ("unused.bias", "unused", [], None),
    ]


def test_convolutional_net() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.PReLU(), nn.Flatten(), nn.Linear(288, 3))
    report = run_check(model, (torch.randn(BATCH, 3, 8, 8), Y))
    assert report.ok
    assert get_rules(report)["0.weight"] == ["conv2d"] and get_rules(report)["1.bias"] == ["group_norm"]
    assert {p.name: (p.term, p.norms) for p in report.parameters} == {
        "0.weight": ("Patches", "dense"),
        "0.bias": ("Dense", "dense"),
        "1.weight": ("Dense", "dense"),
        "1.bias": ("Dense", "dense"),
        "2.weight": ("Dense", "dense"),
        "4.weight": ("Outer", "ghost"),
        "4.bias": ("Dense", "dense"),
    }


def test_rules_of_functions_without_a_layer() -> None:
    def use(m: Around, x: Tensor) -> Tensor:
        both = torch.cat([m.weight.expand(len(x), 1, 6), x.unsqueeze(1)], 1)
        return m.net(both.fmod(m.modulus)).sum(1)

    model = Around(use)
    model.weight = nn.Parameter(torch.randn(6))
    model.modulus = nn.Parameter(torch.rand(6) + 1)
    nn.utils.parametrizations.weight_norm(model.net[0])
    rules = get_rules(run_check(model))
    assert rules["modulus"] == ["generic (fmod)"]
    assert rules["weight"] == ["moves (cat) (through expand)"]
    assert rules["net.0.parametrizations.weight.original0"] == ["linear (through weightnorminterface)"]
    assert run_check(model).ok


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Flatten(), nn.Linear(30, 3))
    assert run_check(model, (IDS, Y)).ok


def test_recurrent_net_with_batch_in_dim_1() -> None:
    model = Around(lambda m, x: m.net(m.parts[0](x)[0][-1]), nn.LSTM(6, 6, num_layers=2, dropout=0.5))
    report = run_check(model, (torch.randn(5, BATCH, 6), Y), batch_dim=1)
    assert report.ok and get_rules(report)["parts.0.weight_hh_l1"] == ["lstm"]
    assert len(report.notes) == 1 and "dropout turned off. With dropout on, the rows add up" in report.notes[0]


def compute_dict_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@dataclasses.dataclass(frozen=True)
class Labelled:
    x: Tensor
    y: Tensor
    name: str = "a batch"


def make_defaultdict() -> Any:
    return collections.defaultdict(list, x=X, y=Y)


BATCHES: dict[str, tuple[Any, Any]] = {
    "dict": ({"x": X, "y": Y, "step": 3}, compute_dict_loss),
    "other mapping": (make_defaultdict(), compute_dict_loss),
    "dataclass": (Labelled(X, Y), lambda model, batch: F.cross_entropy(model(batch.x), batch.y)),
    "one tensor": (X, lambda model, x: model(x).square().mean()),
    "nested": ([X, {"target": (Y, None)}], lambda model, b: F.cross_entropy(model(b[0]), b[1]["target"][0])),
    "loss module": ((X, Y), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "weights in the loss": ((X, torch.rand(BATCH, 3)), nn.BCEWithLogitsLoss(weight=torch.rand(3))),
    "loss of torch": ((X, Y), F.cross_entropy),
    "arguments by position": (((X,), Y), nn.CrossEntropyLoss()),
    "arguments by name": (({"input": X}, Y), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("name", BATCHES)
def test_forms_of_batches(name: str) -> None:
    batch, loss_fn = BATCHES[name]
    report = run_check(make_mlp(), batch, loss_fn)
    assert report.ok and report.batch_size == BATCH and report.dtype == "float64"


def test_packed_batch() -> None:
    model = Around(lambda m, packed: m.net(m.parts[0](packed)[1][0]), nn.GRU(6, 6))
    packed = pack_sequence([torch.randn(n, 6) for n in (3, 5, 1, 2, 4, 4)], enforce_sorted=False)
    report = run_check(model, packed, lambda model, batch: model(batch).square().mean())
    assert report.ok and (report.samples, report.batch_size) == (4, 6)


def test_tensors_without_batch_dimension() -> None:
    model, batch = Around(lambda m, x, shift: m.net(x + shift.sum(0))), ((X, torch.randn(4, 6)), Y)
    with pytest.raises(PerSampleError, match=r"different sizes in the batch dimension: 16 and 4\. Pass batch_size"):
        run_check(model, batch)
    report = run_check(model, batch, batch_size=BATCH)
    assert report.ok and report.samples == 5, "4 samples would have the size of the tensor without samples"
    assert run_check(model, batch, batch_dim={0: 0, 1: None}).ok
    assert run_check(model, batch, batch_dim=[0, None]).ok


def test_targets_with_another_batch_dim() -> None:
    model = Around(lambda m, x: m.net(x).transpose(0, 1))
    batch = {"x": torch.randn(5, BATCH, 6), "y": torch.randint(3, (BATCH, 5)), "step": torch.tensor(3)}
    report = run_check(
        model,
        batch,
        lambda model, b: F.cross_entropy(model(b["x"]).flatten(0, 1), b["y"].flatten()),
        batch_dim=1,
        batch_size=BATCH,
    )
    assert report.ok and report.samples == 4


def test_number_of_samples() -> None:
    assert run_check(make_mlp(), samples=6).samples == 7, "6 is also the number of features"
    assert run_check(make_mlp(), samples=99).samples == BATCH
    one = run_check(make_mlp(), (X[:1], Y[:1]))
    assert one.ok and one.coupled is None and "A single sample cannot show" in one.notes[0]


def test_frozen_parameters_are_not_recorded() -> None:
    model = make_mlp()
    model[0].requires_grad_(False)
    report = run_check(model)
    assert report.ok and [p.name for p in report.parameters] == ["1.weight", "1.bias"]
    assert report.notes == ["Not recorded, because they do not require grad: 0.bias, 0.weight."]


# ---- number types ----


def test_model_that_does_not_run_in_double() -> None:
    report = run_check(Around(lambda m, x: m.net(x.float())))
    assert report.ok and (report.dtype, report.tolerance) == ("float32", 1e-4)
    assert any(p.error for p in report.parameters)


def test_model_that_computes_in_float32_in_part() -> None:
    report = run_check(Around(lambda m, x: m.net(x.softmax(1, dtype=torch.float32).to(x.dtype))))
    assert report.ok and (report.dtype, report.tolerance) == ("float64, in part in float32", 1e-4)
    assert run_check(make_mlp(), tolerance=0.5).tolerance == 0.5


def test_default_dtype_is_double_during_the_check() -> None:
    model = Around(lambda m, x: m.net(m.parts[0](x.unsqueeze(0), torch.zeros(1, len(x), 6))[0][0]), nn.GRU(6, 6))
    assert run_check(model).dtype == "float64"
    assert torch.get_default_dtype() == torch.float32


def test_complex_and_bfloat16_parameters() -> None:
    model = Around(lambda m, x: (x.to(m.weight.dtype) @ m.weight).abs())
    model.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
    report = run_check(model)
    weight = next(p for p in report.parameters if p.name == "weight")
    assert report.ok and report.dtype == "float64" and weight.dense_bytes == BATCH * 6 * 3 * 8
    coarse = run_check(make_mlp().bfloat16(), (X.bfloat16(), Y))
    assert coarse.ok and coarse.parameters[0].dense_bytes == BATCH * 48 * 2


def test_nonfinite_gradients_are_not_compared() -> None:
    report = run_check(Around(lambda m, x: m.net(x * torch.inf)))
    assert not report.ok and report.outcome == "not compared"
    assert {p.verdict for p in report.parameters} == {"not finite"}


# ---- refusals ----


def test_refusal_names_the_batch_norm() -> None:
    report = run_check(make_mlp(nn.BatchNorm1d(8)))
    assert not report.ok and report.outcome == "refused" and isinstance(report.refusal, SamplesMixed)
    assert "module '1' (BatchNorm1d)" in str(report.refusal) and "module '1' (BatchNorm1d)" in str(report)
    assert {p.verdict for p in report.parameters} == {"refused"}
    assert "does not run on a single sample (ValueError: Expected more than 1 value" in report.notes[0]
    with pytest.raises(SamplesMixed, match="BatchNorm1d"):
        report.raise_if_wrong()
    assert run_check(make_mlp(nn.BatchNorm1d(8)).eval()).ok


def test_refusal_notes_whether_the_plain_model_mixes_samples() -> None:
    mixed = run_check(Around(lambda m, x: m.net(x - x.mean(0))))
    assert mixed.refusal is not None and mixed.coupled and "The samples influence each other" in mixed.notes[0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, scale = ctx.saved_tensors
            return grad * scale, (grad * x).sum(0)

    model = Around(lambda m, x: m.net(Scaled.apply(x, m.scale)))
    model.scale = nn.Parameter(torch.ones(6))
    apart = run_check(model)
    assert "uses the parameter 'scale'" in str(apart.refusal) and apart.coupled is False
    assert "these samples do not influence each other" in apart.notes[0]


def test_errors_of_the_recording_are_reported_as_refusals() -> None:
    def call_with_other_batch_size(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], torch.ones(7, 6)), batch[1])

    report = run_check(Around(lambda m, x, shift: m.net(x + shift[0])), (X, Y), call_with_other_batch_size)
    assert "different sizes in the batch dimension: 4 and 7" in str(report.refusal)

    def raise_under_a_mode(model: Around, x: Tensor) -> Tensor:
        if torch.overrides._get_current_function_mode_stack():
            raise KeyError("a mode is there")
        return model.net(x)

    report = check(Around(raise_under_a_mode), (X, Y), nn.CrossEntropyLoss(), tolerance=1e-9)
    assert str(report.refusal) == "KeyError: 'a mode is there'" and "Please report this error" in report.notes[0]


# ---- wrong gradients ----


def scaled(input: Tensor, weight: Tensor) -> Tensor:
    if has_torch_function((input, weight)):
        return handle_torch_function(scaled, (input, weight), input, weight)
    return input * weight


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    @register_rule(scaled)
    def terms(grad: Tensor, input: Tensor, weight: Tensor) -> Any:
        return {"weight": Dense((grad * input).flatten(1, -2).sum(1) * 1.001)}

    yield
    FURTHER_RULES.pop(scaled)


def make_scaled_model() -> nn.Module:
    model = Around(lambda m, x: m.net(scaled(x, m.scale)))
    model.scale = nn.Parameter(torch.randn(6))
    return model


def test_wrong_rule_is_found(wrong_rule: None) -> None:
    report = run_check(make_scaled_model())
    assert not report.ok and report.outcome == "wrong" and report.refusal is None and report.coupled is False
    assert [(p.name, p.rules) for p in report.parameters if p.verdict == "WRONG"] == [("scale", ["scaled"])]
    wrong = next(p for p in report.parameters if p.name == "scale")
    assert wrong.error == pytest.approx(1e-3)
    assert "unless you registered one of these rules: scaled." in report.notes[0]
    with pytest.raises(PerSampleError, match=r"(?s)WRONG: the gradients of 4 of 16 samples.* scaled .* WRONG"):
        report.raise_if_wrong()


def test_model_is_right_without_the_wrong_rule() -> None:
    report = run_check(make_scaled_model())
    report.raise_if_wrong()
    assert report.ok and get_rules(report)["scale"] == ["mul"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_wrong_loss_reduction_is_noted(reduction: str) -> None:
    loss, other = nn.CrossEntropyLoss(reduction=reduction), "sum" if reduction == "mean" else "mean"
    assert run_check(make_mlp(), loss_fn=loss, loss_reduction=reduction).ok
    assert run_check(make_mlp(), loss_fn=loss).ok
    report = run_check(make_mlp(), loss_fn=loss, loss_reduction=other)
    assert report.outcome == "refused" and f"is a {reduction} over the samples" in str(report.refusal)
    assert report.notes == [
        f"The gradient of the batch is the {reduction} of the gradients of its samples, not the {other}: pass "
        f"loss_reduction='{reduction}'."
    ]


def test_samples_mixed_through_a_python_number() -> None:
    model = Around(lambda m, x: m.net(x - float(x.mean())))
    for options, outcome in (({}, "refused"), ({"verify": False}, "wrong")):
        report = run_check(model, **options)
        assert report.outcome == outcome and report.coupled
        assert "The samples influence each other" in report.notes[0]


def test_right_rows_whose_sum_is_not_the_batch_gradient() -> None:
    model = nn.Sequential(nn.Embedding(7, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(30, 3))
    report = run_check(model, (IDS, Y))
    assert report.ok and report.coupled and "The samples influence each other" in report.notes[0]


def test_gradients_that_are_zero_except_for_rounding() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(model.in_proj_bias)
    batch = torch.randn(BATCH, 3, 8)
    assert run_check(model, batch, lambda m, x: m(x, x, x)[0].square().mean()).ok

    def apart(m: Around, x: Tensor) -> Tensor:
        return (F.linear(x, m.net[0].weight) + m.shift).softmax(1)

    model = Around(apart)
    model.shift = nn.Parameter(torch.randn(1))
    report = run_check(model, X, lambda m, x: m(x).square().mean())
    assert report.ok, str(report)


# ---- random numbers ----


@pytest.mark.parametrize(
    "model",
    [
        lambda: make_mlp(nn.Dropout(0.4)),
        lambda: Around(lambda m, x: m.net(F.dropout(x, 0.4, True))),
        lambda: Around(lambda m, x: m.net(m.parts[0](*[x.view(-1, 2, 3)] * 3)[0].flatten(1)), make_attention()),
        lambda: Around(lambda m, x: m.net(attend(x.view(-1, 2, 3)).flatten(1))),
    ],
)
def test_dropout(model: Callable[[], nn.Module]) -> None:
    report = run_check(model())
    assert report.ok, str(report)
    assert report.notes == [
        "The model draws random numbers, and a loop cannot draw the numbers of a batch: the rows were compared with "
        "dropout turned off. With dropout on, the rows add up to the plain gradient."
    ]


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


def make_attention() -> nn.Module:
    return nn.MultiheadAttention(3, 1, dropout=0.3, batch_first=True)


def test_dropout_in_evaluation_is_not_noted() -> None:
    assert run_check(make_mlp(nn.Dropout(0.4)).eval()).notes == []


def test_random_numbers_without_dropout(wrong_rule: None) -> None:
    report = run_check(Around(lambda m, x: m.net(x + torch.randn_like(x))))
    assert not report.ok and report.outcome == "not compared"
    assert {p.verdict for p in report.parameters} == {"adds up"} and get_rules(report)["net.0.bias"] == ["linear"]
    assert "pass the noise with the batch" in report.notes[0]

    model = make_scaled_model()
    model.use = lambda m, x: m.net(scaled(x + torch.randn_like(x), m.scale))
    report = run_check(model)
    assert {p.name for p in report.parameters if p.verdict == "WRONG"} == {"scale"} and report.outcome == "wrong"


def test_rows_that_are_wrong_only_with_dropout(wrong_rule: None) -> None:
    def use(m: Around, x: Tensor) -> Tensor:
        dropped = F.dropout(x, 0.5)
        return m.net(x * m.scale if torch.equal(dropped, x) else scaled(dropped, m.scale))

    model = make_scaled_model()
    model.use = use
    report = run_check(model)
    assert {p.name: p.verdict for p in report.parameters}["scale"] == "WRONG"
    assert "With dropout on, the rows of scale do NOT add up" in report.notes[0]


def test_refusal_with_dropout() -> None:
    model = Around(lambda m, x: m.net(F.rrelu(x * m.scale, training=True) if m.drop else x), nn.Dropout())
    model.scale, model.drop = nn.Parameter(torch.ones(6)), 0.5
    assert run_check(model).refusal is None
    mixing = Around(lambda m, x: m.net(F.dropout(x - x.mean(0), 0.5)))
    report = run_check(mixing)
    assert isinstance(report.refusal, SamplesMixed) and "dropout" not in " ".join(report.notes)


# ---- preserved state ----


def capture_state(model: nn.Module) -> dict[str, Any]:
    state = read_state(model)
    grads = {name: None if g is None else (id(g), g.tolist()) for name, g in state.pop("grads").items()}
    parameters = {name: (identity, value.tolist()) for name, (identity, value) in state.pop("parameters").items()}
    rng = (torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())])
    buffers = {name: (id(b), b.tolist()) for name, b in model.named_buffers()}
    others = (torch.get_default_dtype(), torch.is_grad_enabled(), X.tolist(), Y.tolist())
    return {**state, "grads": grads, "parameters": parameters, "rng": rng, "buffers": buffers, "others": others}


class StateChanging(nn.Module):
    """Module that changes its statistics, embedding table, input, buffers and random states in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.table = nn.Embedding(3, 6, max_norm=0.1)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(6, 3)
        self.register_buffer("calls", torch.ones(1))
        self.register_buffer("cached", None)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.calls = self.calls * 1.5
        if self.cached is None:
            self.cached = torch.full((len(x), 1), 3.0)
        random.random()
        np.random.rand()
        h = self.norm(self.first(x).unsqueeze(1)).squeeze(1) + self.table(torch.zeros(len(x), dtype=torch.long))
        return self.last(self.drop(h) * self.calls * self.cached)


def raise_in_the_recording(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if torch.overrides._get_current_function_mode_stack():
        raise ZeroDivisionError
    return loss


@pytest.mark.parametrize("case", ["right", "fails", "fails in the recording", "refused", "calls another"])
def test_model_and_global_state_are_preserved(case: str) -> None:
    model = StateChanging().train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.last.weight.grad = None
    batch, loss_fn = (X, Y), nn.CrossEntropyLoss()
    if case == "fails":
        batch = (X[:, :5], Y)
    elif case == "fails in the recording":
        loss_fn = raise_in_the_recording
    elif case == "refused":
        model.norm = nn.BatchNorm1d(1)
    elif case == "calls another":
        loss_fn = lambda _, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    before = capture_state(model)
    if case in ("fails", "calls another"):
        with pytest.raises(RuntimeError):
            run_check(model, batch, loss_fn)
    else:
        report = run_check(model, batch, loss_fn)
        assert report.ok == (case == "right"), str(report)
    after = capture_state(model)
    if case == "calls another":  # the user's function ran the model itself; check restores only what it can
        for state in (before, after):
            state["buffers"] = state["buffers"]["norm.running_mean"]
            state["keys"] = state["parameters"] = None
    for key, value in before.items():
        assert after[key] == value, key


def test_gradients_of_other_modules_are_preserved() -> None:
    teacher, criterion = make_mlp(), nn.CrossEntropyLoss()
    teacher[0].weight.grad = torch.ones(8, 6)
    x = X.clone().requires_grad_()

    def compute_distillation_loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return criterion(model(batch[0]) + teacher(batch[0].to(torch.float32)).to(batch[0].dtype), batch[1])

    run_check(make_mlp(), (x, Y), compute_distillation_loss)
    assert torch.equal(teacher[0].weight.grad, torch.ones(8, 6)) and teacher[0].bias.grad is None and x.grad is None


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_under_no_grad(around: Any) -> None:
    with around():
        assert run_check(make_mlp()).ok
        assert not torch.is_grad_enabled()


def test_models_that_are_hard_to_copy_or_to_run() -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(6, 3))
    assert run_check(nn.Sequential(old)).ok
    part = nn.Linear(6, 6)
    assert run_check(
        Around(lambda m, x: m.net(checkpoint(m.parts[0], x.requires_grad_(), use_reentrant=True)), part)
    ).ok
    model = make_mlp()
    model.lock = (n for n in range(3))  # generators cannot be copied
    with pytest.raises(PerSampleError, match="Sequential cannot be copied"):
        run_check(model)


# ---- wrong arguments ----

WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"model": len}, "check takes an nn.Module, got a builtin_function_or_method"),
    "no samples asked": ({"samples": 0}, "samples must be a positive integer, got 0"),
    "reduction": ({"loss_reduction": "none"}, "loss_reduction must be 'mean', 'sum' or None, got 'none'"),
    "lazy": ({"model": nn.LazyLinear(3)}, "The lazy parameter 'weight' has no shape yet"),
    "frozen": ({"model": make_mlp().requires_grad_(False)}, "no parameter that requires grad"),
    "no loss": ({"loss_fn": 3}, "loss_fn must be a function or a loss module, got an int"),
    "no pair": ({"batch": X}, r"CrossEntropyLoss takes outputs and targets, .* got a tensor of shape \(16, 6\)"),
    "three": ({"batch": (X, X, Y)}, r"\(inputs, targets\), got a tuple of 3"),
    "nothing": (
        {"batch": {"text": "abc"}, "loss_fn": compute_dict_loss},
        "No tensor with a batch dimension was found in the batch",
    ),
    "empty": ({"batch": (X[:0], Y[:0])}, "The batch has no samples"),
    "vector": ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, r"loss_fn returned a tensor of shape \(4,\)"),
    "number": (
        {"loss_fn": lambda model, batch: 3.0},
        "loss_fn returned a float. It must return a tensor with one element",
    ),
    "constant": ({"loss_fn": lambda model, b: b[0].sum()}, "The loss depends on no parameter that requires grad"),
    "detached": (
        {"loss_fn": lambda m, b: m(b[0]).detach().sum() + m.t},
        "no parameter of the model that was passed to loss_fn",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments(name: str) -> None:
    given, message = WRONG_ARGUMENTS[name]
    model = make_mlp()
    model.t = [torch.ones((), requires_grad=True)][0] if name == "detached" else None
    call = {"model": model, "batch": (X, Y), "loss_fn": nn.CrossEntropyLoss(), **copy.copy(given)}
    with pytest.raises(PerSampleError, match=message):
        check(**call)


def test_error_of_the_plain_model_is_raised() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as caught:
        run_check(make_mlp(), (X[:, :5], Y))
    assert not isinstance(caught.value, PerSampleError)


# ---- the report ----


def test_report_as_text() -> None:
    text = str(run_check(Tied(), IDS, compute_next_token_loss))
    lines = text.splitlines()
    assert lines[0] == "RIGHT: the gradients of 4 of 16 samples equal the gradients of a loop with plain autograd."
    assert lines[2].split() == ["parameter", "shape", "rule", "term", "norms", "kept", "dense()", "error", "verdict"]
    assert lines[4].startswith("  embedding.weight  7x6    embedding + linear  Rows + Outer  rows + dense")
    assert lines[4].endswith("right") and lines[6].endswith("unused") and lines[8].startswith("  all ")
    assert "Computed in float64; allowed error: 1e-09 of the scale of a row." in text
    assert all(len(line) <= 120 for line in lines)


def test_report_as_data() -> None:
    report = run_check(make_mlp(nn.BatchNorm1d(8)))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is False and data["outcome"] == "refused" and data["coupled"] is None
    assert data["refusal"] == {"type": "SamplesMixed", "message": str(report.refusal)}
    assert data["parameters"][0]["shape"] == [8, 6] and data["parameters"][0]["verdict"] == "refused"
    data = json.loads(json.dumps(run_check(make_mlp()).to_dict(), allow_nan=False))
    assert data["ok"] is True and data["refusal"] is None and data["notes"] == []
    assert data["parameters"][0]["rules"] == ["linear"] and data["parameters"][0]["error"] < 1e-12
    no_number = dataclasses.replace(report.parameters[0], error=float("inf"))
    assert dataclasses.replace(report, parameters=[no_number]).to_dict()["parameters"][0]["error"] is None
