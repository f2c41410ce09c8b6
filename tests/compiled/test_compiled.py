"""Compiled models in a recording, and whole steps compiled by `persample.compile`."""

from __future__ import annotations

import copy
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError, SamplesMixed
from persample.compiled.forms import Arguments
from persample.testing.oracle import assert_rows_close, compute_test_loss, perturb, stack_gradients
from tests.support.case import Case
from tests.support.cases import CASES
from tests.support.modules import flatten_rows

B = 4
Rows = dict[str, Tensor]


def compute_rows(model: nn.Module, loss_fn: Callable[..., Tensor], *args: Tensor) -> Rows:
    """Per-sample gradients by a loop over the samples with plain autograd."""
    losses = (loss_fn(model, *(arg[n : n + 1] for arg in args)) for n in range(len(args[0])))
    return stack_gradients(losses, dict(model.named_parameters()))


def clip(rows: Rows, limit: float) -> Rows:
    norms = flatten_rows(rows).norm(dim=1)
    factors = (limit / norms).clamp(max=1)
    return {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


def make_mlp() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    perturb(model)
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5).double(), torch.randint(3, (B,))


def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def compute_token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# ---- compiled models in a recording ----


class CompiledPart(nn.Module):
    """A model with a compiled function in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()
        self.compiled = torch.compile(lambda h: self.a(h).tanh() * 2, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.compiled(x))


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compile_first_layer(model: nn.Module) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[index, operator]
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "torch.compile(model)": lambda: torch.compile(make_mlp(), backend="eager"),  # type: ignore[return-value]
    "with fullgraph": lambda: torch.compile(make_mlp(), backend="eager", fullgraph=True),  # type: ignore[return-value]
    "model.compile()": lambda: compile_in_place(make_mlp()),
    "a submodule": lambda: compile_first_layer(make_mlp()),
    "a function": CompiledPart,
}


@pytest.mark.parametrize("warm", [True, False], ids=["compiled before", "not yet"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_are_recorded(way: str, warm: bool) -> None:
    model, (x, y) = WAYS[way](), make_batch()
    if warm:
        model(x)
    with persample.record(model) as grads:
        compute_loss(model, x, y).backward()
    with torch.compiler.set_stance("force_eager"):
        expected = compute_rows(model, compute_loss, x, y)
    assert_rows_close(grads.dense(), expected)
    # Afterwards the model runs compiled as before. If it was compiled, it is not compiled again.
    with torch.compiler.set_stance("fail_on_recompile" if warm else "default"):
        model(x)


def test_compiled_models_with_checkpoints_and_backward_after_the_block() -> None:
    inner = torch.compile(make_mlp(), backend="eager")
    model = Calls(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)
    x, y = make_batch()
    with persample.record(model) as grads:
        loss = compute_loss(model, x, y)
    loss.backward()
    with torch.compiler.set_stance("force_eager"):
        assert_rows_close(grads.dense(), compute_rows(model, compute_loss, x, y))


class Calls(nn.Module):
    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


def test_the_stance_of_the_user_is_restored() -> None:
    from torch._dynamo import eval_frame

    model, (x, y) = make_mlp(), make_batch()
    with torch.compiler.set_stance("eager_on_recompile"):
        with persample.record(model):
            assert eval_frame._stance.stance == "force_eager"
            compute_loss(model, x, y).backward()
        assert eval_frame._stance.stance == "eager_on_recompile"
        with pytest.raises(ValueError), persample.record(model):
            raise ValueError
        assert eval_frame._stance.stance == "eager_on_recompile"
    assert eval_frame._stance.stance == "default"


def test_a_recording_inside_a_compiled_function() -> None:
    model, (x, y) = make_mlp(), make_batch()
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x * 1.5
        with persample.record(model) as grads:
            compute_loss(model, x, y).backward()
        return grads.norms() * 2

    expected = step(x, y)
    torch.testing.assert_close(torch.compile(step, backend=counting)(x, y), expected)
    assert not any(F.cross_entropy in graph or torch._C._nn.linear in graph for graph in graphs)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"persample\.compile compiles whole steps"):
        torch.compile(step, backend="eager", fullgraph=True)(x, y)


def test_compiled_autograd_is_disabled_or_refused() -> None:
    from torch._dynamo import compiled_autograd

    model, (x, y) = make_mlp(), make_batch()
    compiled = torch.compile(backend="eager")
    expected = compute_rows(model, compute_loss, x, y)
    with compiled_autograd._enable(compiled), persample.record(model) as grads:
        compute_loss(model, x, y).backward()
    assert_rows_close(grads.dense(), expected)
    with persample.record(model) as grads, compiled_autograd._enable(compiled):
        compute_loss(model, x, y).backward()
    assert_rows_close(grads.dense(), expected)
    with persample.record(model) as grads:
        loss = compute_loss(model, x, y)
    with compiled_autograd._enable(compiled), pytest.raises(PerSampleError, match="Compiled autograd"):
        loss.backward()


def test_import_persample_does_not_import_the_compiler() -> None:
    code = """if True:
        import sys, torch, persample
        assert "torch._dynamo" not in sys.modules
        class Lazy(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a = torch.nn.Linear(3, 2)
            def forward(self, x):  # compiled for the first time inside the block
                return torch.compile(self.a, backend="eager")(x).tanh()
        lazy, x = Lazy(), torch.randn(4, 3)
        for _ in range(2):
            with persample.record(lazy, loss_reduction="sum") as grads:
                lazy(x).sum().backward()
            rows = (1 - lazy.a(x).tanh() ** 2).unsqueeze(2) * x.unsqueeze(1)
            assert torch.allclose(grads.dense()["a.weight"], rows, atol=1e-6)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=dict(os.environ))


# ---- whole steps ----


def make_traced_step(model: nn.Module, loss_fn: Any, *args: Tensor, **options: Any) -> Any:
    """A compiled step that was traced with zeros."""
    step = persample.compile(
        model, loss_fn, lambda grads: (grads.dense(), grads.norms(), grads.clip(1.0)), **{"backend": "eager", **options}
    )
    step(*(torch.zeros_like(arg) for arg in args))
    return step


def check_step(model: nn.Module, loss_fn: Any, *args: Tensor, **options: Any) -> Any:
    """Compare a compiled step with the loop, for values that it was not traced with; nothing else may change."""
    step = make_traced_step(model, loss_fn, *args, **options)
    plain = (lambda m, x, y: loss_fn(m(x), y)) if isinstance(loss_fn, nn.Module) else loss_fn
    before = copy.deepcopy(model.state_dict())
    rng_state = torch.get_rng_state()
    for _ in range(2):
        expected = compute_rows(model, plain, *args)
        loss, (rows, norms, sums) = step(*args)
        assert_rows_close(rows, expected)
        torch.testing.assert_close(norms, flatten_rows(expected).norm(dim=1))
        for name, want in clip(expected, 1.0).items():
            torch.testing.assert_close(sums[name], want)
        torch.testing.assert_close(loss, plain(model, *args).detach())
        assert not loss.requires_grad
        args = tuple(arg.roll(1, 0) if not arg.is_floating_point() else arg * 0.9 for arg in args)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and isinstance(p, nn.Parameter) and type(p.data) is Tensor for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert "graphs: 1" in repr(step)
    return step


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 2 * width
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mix(x)


class GPT(nn.Module):
    """A language model with position embeddings and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.block, self.norm = Block(8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.block(x)))


class LastStep(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Vision(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(2, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.block, self.head = Block(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        return self.head(self.block(torch.cat([self.token.expand(len(x), -1, -1), patches], 1))[:, 0])


def make_cnn() -> nn.Module:
    first = [nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def make_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 11))


def make_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3))


IMAGES = lambda: (torch.randn(B, 2, 8, 8).double(), torch.randint(3, (B,)))  # noqa: E731
SERIES = lambda: (torch.randn(B, 6, 5).double(), torch.randint(3, (B,)))  # noqa: E731
TOKENS = lambda: (torch.randint(11, (B, 6)), torch.randint(11, (B, 6)))  # noqa: E731

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "MLP": (make_mlp, make_batch, nn.CrossEntropyLoss()),
    "CNN with GroupNorm": (make_cnn, IMAGES, compute_loss),
    "GPT, tied": (GPT, TOKENS, compute_token_loss),
    "LSTM": (lambda: LastStep(nn.LSTM), SERIES, compute_loss),
    "GRU": (lambda: LastStep(nn.GRU), SERIES, compute_loss),
    "class token": (Vision, IMAGES, compute_loss),
    "TransformerEncoder": (make_transformer, TOKENS, compute_token_loss),
    "weight norm": (make_weight_norm, make_batch, compute_loss),
    "compiled already": (lambda: torch.compile(make_mlp(), backend="eager"), make_batch, compute_loss),
}


def build(name: str) -> tuple[nn.Module, Any, Any]:
    make, data, loss_fn = MODELS[name]
    model = make().double()
    perturb(model)
    return model, data(), loss_fn


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_loop(name: str) -> None:
    model, args, loss_fn = build(name)
    check_step(model, loss_fn, *args)


COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)


@COMPILER
@pytest.mark.parametrize("name", ["MLP"])
def test_steps_with_inductor(name: str) -> None:
    model, args, loss_fn = build(name)
    check_step(model, loss_fn, *args, backend="inductor")


@pytest.mark.parametrize("name", ["CNN with GroupNorm", "GPT, tied"])
def test_steps_with_aot_autograd(name: str) -> None:
    model, args, loss_fn = build(name)
    check_step(model, loss_fn, *args, backend="aot_eager")


# Some cases of each kind: all cases would take minutes.
UNUSUAL = {
    "linear, time first", "linear on the doubled batch", "tied weights", "checkpoint", "embedding, repeated ids",
    "language model, tied head, T == B", "conv2d, depthwise", "bag, mean, padding", "class token", "gru cell",
    "written through a view", "a constant written over a sample", "low-rank update", "bilinear",
    "transposed convolution 2d", "rows by index", "position ids in a buffer",
    "spectral norm", "windows by strides", "MultiheadAttention, time first, T == B", "complex linear",
}  # fmt: skip


def test_the_unusual_cases_exist() -> None:
    assert {case.name for case in CASES} >= UNUSUAL


@pytest.mark.parametrize("case", [case for case in CASES if case.name in UNUSUAL], ids=str)
def test_unusual_cases(case: Case) -> None:
    module, args, kwargs = case.build()
    batch_dim = 0 if case.options.get("batch_first", True) else 1
    size = case.options.get("batch_size") or args[0].shape[batch_dim]
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, size)
    step = persample.compile(
        module,
        lambda m, *a, **k: compute_test_loss(m(*a, **k), case.out_dim),
        lambda grads: grads.dense(),
        backend="eager",
        loss_reduction="sum",
        batch_size=case.options.get("batch_size"),
        batch_dim=batch_dim,
    )
    rows = step(*args, **kwargs)[1]
    assert_rows_close({name: rows[name] for name in expected}, expected)


def test_all_answers() -> None:
    model, args, _ = build("CNN with GroupNorm")
    direction = dict(model.named_parameters())
    assert direction

    def answers(grads: Any) -> Any:
        return grads.sum(), grads.mean(), grads.gram(), grads.variance(), grads.second_moment(), grads.noise_scale()

    with persample.record(model) as grads:
        compute_loss(model, *args).backward()
    step = persample.compile(model, compute_loss, answers, backend="eager")
    step(torch.zeros_like(args[0]), args[1])
    torch.testing.assert_close(step(*args)[1], answers(grads))


def test_large_dense_rows_do_not_share_memory() -> None:
    model, x = nn.Linear(300, 300), torch.randn(B, 300)
    step = persample.compile(model, lambda m, x: m(x).sin().sum(), lambda grads: grads.dense(), backend="eager",
                             loss_reduction="sum")  # fmt: skip
    first, second = step(x)[1]["weight"], step(x * 2)[1]["weight"]
    torch.testing.assert_close(first, model(x).cos().detach().unsqueeze(2) * x.unsqueeze(1))
    assert first.data_ptr() != second.data_ptr()


def test_training_reads_the_current_parameters() -> None:
    """Each step reads the current parameters, also if others were loaded or assigned."""
    model, (x, y), loss_fn = build("MLP")
    other = copy.deepcopy(model)
    step = persample.compile(model, loss_fn, lambda grads: grads.clip(0.5), backend="eager")
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (model, other)]
    for i in range(4):
        for name, p in other.named_parameters():
            p.grad = clip(compute_rows(other, compute_loss, x, y), 0.5)[name]
        sums = step(x, y)[1]
        for name, p in model.named_parameters():
            p.grad = sums[name]
        for optimizer in optimizers:
            optimizer.step()
        if i == 2:
            saved = {name: value * 1.5 for name, value in other.state_dict().items()}
            other.load_state_dict(saved)
            model.load_state_dict(copy.deepcopy(saved), assign=True)
            optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, other)]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert "graphs: 1" in repr(step)


def test_other_shapes_and_settings_need_another_graph() -> None:
    model, (x, y), _ = build("MLP")
    model = nn.Sequential(model, nn.Dropout(0.5))
    factor = 1.0

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, power: int = 1) -> Tensor:
        return factor * F.cross_entropy(model(x) ** power, y)

    step = persample.compile(model, loss_fn, lambda grads: grads.dense(), backend="eager")
    step(x, y)
    model.eval()
    for args in [(x, y), (x[:2], y[:2]), (x, y, 2), (x.mT.contiguous().mT, y)]:
        rows = step(*args)[1]
        assert_rows_close(rows, compute_rows(model, lambda m, a, b, args=args: loss_fn(m, a, b, *args[2:]), *args[:2]))
    assert "graphs: 5" in repr(step)
    factor = 3.0  # loss_fn encloses it
    assert_rows_close(step(x, y)[1], compute_rows(model, loss_fn, x, y))
    model[1].p = 0.25  # an attribute of a module
    model[0][0].weight.requires_grad_(False)
    assert "0.0.weight" not in step(x, y)[1]


def test_one_tensor_as_two_arguments() -> None:
    model = Calls(lambda m, a, b: m.a(a) + m.b(b), a=nn.Linear(5, 3).double(), b=nn.Linear(5, 3).double())
    step = persample.compile(model, lambda m, a, b: m(a, b).sin().sum(), lambda g: g.dense(), backend="eager",
                             loss_reduction="sum")  # fmt: skip
    x, other = torch.randn(2, B, 5).double()
    for args in [(x, x), (x, other)]:
        assert_rows_close(step(*args)[1], compute_rows(model, lambda m, a, b: m(a, b).sin().sum(), *args))
    assert "graphs: 1" in repr(step)


def test_graphs_for_many_shapes_are_dropped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.compiled.step._MAX_GRAPHS", 2)
    model, (x, y), loss_fn = build("MLP")
    step = persample.compile(model, loss_fn, lambda grads: grads.norms(), backend="eager")
    step(x, y), step(x[:3], y[:3])
    with pytest.warns(UserWarning, match="the oldest graph is dropped"):
        step(x[:2], y[:2])
    assert "graphs: 2" in repr(step)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILER)])
def test_dropout_draws_new_numbers_in_each_step(backend: str) -> None:
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    x, y = make_batch()
    step = persample.compile(model, compute_loss, lambda grads: grads.dense(), backend=backend)
    masks = []
    for seed in (0, 1, 2, 0):
        torch.manual_seed(seed)
        rows = step(x, y)[1]
        dropped = rows["0.bias"] == 0
        # Forward and backward use the same mask: a dropped activation is in neither gradient.
        assert torch.equal((rows["2.weight"] == 0).all(1), dropped)
        assert 0.3 < dropped.double().mean() < 0.7
        masks.append(dropped)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert torch.equal(masks[0], masks[3])
    step(x, y)
    assert not torch.equal(step(x, y)[1]["0.bias"] == 0, step(x, y)[1]["0.bias"] == 0)


def test_buffers_may_change_in_place() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)).double()
    plain, x = copy.deepcopy(model), torch.randn(B, 2, 9).double()
    step = persample.compile(model, lambda m, x: m(x).sin().sum(), lambda g: g.norms(), backend="aot_eager",
                             loss_reduction="sum")  # fmt: skip
    for _ in range(3):
        step(x)
        plain(x)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_autocast_is_part_of_the_graph() -> None:
    model, x, y = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(B, 5), torch.randint(3, (B,))
    step = persample.compile(model, compute_loss, lambda grads: grads.clip(1.0), backend="aot_eager")
    full = step(x, y)[1]
    with torch.autocast("cpu", torch.bfloat16):
        with persample.record(model) as grads:
            loss = compute_loss(model, x, y)
        half = step(x, y)[1]
    loss.backward()
    for name, want in grads.clip(1.0).items():
        torch.testing.assert_close(half[name], want)
        assert half[name].dtype == torch.float32 and not torch.equal(half[name], full[name])


def test_a_mean_with_ignored_targets_needs_equal_numbers_of_targets() -> None:
    model, x, y = GPT().double(), *TOKENS()
    step = persample.compile(model, compute_token_loss, lambda grads: grads.norms(), backend="eager")
    step(x, y)
    y[:, 2] = -100  # one for each sample
    expected = flatten_rows(compute_rows(model, compute_token_loss, x, y)).norm(dim=1)
    torch.testing.assert_close(step(x, y)[1], expected)
    y[1, 3] = -100
    with pytest.raises(PerSampleError, match="different numbers of targets"):
        step(x, y)


def test_indices_within_a_sample_may_be_data() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x).log_softmax(1)
        return -(logits[torch.arange(len(y)), y] + logits.gather(1, y[:, None]).squeeze(1)).mean()

    check_step(make_mlp(), loss_fn, *make_batch())


def test_loss_fn_may_return_more_than_the_loss() -> None:
    model, (x, y), _ = build("MLP")

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        logits = model(x)
        return F.cross_entropy(logits, y), {"right": (logits.argmax(1) == y).sum(), "of": len(y)}

    step = persample.compile(model, loss_fn, lambda grads: grads.norms(), parameters=["2.weight"], backend="eager")
    (_, also), norms = step(x, y=y)
    assert also["of"] == B and int(also["right"]) == int((model(x).argmax(1) == y).sum())
    rows = {"2.weight": compute_rows(model, compute_loss, x, y)["2.weight"]}
    torch.testing.assert_close(norms, rows["2.weight"].flatten(1).norm(dim=1))


# ---- refusals ----


def catch_error_of_reading(m: Any, x: Tensor) -> Tensor:
    try:
        scale = float(x.abs().max())
    except Exception:
        scale = 1.0
    return m.a(x) * scale


def count_calls(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.a(x) / m.calls


def keep_output(m: Any, x: Tensor) -> Tensor:
    m.last = m.a(x)
    return m.last.tanh()


def assign_buffer(m: Any, x: Tensor) -> Tensor:
    m.scale = m.scale * 0.9
    return m.a(x) * m.scale


def change_argument(m: Any, x: Tensor) -> Tensor:
    x += 1
    return m.a(x)


def set_seed(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(m.a(x))


OUTSIDE = torch.tensor([1.0, 2.0, 3.0]).double()

REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "item": (lambda m, x: m.a(x) * x.max().item(), "reads the values"),
    "if": (lambda m, x: m.a(x) if x.sum() > 0 else -m.a(x), "reads the values"),
    "a value, and the error is caught": (catch_error_of_reading, "reads the values"),
    "tolist": (lambda m, x: m.a(x) * x.tolist()[0][0], "cannot be compiled"),
    "numpy": (lambda m, x: m.a(x) * float(x.detach().numpy().max()), "cannot be compiled"),
    "a mask": (lambda m, x: m.a(x[x[:, 0] > 0]), "reads the values"),
    "a permutation": (lambda m, x: m.a(x[torch.randperm(len(x))]), "whose values are not known"),
    "a sort of the samples": (lambda m, x: m.a(x[x[:, 0].argsort()]), "samples of the batch are mixed"),
    "random numbers of Python": (lambda m, x: m.a(x) * random.random(), "random numbers with Python"),
    "a seed": (set_seed, "sets a seed"),
    "a global tensor": (lambda m, x: m.a(x) * OUTSIDE, "neither an argument of the step"),
    "a counter in an attribute": (count_calls, "changes 'calls' of Calls"),
    "an activation in an attribute": (keep_output, "changes 'last' of Calls"),
    "an assigned buffer": (assign_buffer, "changes '_buffers' of Calls"),
    "an argument changed in place": (change_argument, "changes one of its arguments"),
    "a checkpoint with dropout": (
        lambda m, x: checkpoint(lambda h: F.dropout(m.a(h)).tanh(), x, use_reentrant=False),
        "checkpoint that recomputes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_a_graph_cannot_repeat_are_refused(name: str) -> None:
    forward, message = REFUSED[name]
    model = Calls(forward, a=nn.Linear(5, 3).double())
    model.register_buffer("scale", torch.ones(()).double())
    x, y = make_batch()
    before = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    step = persample.compile(model, compute_loss, lambda grads: grads.clip(1.0), backend="eager")
    with pytest.raises(PerSampleError, match=message):
        step(x, y)
    # The attempt has changed nothing.
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == before
    assert all(type(p) is nn.Parameter for p in model.parameters()) and float(model.scale) == 1
    with persample.record(make_mlp()) as grads:
        pass
    assert grads.names


def test_motions_that_need_values_are_not_cached_by_a_trace() -> None:
    """A step that cannot be compiled can still be recorded."""
    model = Calls(lambda m, x: m.a(x[x[:, 0].argsort()][x[:, 0].argsort().argsort()]), a=nn.Linear(5, 3).double())
    x, y = make_batch()
    with pytest.raises(PerSampleError):
        persample.compile(model, compute_loss, lambda grads: grads.norms(), backend="eager")(x, y)
    with persample.record(model) as grads:
        compute_loss(model, x, y).backward()
    plain = Calls(lambda m, x: m.a(x), a=model.a)
    assert_rows_close(grads.dense(), compute_rows(plain, compute_loss, x, y))


def test_errors_about_mixed_samples_name_the_module() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    step = persample.compile(model, compute_loss, lambda grads: grads.clip(1.0), backend="eager")
    with pytest.raises(SamplesMixed, match=r"module '1' \(BatchNorm1d\)"):
        step(*make_batch())
    assert float(model[1].num_batches_tracked) == 0
    model.eval()
    check_step(model, compute_loss, *make_batch())


def test_errors_about_values_name_the_module_and_line() -> None:
    model = nn.Sequential(Calls(lambda m, x: m.a(x) * x.max().item(), a=nn.Linear(5, 3))).double()
    with pytest.raises(PerSampleError, match=r"module '0' \(Calls\), at test_compiled.py:\d+, reads the values"):
        persample.compile(model, compute_loss, lambda grads: grads.norms(), backend="eager")(*make_batch())


def test_errors_about_wrong_arguments() -> None:
    model, (x, y), loss_fn = build("MLP")
    with pytest.raises(PerSampleError, match=r"takes an nn\.Module"):
        persample.compile(compute_loss, loss_fn, lambda grads: 0)  # type: ignore[arg-type]
    with pytest.raises(PerSampleError, match="got an object"):
        persample.compile(model, compute_loss, lambda g: g.norms(), backend="eager")(x, object())
    with pytest.raises(PerSampleError, match="must return a tensor with one element, or a tuple"):
        persample.compile(model, lambda m, x: m(x), lambda g: g.norms(), backend="eager")(x)
    with pytest.raises(PerSampleError, match="returned a PerSampleGradients"):
        persample.compile(model, compute_loss, lambda grads: grads, backend="eager")(x, y)
    step = persample.compile(model, compute_loss, lambda g: g.norms(), backend="eager")
    with persample.record(model), pytest.raises(PerSampleError, match="outside of a recording"):
        step(x, y)


def test_a_tensor_and_none_are_different_arguments() -> None:
    x = torch.randn(2)
    assert Arguments((x, None), {}).key != Arguments((None, x), {}).key
    assert Arguments((x, None), {}).key == Arguments((x + 1, None), {}).key


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 8}
    config = transformers.GPT2Config(**settings, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config).double()
    tokens = torch.randint(0, 40, (B, 7))
    check_step(model, lambda m, ids: m(input_ids=ids, labels=ids).loss, tokens)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    config = transformers.BertConfig(**sizes, vocab_size=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config).double()
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    labels = torch.randint(2, (B,))

    def loss_fn(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    step = make_traced_step(model, loss_fn, tokens, mask, labels)
    assert_rows_close(step(tokens, mask, labels)[1][0], compute_rows(model, loss_fn, tokens, mask, labels))
