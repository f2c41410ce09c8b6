"""Whole steps that persample.compile compiles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import PerSampleError
from persample.testing.oracle import assert_rows_close, compute_test_loss
from tests.support.case import Case
from tests.support.cases import CASES, Calls
from tests.support.compiled import (
    COMPILER,
    GPT,
    MODELS,
    TOKENS,
    B,
    build,
    check_step,
    clip,
    compute_loss,
    compute_rows,
    compute_token_loss,
    make_batch,
    make_mlp,
    make_traced_step,
)
from tests.support.modules import flatten_rows


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_loop(name: str) -> None:
    model, args, loss_fn = build(name)
    check_step(model, loss_fn, *args)


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
