"""record(): every answer equals the loop for all test cases; options, errors and refusals."""

from __future__ import annotations

import collections
import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from persample import PerSampleError, SamplesMixed, call_for_per_sample_grads, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, stack_gradients
from tests.support.case import Case
from tests.support.cases import CASES, REAL_CASES, B, Calls, D, T, param
from tests.support.modules import flatten_rows, read_state


def record_case(case: Case) -> tuple[Any, dict[str, Tensor], nn.Module]:
    module, args, kwargs = case.build()
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, case.find_batch_size(args))
    with record(module, **case.record_options) as grads:
        compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    unused = [name for name in grads.names if name not in expected]
    for name in unused:
        expected[name] = torch.zeros(grads.batch_size, *dict(module.named_parameters())[name].shape).double()
    return grads, {name: expected[name] for name in grads.names}, module


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_and_norms(case: Case) -> None:
    grads, expected, module = record_case(case)
    assert_rows_close(grads.dense(), expected)
    torch.testing.assert_close(grads.norms(), flatten_rows(expected).abs().square().sum(1).sqrt())
    for name, norms in grads.norms(per_parameter=True).items():
        torch.testing.assert_close(norms, flatten_rows({name: expected[name]}).abs().square().sum(1).sqrt())
    assert all(p.grad is None for p in module.parameters())
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())


@pytest.mark.parametrize("case", REAL_CASES, ids=str)
def test_sums(case: Case) -> None:
    grads, expected, _ = record_case(case)
    rows, batch = flatten_rows(expected), grads.batch_size
    weights = torch.linspace(-1, 2, batch).double()
    norms = rows.norm(dim=1)
    limit = float(norms.median())
    factors = (limit / norms).clamp(max=1)
    torch.testing.assert_close(grads.clip_factors(limit), factors)
    for answer, scale in (
        (grads.sum(), torch.ones(batch).double()),
        (grads.sum(weights), weights),
        (grads.clip(limit), factors),
    ):
        torch.testing.assert_close(
            flatten_rows({n: a[None] for n, a in answer.items()})[0], scale @ rows, rtol=1e-6, atol=1e-7
        )
    clipped = grads.clip(limit, per_parameter=True)
    for name, part in expected.items():
        part = part.reshape(batch, -1)
        own = (limit / part.norm(dim=1).clamp(min=1e-300)).clamp(max=1)
        torch.testing.assert_close(clipped[name].reshape(-1), own @ part, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", REAL_CASES[::2], ids=str)
def test_products_and_moments(case: Case) -> None:
    grads, expected, _ = record_case(case)
    rows, batch = flatten_rows(expected), grads.batch_size
    direction = {name: torch.randn(r.shape[1:]).double() for name, r in expected.items()}
    flat_direction = flatten_rows({n: d[None] for n, d in direction.items()})[0]
    torch.testing.assert_close(grads.dot(direction), rows @ flat_direction)
    torch.testing.assert_close(grads.gram(), rows @ rows.T)
    torch.testing.assert_close(grads.gram(memory=64), rows @ rows.T)
    second = flatten_rows({n: s[None] for n, s in grads.second_moment().items()})[0]
    torch.testing.assert_close(second, rows.square().mean(0))
    if batch > 1:
        variance = flatten_rows({n: v[None] for n, v in grads.variance().items()})[0]
        torch.testing.assert_close(variance, rows.var(0), rtol=1e-5, atol=1e-8 * float(rows.abs().max()) ** 2)
        m, s = rows.square().sum(1).mean(), rows.mean(0).square().sum()
        noise = (m - s) / (1 - 1 / batch) / ((batch * s - m) / (batch - 1))
        if noise.abs() < 1e6:  # otherwise the mean is smaller than its noise, and the estimate meaningless
            torch.testing.assert_close(grads.noise_scale(), noise)
    for method in ("tensor", "sparse"):
        assert grads.project(32, method=method).shape == (batch, 32)


@pytest.mark.parametrize("case", REAL_CASES[::3], ids=str)
def test_invariants(case: Case) -> None:
    grads, _, _ = record_case(case)
    norms, total = grads.norms(), grads.sum()
    for name, part in grads.clip(float("inf")).items():
        torch.testing.assert_close(part, total[name])
    torch.testing.assert_close(grads.gram().diagonal(), norms.square())
    torch.testing.assert_close(grads.dot(total).sum(), sum(part.square().sum() for part in total.values()))
    limit = float(norms.mean()) / 2
    size = sum(part.square().sum() for part in grads.clip(limit).values()).sqrt()
    assert size <= grads.batch_size * limit * (1 + 1e-6)


@pytest.mark.parametrize("case", REAL_CASES[::3], ids=str)
def test_one_sample_is_clipped_to_the_bound(case: Case) -> None:
    module, args, kwargs = case.build()
    own_args, own_kwargs = case.sample(0, args, kwargs)
    options = case.record_options
    options.pop("batch_size", None)
    with record(module, **options, batch_size=1) as grads:
        compute_test_loss(module(*own_args, **own_kwargs), case.out_dim).backward()
    limit = float(grads.norms()[0]) / 3
    size = sum(part.square().sum() for part in grads.clip(limit).values()).sqrt()
    torch.testing.assert_close(size, torch.tensor(limit).double(), rtol=1e-5, atol=0)


def make_small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return module, torch.randn(B, D).double(), torch.tensor([0, 2, 1])


def test_loss_that_is_a_mean() -> None:
    module, x, y = make_small()
    with record(module) as grads:
        F.cross_entropy(module(x), y).backward()
    for n in range(B):
        (expected,) = torch.autograd.grad(F.cross_entropy(module(x[n : n + 1]), y[n : n + 1]), module[0].weight)
        torch.testing.assert_close(grads.dense(["0.weight"])["0.weight"][n], expected)
    F.cross_entropy(module(x), y).backward()
    torch.testing.assert_close(grads.mean()["0.weight"], module[0].weight.grad)


def test_backward_after_the_block_and_keep_grad() -> None:
    module, x, y = make_small()
    with record(module, keep_grad=True) as grads:
        loss = F.cross_entropy(module(x), y)
    before = read_state(module)["hooks"]
    loss.backward()
    assert read_state(module)["hooks"] == before
    kept = module[0].weight.grad.clone()
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    torch.testing.assert_close(kept, module[0].weight.grad)
    torch.testing.assert_close(grads.mean()["0.weight"], kept)


def test_several_passes_accumulate() -> None:
    module, x, y = make_small()
    with record(module, loss_reduction="sum") as grads:
        F.cross_entropy(module(x), y, reduction="sum").backward()
        F.mse_loss(module(x + 1), x[:, :3], reduction="sum").backward()
    for n in range(B):
        own, target = x[n : n + 1], y[n : n + 1]
        loss = F.cross_entropy(module(own), target) + F.mse_loss(module(own + 1), own[:, :3], reduction="sum")
        (expected,) = torch.autograd.grad(loss, module[2].weight)
        torch.testing.assert_close(grads.dense()["2.weight"][n], expected)


def test_some_parameters() -> None:
    module, x, y = make_small()
    for chosen in (["2.weight"], lambda name, p: name.endswith("2.weight")):
        with record(module, parameters=chosen) as grads:
            F.cross_entropy(module(x), y).backward()
        assert grads.names == ["2.weight"]
        assert grads.norms().shape == (B,)
        assert all(p.grad is None for p in module.parameters())
    with pytest.raises(PerSampleError, match="'nothing'"), record(module, parameters=["nothing"]):
        pass


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    "make", [Pair, lambda x, y: collections.UserDict(x=x, y=y), lambda x, y: SimpleNamespace(x=x, y=y)]
)
def test_all_samples_in_one_object(make: Any) -> None:
    model = Calls(
        lambda m, b: m.a(b["x"] * b["y"] if isinstance(b, collections.UserDict) else b.x * b.y), a=nn.Linear(D, D)
    )
    x, y = torch.randn(2, B, D)
    with record(model) as grads:
        model(make(x, y)).sum().backward()
    torch.testing.assert_close(grads.dense()["a.weight"], (x * y)[:, None].expand(B, D, D))


def test_batch_dim_for_each_argument() -> None:
    module = Calls(lambda m, h, mask, state: m.a(h.transpose(0, 1) * mask + state[:, None]), a=nn.Linear(D, 2))
    h, mask, state = torch.randn(B, B, D), torch.rand(B, D), torch.randn(B, D)
    for batch_dim in ([1, None, 0], {0: 1, 1: None, 2: 0}):
        with record(module, batch_dim=batch_dim, loss_reduction="sum") as grads:
            module(h, mask, state).sin().sum().backward()
        for n in range(B):
            out = module(h[:, n : n + 1], mask, state[n : n + 1])
            (expected,) = torch.autograd.grad(out.sin().sum(), module.a.weight)
            torch.testing.assert_close(grads.dense()["a.weight"][n], expected)


def test_empty_batch() -> None:
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(9, 2))
    with record(module) as grads:
        F.cross_entropy(module(torch.randn(0, 2, 4)), torch.zeros(0, dtype=torch.long), reduction="sum").backward()
    assert grads.batch_size == 0
    assert grads.norms().shape == (0,)
    assert grads.gram().shape == (0, 0)
    for name, p in module.named_parameters():
        assert grads.dense()[name].shape == (0, *p.shape)
        assert torch.equal(grads.clip(1.0)[name], torch.zeros_like(p))
        assert p.grad is None


def test_reading_too_early_raises() -> None:
    module, x, _ = make_small()
    with record(module) as grads:
        with pytest.raises(PerSampleError, match="forward"):
            _ = grads.batch_size
        module(x)
        with pytest.raises(PerSampleError, match="backward"):
            grads.norms()
    assert "nothing recorded" in repr(grads)


@pytest.mark.parametrize("loss", [
    lambda z, y: F.cross_entropy(z @ z.t(), torch.arange(len(z))),
    lambda z, y: z.sum(1).logsumexp(0),
    lambda z, y: (z - z.mean(0)).square().sum(),
    lambda z, y: z.std(),
    lambda z, y: F.cross_entropy(z, y) ** 2,
    lambda z, y: (z * z.flip(0)).sum(),
])  # fmt: skip
def test_loss_that_mixes_samples_is_refused(loss: Any) -> None:
    module, x, y = make_small()
    with pytest.raises(SamplesMixed), record(module):
        loss(module(x), y).backward()
    with pytest.raises(SamplesMixed):
        with record(module):
            value = loss(module(x), y)
        value.backward()
    assert all(p.grad is None for p in module.parameters())


def test_two_batch_sizes_in_one_recording_are_refused() -> None:
    module, x, _ = make_small()
    with pytest.raises(PerSampleError, match="recording for each batch"), record(module):
        module(x)
        module(torch.randn(2, *x.shape[1:]))  # no rows of the first batch


def test_two_recordings_can_be_compared() -> None:
    module, x, y = make_small()
    rows = []
    both = []
    for part in (slice(0, 2), slice(2, 3)):
        with record(module) as grads:
            F.cross_entropy(module(x[part]), y[part]).backward()
        both.append(grads)
        rows.append(flatten_rows(grads.dense()))
    torch.testing.assert_close(both[0].gram(both[1]), rows[0] @ rows[1].T)
    projected = both[0].project(4096, seed=3) @ both[1].project(4096, seed=3).T
    torch.testing.assert_close(
        projected, rows[0] @ rows[1].T, rtol=0.2, atol=0.2 * float(rows[0].norm() * rows[1].norm())
    )


def test_repr_shows_terms_and_memory() -> None:
    module, x, y = make_small()
    with record(module) as grads:
        F.cross_entropy(module(x), y).backward()
    assert "batch_size=3" in repr(grads)
    assert "0.weight: (6, 4) Outer" in repr(grads)
    assert "B" in repr(grads)


def test_answers_for_half_precision_are_in_float32() -> None:
    module = nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.Linear(6, 3)).bfloat16()
    with record(module) as grads:
        module(torch.randn(B, T, D).bfloat16()).float().square().mean().backward()
    assert grads.norms().dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in grads.clip(1.0).values())
    assert grads.dense()["0.weight"].dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().nbytes() > 0:
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128)), torch.randn(32, 64)),
    "embedding": (Calls(lambda m, i: m.e(i).mean(1), e=nn.Embedding(5000, 16)), torch.randint(0, 5000, (32, 10))),
    "transformer": (nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True), torch.randn(32, 8, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("answer", ["norms", "clip", "sum", "dot"])
def test_answers_need_no_tensor_of_the_size_of_dense_gradients(name: str, answer: str) -> None:
    module, x = MODELS[name]
    with record(module, loss_reduction="sum") as grads:
        module(x).square().sum().backward()
    limit = len(x) * max(p.numel() for p in module.parameters())
    with Largest() as largest:
        if answer == "dot":
            grads.dot(dict(module.named_parameters()))
        else:
            getattr(grads, answer)(*[1.0] if answer == "clip" else [])
    assert 0 < largest.numbers < limit
    with Largest() as largest:
        grads.dense()
    assert largest.numbers >= limit


def test_both_front_ends_are_equal() -> None:
    module, x, y = make_small()
    with record(module) as grads:
        F.cross_entropy(module(x), y).backward()
    F.cross_entropy(call_for_per_sample_grads(module, loss_reduction="mean")(x), y).backward()
    assert_rows_close(grads.dense(), {name: p.grad_sample for name, p in module.named_parameters()})


def test_parameter_in_the_loss() -> None:
    module = Calls(lambda m, h: m.a(h), a=nn.Linear(D, 3), t=param())
    x, y = torch.randn(B, D), torch.tensor([0, 2, 1])
    with record(module) as grads:
        F.cross_entropy(module(x) * module.t.exp(), y).backward()
    for n in range(B):
        (expected,) = torch.autograd.grad(
            F.cross_entropy(module(x[n : n + 1]) * module.t.exp(), y[n : n + 1]), module.t
        )
        torch.testing.assert_close(grads.dense()["t"][n], expected)


def test_permutation_of_the_inner_samples_is_refused() -> None:
    module, x = nn.Linear(D, 3), torch.randn(4, D)
    swapped = torch.tensor([0, 2, 1, 3])
    mixtures = [
        lambda z: z * z[swapped],
        lambda z: z * z.gather(0, swapped[:, None].expand_as(z)),
        lambda z: F.mse_loss(z, z[swapped]),
        lambda z: F.scaled_dot_product_attention(
            z, z, z, attn_mask=torch.eye(4).index_fill(0, torch.tensor([1]), 1.0) > 0
        ),
    ]
    for mix in mixtures:
        with pytest.raises(SamplesMixed), record(module):
            mix(module(x)).sum().backward()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_answers_may_be_changed(reduction: str) -> None:
    module = Calls(lambda m, h: m.a(h) * m.g, a=nn.Linear(D, 3), g=param(3), unused=param(2))
    with record(module, loss_reduction=reduction) as grads:
        getattr(module(torch.randn(B, D)).square(), reduction)().backward()
    before = grads.norms()
    for rows in grads.dense().values():
        assert not rows.requires_grad
        rows.add_(1)
    for part in grads.sum().values():
        part.zero_()
    torch.testing.assert_close(grads.norms(), before)
    assert not grads.dot(dict(module.named_parameters())).requires_grad


def test_uses_that_were_not_recorded_are_refused() -> None:
    module, x, y = make_small()
    with pytest.raises(PerSampleError, match="not recorded"), record(module):
        F.cross_entropy(module(x), y).backward()
        module[2](torch.ones(B, 6).double()).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    with record(module) as grads:
        module.forward(x).sum().backward()
    assert grads.norms().shape == (B,)
    assert not any(p._backward_hooks for p in module.parameters())


def test_nested_recordings_are_refused() -> None:
    module, _, _ = make_small()
    with pytest.raises(PerSampleError, match="nested"), record(module), record(nn.Linear(2, 2)):
        pass


def test_wrong_arguments() -> None:
    module, x, y = make_small()
    with record(module) as grads:
        F.cross_entropy(module(x), y).backward()
    for ask, message in (
        (lambda: grads.dot({"0.bias": torch.ones(1)}), r"'0\.bias'"),
        (lambda: grads.dot({"nothing": torch.ones(1)}), "nothing"),
        (lambda: grads.sum(torch.ones(2)), "3 samples"),
        (lambda: grads.clip(-1.0), "positive"),
        (lambda: grads.project(8, method="foo"), "'foo'"),
        (lambda: grads.dense("nothing"), "'nothing'"),
        (lambda: grads.gram(record_other(nn.Linear(D, 3))), "recordings of the same parameters"),
    ):
        with pytest.raises(PerSampleError, match=message):
            ask()
    assert list(grads.dense("0.weight")) == ["0.weight"]
    with pytest.raises(RuntimeError, match="'typo'"), record(module, batch_dim={"typo": 1}):
        module(x)


def record_other(module: nn.Module) -> Any:
    with record(module) as grads:
        module(torch.randn(B, D)).sum().backward()
    return grads


def test_noise_scale_needs_two_samples() -> None:
    with record(module := nn.Linear(D, 3)) as grads:
        module(torch.randn(1, D)).sum().backward()
    assert all(part.isnan().all() for part in grads.variance().values())
    with pytest.raises(PerSampleError, match="two samples"):
        grads.noise_scale()


def test_variance_of_similar_rows() -> None:
    module, x = nn.Linear(D, 2), 1000 + 0.1 * torch.randn(64, D)
    with record(module, loss_reduction="sum") as grads:
        module(x).sum().backward()
    torch.testing.assert_close(grads.variance()["weight"], x.double().var(0).float().expand(2, D), rtol=1e-3, atol=0)


def test_large_projections_preserve_norms() -> None:
    module, ids = nn.Embedding(50, 4), torch.randint(0, 50, (B, T))
    with record(module, loss_reduction="sum") as grads:
        module(ids).sin().sum().backward()
    size = 2**18
    torch.testing.assert_close(grads.project(size).norm(dim=1), grads.norms(), rtol=0.02, atol=0)


def test_mean_over_different_numbers_of_targets_is_refused() -> None:
    module, x = nn.Linear(D, 4), torch.randn(B, T, D)
    labels = torch.randint(0, 4, (B, T))
    for ignored, fair in (([], True), ([(0, 1)], False), ([(0, 1), (1, 4), (2, 2)], True), ([(0, 1), (0, 2)], False)):
        own = labels.clone()
        for at in ignored:
            own[at] = -100
        with record(module, divisor="refuse") as grads:
            loss = F.cross_entropy(module(x).flatten(0, 1), own.flatten())
            if not fair:
                with pytest.raises(SamplesMixed, match="divisor depends on the batch"):
                    loss.backward()
                continue
            loss.backward()
        for n in range(B):
            (expected,) = torch.autograd.grad(F.cross_entropy(module(x[n]), own[n]), module.weight)
            torch.testing.assert_close(grads.dense()["weight"][n], expected)
    with record(module, divisor="refuse"), pytest.raises(SamplesMixed, match="mean"):
        module(x)[x[..., 0] > 0].square().mean().backward()


def test_output_as_the_input_of_the_next_call() -> None:
    module, x = nn.Linear(D, D), torch.randn(B, D)
    with record(module, loss_reduction="sum") as grads:
        module(module(x).flip(0)).square().sum().backward()
    for n in range(B):
        (expected,) = torch.autograd.grad(module(module(x[n])).square().sum(), module.weight)
        torch.testing.assert_close(grads.dense()["weight"][n], expected)
    with record(module), pytest.raises(SamplesMixed):
        (module(x) * module(x.flip(0))).sum().backward()


def test_autograd_grad_of_parameters_is_refused() -> None:
    module = nn.Linear(D, D)
    with record(module), pytest.raises(PerSampleError, match=r"Call backward\(\)"):
        torch.autograd.grad(module(torch.randn(B, D)).sum(), module.weight)


def test_loss_as_a_loop_over_samples() -> None:
    module, x = nn.Linear(D, 4), torch.randn(B, D)
    with record(module, loss_reduction="sum") as one:
        sum(F.cross_entropy(row, torch.tensor(1)) for row in module(x)).backward()
    with record(module, loss_reduction="sum") as other:
        F.cross_entropy(module(x), torch.ones(B).long(), reduction="sum").backward()
    torch.testing.assert_close(one.dense(), other.dense())


def test_statistics_are_restored_for_cached_calls() -> None:
    def forward(m: Any, h: Tensor, mixes: bool) -> Tensor:
        h = m.norm(m.first(h))
        return m.last(h - h.mean(0) if mixes else h)

    norm = nn.InstanceNorm1d(D, affine=True, track_running_stats=True)
    model = Calls(forward, first=nn.Conv1d(D, D, 1), norm=norm, last=nn.Conv1d(D, 2, 1))
    x = torch.randn(B, D, T)
    for _ in range(3):
        with record(model):
            model(x, False).square().mean().backward()
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(SamplesMixed), record(model):
        model(x, True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class TwoTowers(nn.Module):
    """Returns the embeddings of pairs, and their similarities, which mix the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(D, 2), nn.Linear(D, 2)
        self.scale, self.head = nn.Parameter(torch.tensor(0.3)), nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.one(x).tanh(), self.other(y).tanh()
        similarities = a @ b.T * self.scale.exp()
        return a, b, self.head((similarities.softmax(1) @ b).relu_())


def test_weights_on_mixed_samples_that_the_loss_does_not_use() -> None:
    model, x, y = TwoTowers().double(), torch.randn(B, D).double(), torch.randn(B, D).double()

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        a, b, mixed = model(x, y)
        return (a - b).square().sum() + a.sum() * float(mixed.detach().mean() > -100)

    for _ in range(2):
        with record(model) as grads:
            compute_loss(x, y).backward()
        losses = (compute_loss(x[n : n + 1], y[n : n + 1]) for n in range(B))
        expected, rows = stack_gradients(losses, dict(model.named_parameters())), grads.dense()
        assert not any(rows.pop(name).any() for name in rows.keys() - expected.keys())
        assert_rows_close(rows, expected)
        with pytest.raises(SamplesMixed, match="matmul combines each sample with every other"), record(model):
            model(x, y)[2].sum().backward()
        with pytest.raises(SamplesMixed, match="matmul combines each sample with every other"), record(model):
            model.head(model.one(x) @ model.other(y).T[:, :2])
