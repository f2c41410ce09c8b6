"""`coupled="contributions"`: rows that add up to the batch's gradient, for samples that influence each other.

There are two oracles. The sum of the rows is the gradient of a plain backward pass. The rows themselves come from a
forward pass in which each use of a weight has a copy of the weight for each sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import persample
from persample import PerSampleError, SamplesMixed, record
from persample.isolation import Isolation
from persample.private import PrivateOptimizer
from persample.recording.options import Options
from persample.testing.oracle import assert_rows_close, perturb

B, D = 4, 3
CONTRIBUTIONS: Any = "contributions"


class CopiesForEachSample(TorchFunctionMode):
    """Runs each use of a parameter with a copy of it for each sample; row j of an activation is sample `j % B`'s."""

    def __init__(self, model: nn.Module, batch: int = B) -> None:
        super().__init__()
        self.batch = batch
        self.copies = {id(p): p.detach().expand(batch, *p.shape).clone().requires_grad_() for p in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [self.copies.get(id(each)) for each in (*args, *kwargs.values())]
        if all(each is None for each in given) or not isinstance(args[0], Tensor) or id(args[0]) in self.copies:
            return func(*args, **kwargs)
        if func is F.batch_norm and kwargs.get("training", len(args) > 5 and args[5]):
            return self._normalise(*args, **kwargs)
        rows = [self._run_row(func, args, kwargs, j) for j in range(len(args[0]))]
        return torch.cat(rows)

    def _run_row(self, func: Any, args: Any, kwargs: Any, j: int) -> Tensor:
        def take(value: Any) -> Any:
            return self.copies[id(value)][j % self.batch] if id(value) in self.copies else value

        return func(args[0][j : j + 1], *map(take, args[1:]), **{key: take(value) for key, value in kwargs.items()})

    def _normalise(
        self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = True,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        normalised = F.batch_norm(x, mean, var, None, None, training, momentum, eps)
        shape = (len(x), -1, *[1] * (x.dim() - 2))
        owner = torch.arange(len(x)) % self.batch
        return normalised * self.copies[id(weight)][owner].view(shape) + self.copies[id(bias)][owner].view(shape)


def make(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers).double()
    perturb(model)
    return model


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


Case = tuple[nn.Module, Callable[[nn.Module], Tensor]]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def make_cnn() -> Case:
    model = make(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, D))
    x, y = draw(B, 2, 4, 4), torch.arange(B) % D
    return model, lambda m: F.cross_entropy(m(x), y)


def make_resnet() -> Case:
    model = make(nn.Conv2d(2, 2, 3), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, D))
    x, y = draw(B, 2, 6, 6), torch.arange(B) % D
    return model, lambda m: F.cross_entropy(m(x), y, reduction="sum")


def make_mlp() -> Case:
    model = make(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.ReLU(), nn.Linear(5, D))
    x, y = draw(B, D), torch.arange(B) % D
    return model, lambda m: F.cross_entropy(m(x), y)


def make_square() -> Case:
    """As many features as samples: the dimension of the samples is not the only one of its size."""
    model = make(nn.Linear(D, B), nn.BatchNorm1d(B), nn.Tanh(), nn.Linear(B, B))
    x = draw(B, D)
    return model, lambda m: (m(x) - m(x).mean(0)).square().sum(1).log().mean()


def make_encoder(out: int = 5) -> nn.Sequential:
    return make(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, out))


def make_infonce() -> Case:
    one, other = draw(2, B, D)
    return make_encoder(), lambda m: F.cross_entropy(
        F.normalize(m(one), dim=1) @ F.normalize(m(other), dim=1).T / 0.2, torch.arange(B)
    )


class Scaled(nn.Module):
    """A head after the samples have met: its activations are similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = make_encoder(), nn.Linear(B, B).double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        return self.head(torch.tanh(z @ z.T))


def make_head_on_similarities() -> Case:
    x, model = draw(B, D), Scaled()
    perturb(model)
    return model, lambda m: F.cross_entropy(m(x), torch.arange(B))


class Pairs(nn.Module):
    """Two views of each sample in one call of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_encoder()

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return F.normalize(self.encoder(torch.cat([one, other])), dim=1)


def make_simclr() -> Case:
    one, other = draw(2, B, D)

    def compute_loss(model: nn.Module) -> Tensor:
        z = model(one, other)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * B, dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(2 * B).roll(B))

    return Pairs(), compute_loss


def make_supcon() -> Case:
    x, y = draw(B, D), torch.arange(B) % 2

    def compute_loss(model: nn.Module) -> Tensor:
        z = F.normalize(model(x), dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(B, dtype=torch.bool), -1e9)
        positives = (y[:, None] == y[None]).double() - torch.eye(B, dtype=torch.float64)
        logs = logits - torch.logsumexp(logits, 1, keepdim=True)
        return -((positives * logs).sum(1) / positives.sum(1)).mean()

    return make_encoder(), compute_loss


def make_barlow_twins() -> Case:
    one, other = draw(2, B, D)

    def compute_loss(model: nn.Module) -> Tensor:
        a, b = model(one), model(other)
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        c = a.T @ b / B
        diagonal = torch.diagonal(c)
        return (diagonal - 1).square().sum() + 0.1 * (c - torch.diag(diagonal)).square().sum()

    return make_encoder(), compute_loss


def make_triplets() -> Case:
    x, y = draw(B, D), torch.arange(B) % 2

    def compute_loss(model: nn.Module) -> Tensor:
        z = model(x)
        distances, is_same = torch.cdist(z, z), y[:, None] == y[None]
        hardest = (distances * is_same).max(1)[0] - (distances + 1e3 * is_same).min(1)[0]
        return F.relu(hardest + 1).mean() + 0.1 * distances[~is_same].topk(3, largest=False)[0].sum()

    return make_encoder(), compute_loss


def make_masked() -> Case:
    """Samples that are divided by a number of all samples before a weight meets them."""
    model = make(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Linear(5, D))
    x, mask = draw(B, D), torch.tensor([1.0, 0.0, 1.0, 1.0]).double()

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        h = model[1](model[0](x)) * mask[:, None]
        losses = model[2](h / mask.sum()).square().sum(1)
        return (losses * mask).sum() / mask.sum() + F.cross_entropy(model(x), torch.tensor([0, -100, 1, 2]))

    return Whole(model, compute_loss), lambda m: m(x)


class Whole(nn.Module):
    """Computes its loss inside its forward."""

    def __init__(self, model: nn.Module, compute_loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.compute_loss = model, compute_loss

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_loss(self.model, x)


def make_ratio() -> Case:
    """Functions that are not linear in a sum over the samples, after the last weight."""
    x = draw(B, D)
    return make_encoder(), lambda m: m(x).exp().mean().log() + m(x).square().sum() / m(x).abs().sum()


WITH_ROWS = {
    make.__name__.removeprefix("make_"): make
    for make in (
        make_cnn, make_resnet, make_mlp, make_square, make_infonce, make_head_on_similarities, make_simclr, make_supcon,
        make_barlow_twins, make_triplets, make_masked, make_ratio,
    )
}  # fmt: skip


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(D, 5), nn.Linear(2, 5)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.normalize(self.images(images), dim=-1), F.normalize(self.texts(texts), dim=-1)
        logits = self.scale.exp() * (a @ b.T)
        return logits, logits.T


def make_clip() -> Case:
    model, images, texts = Clip().double(), draw(B, D), draw(B, 2)
    perturb(model)

    def compute_loss(model: nn.Module) -> Tensor:
        return sum(F.cross_entropy(logits, torch.arange(B)) for logits in model(images, texts)) / 2

    return model, compute_loss


class Experts(nn.Module):
    """A mixture of experts with a loss that balances their load over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, 2) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        chosen, out = p.argmax(-1), x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * p[rows, i : i + 1])
        return out, 3 * (F.one_hot(chosen, 3).to(x.dtype).mean(0) * p.mean(0)).sum()


def make_experts() -> Case:
    model, x = Experts().double(), draw(B, D)
    perturb(model)

    def compute_loss(model: nn.Module) -> Tensor:
        out, balance = model(x)
        return out.square().mean() + 0.1 * balance

    return model, compute_loss


class Statistics(nn.Module):
    """A batch norm that is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 5), nn.Linear(5, 2)
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h - h.mean(0)) / (h.var(0) + 1e-3).sqrt() * self.weight)


def make_statistics() -> Case:
    model, x = Statistics().double(), draw(B, D)
    perturb(model)
    return model, lambda m: F.cross_entropy(m(x), torch.arange(B) % 2)


class Bilinear(nn.Module):
    """A weight between two samples, in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(D, 5), nn.Parameter(torch.ones(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return torch.einsum("bd,de,ce->bc", h, self.weight, h)


def make_bilinear() -> Case:
    model, x = Bilinear().double(), draw(B, D)
    perturb(model)
    return model, lambda m: F.cross_entropy(m(x), torch.arange(B))


def make_attention_across_the_batch() -> Case:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(D, 4), nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).unsqueeze(1)
            return self.attention(h, h, h)[0][:, 0]

    model, x = Across().double(), draw(B, D)
    perturb(model)
    return model, lambda m: F.cross_entropy(m(x), torch.arange(B))


def make_sequences() -> Case:
    """BatchNorm over sequences as long as the batch, with the channels in the middle and with merged rows."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
            return self.last(self.norm(h.flatten(0, 1)).view(h.shape))

    model, x = Sequences().double(), draw(B, B, D)
    perturb(model)
    return model, lambda m: m(x).square().mean()


class Weighted(nn.Module):
    """Losses weighted by learned variances, and a penalty on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, B))
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def make_weighted() -> Case:
    model, x = Weighted().double(), draw(B, D)
    perturb(model)

    def compute_loss(model: Any) -> Tensor:
        logits = model(x) @ model(x).T
        losses = [F.cross_entropy(logits, torch.arange(B)), logits.tanh().mean()]
        weighted = sum(loss * torch.exp(-scale) + scale for loss, scale in zip(losses, model.scales, strict=True))
        return weighted + 0.1 * model.body[0].weight.square().sum() + logits.square().mean().sqrt()

    return model, compute_loss


WITH_SUMS = {
    **WITH_ROWS,
    **{
        make.__name__.removeprefix("make_"): make
        for make in (
            make_clip, make_experts, make_statistics, make_bilinear, make_attention_across_the_batch, make_sequences,
            make_weighted,
        )
    },
}  # fmt: skip


def compute_gradient(model: nn.Module, compute_loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The gradient of a plain backward pass."""
    torch.manual_seed(7)
    found = torch.autograd.grad(compute_loss(model), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def is_mean(grads: Any) -> bool:
    return grads.loss_reduction.startswith("mean")


def add_up(grads: Any) -> dict[str, Tensor]:
    """The gradient that the rows stand for, with what belongs to no sample."""
    total, shared = grads.mean() if is_mean(grads) else grads.sum(), grads.shared()
    return {name: part + shared[name] for name, part in total.items()}


def assert_sums_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(want.abs().max()) for want in expected.values())
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-8, atol=1e-12 * scale, msg=name)


@pytest.mark.parametrize("case", WITH_SUMS.values(), ids=WITH_SUMS)
def test_rows_add_up_to_the_gradient_of_the_batch(case: Callable[[], Case]) -> None:
    torch.manual_seed(1)
    model, compute_loss = case()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = compute_gradient(model, compute_loss)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):  # later steps take other ways
        model.load_state_dict(before)
        model.zero_grad()
        torch.manual_seed(7)
        with record(model, coupled=CONTRIBUTIONS, keep_grad=step == 1) as grads:
            compute_loss(model).backward()
        assert_sums_close(add_up(grads), want)
        if step == 1:
            assert_sums_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, want)
        assert "contributions" in repr(grads) and grads.coupled == "contributions"
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, after[name])


@pytest.mark.parametrize("case", WITH_ROWS.values(), ids=WITH_ROWS)
def test_rows_are_what_passes_through_own_activations(case: Callable[[], Case]) -> None:
    torch.manual_seed(1)
    model, compute_loss = case()
    copies = CopiesForEachSample(model)
    torch.manual_seed(7)
    with copies:
        loss = compute_loss(model)
    found = torch.autograd.grad(loss, list(copies.copies.values()), allow_unused=True)
    torch.manual_seed(7)
    with record(model, coupled=CONTRIBUTIONS) as grads:
        again = compute_loss(model)
        again.backward()
    torch.testing.assert_close(again, loss)
    scale = B if is_mean(grads) else 1
    expected = {name: g * scale for name, g in zip(dict(model.named_parameters()), found, strict=True)}
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, rows in grads.dense().items():  # the bias before a batch norm has a gradient of rounding errors
        torch.testing.assert_close(rows, expected[name], rtol=1e-7, atol=1e-9 * largest, msg=name)


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4).eval()])
def test_without_mixing_they_are_the_gradients_of_the_samples(norm: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = make(nn.Conv2d(2, 4, 3), norm(), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, D))
    x, y = draw(B, 2, 4, 4), torch.arange(B) % D
    found = []
    for coupled in (None, CONTRIBUTIONS):
        torch.manual_seed(7)
        with record(model, coupled=coupled) as grads:
            F.cross_entropy(model(x), y).backward()
        found.append(grads.dense())
    for name, rows in found[0].items():
        assert torch.equal(rows, found[1][name]), name


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_batches_of_other_sizes(batch: int) -> None:
    torch.manual_seed(1)
    model = make(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, D))
    for size in (batch, 3, batch):
        x = draw(size, 2, 4, 4)
        want = compute_gradient(model, lambda m, x=x: m(x).square().mean())
        with record(model, coupled=CONTRIBUTIONS) as grads:
            model(x).square().mean().backward()
        assert_sums_close(grads.mean(), want)


def test_losses_of_a_vector_and_of_two_passes() -> None:
    torch.manual_seed(1)
    model, x = make_mlp()[0].eval(), draw(B, D)
    model[1].train()
    want = compute_gradient(model, lambda m: m(x).square().sum())
    with record(model, coupled=CONTRIBUTIONS) as grads:
        losses = model(x).square().sum(1)
        losses.backward(torch.ones(B, dtype=torch.float64), retain_graph=True)
        losses.sum().backward()
    assert grads.loss_reduction == "sum"
    assert_sums_close(grads.sum(), {name: 2 * g for name, g in want.items()})


def test_a_mean_and_a_sum_are_parts_of_one_loss() -> None:
    torch.manual_seed(1)
    model, x = make_mlp()[0].eval(), draw(B, D)

    def compute_loss(model: nn.Module) -> Tensor:
        h = model(x)
        return h.square().mean() + h.abs().sum() + h.std(0).sum()

    want = compute_gradient(model, compute_loss)
    for given, answer in ((None, "mean"), ("sum", "sum"), ("mean", "mean")):
        with record(model, coupled=CONTRIBUTIONS, loss_reduction=given) as grads:
            compute_loss(model).backward()
        assert grads.loss_reduction == answer
        assert_sums_close(grads.mean() if answer == "mean" else grads.sum(), want)


@pytest.mark.parametrize("options", [{"keep": "norms"}, {"keep": "clip", "max_norm": 0.5}, {"units": [0, 1, 0, 1]}])
def test_other_answers(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, compute_loss = make_resnet()
    with record(model, coupled=CONTRIBUTIONS) as want:
        compute_loss(model).backward()
    with record(model, coupled=CONTRIBUTIONS, **options) as grads:
        compute_loss(model).backward()
    if "units" in options:
        assert_sums_close(grads.sum(), want.sum())
        rows = {name: torch.stack([g[::2].sum(0), g[1::2].sum(0)]) for name, g in want.dense().items()}
        assert_rows_close({"0.weight": grads.dense()["0.weight"]}, {"0.weight": rows["0.weight"]})
    else:
        torch.testing.assert_close(grads.norms(), want.norms())
    if "max_norm" in options:
        assert_sums_close(grads.clip(), want.clip(0.5))
    assert "contributions" in repr(grads)


def test_watch_and_monitor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model, compute_loss = make_cnn()
    want, found = compute_gradient(model, compute_loss), []
    with persample.watch(model, lambda grads: found.append(grads.mean()), coupled=CONTRIBUTIONS):
        compute_loss(model).backward()
    assert_sums_close(found[0], want)
    with persample.monitor(model, every=1) as watching:
        compute_loss(model).backward()
    assert not watching.history and "coupled='contributions'" in caplog.text
    out = tmp_path / "run.jsonl"
    with persample.monitor(model, every=1, out=out, coupled=CONTRIBUTIONS) as watching:
        model.zero_grad()
        compute_loss(model).backward()
    assert_sums_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, want)
    assert [json.loads(line)["coupled"] for line in out.read_text().splitlines()] == ["contributions"] * 2
    assert "contributions" in repr(watching)
    assert any("contributions" in reason for reason in watching.advise().reasons)


class Folded(nn.Module):
    """A weight that meets statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(D, 5), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h * (self.weight * (h.var(0) + 1e-3).rsqrt())


def test_a_weight_that_meets_no_rows_is_refused() -> None:
    model, x = Folded(), torch.randn(B, D)
    refused = pytest.raises(SamplesMixed, match=r"mul, in Folded.*no single sample: var.*no sample owns")
    with refused, record(model, coupled=CONTRIBUTIONS):
        model(x).sum().backward()


def test_the_default_refuses_and_names_the_ways_out() -> None:
    model, compute_loss = make_cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused = pytest.raises(SamplesMixed, match=r"GroupNorm.*eval\(\).*coupled='contributions'.*persample\.rows")
    with refused, record(model):
        compute_loss(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model, compute_loss = make_infonce()
    with pytest.raises(SamplesMixed, match=r"coupled='contributions'.*persample\.rows"), record(model):
        compute_loss(model).backward()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"coupled": "yes"}, "coupled must be 'contributions' or None"),
        ({"coupled": CONTRIBUTIONS, "verify": "always"}, "differ by design"),
        ({"coupled": CONTRIBUTIONS, "divisor": "own"}, "would not add up"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PerSampleError, match=message), record(nn.Linear(2, 2), **options):
        pass
    with pytest.raises(PerSampleError, match="not available in private training"):
        Options(coupled=CONTRIBUTIONS, guard=Isolation())


def test_private_training_refuses_it() -> None:
    model = nn.Linear(D, 2)
    with pytest.raises(PerSampleError, match="not available in private training"):
        PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=1.0, max_grad_norm=1.0,
            expected_batch_size=B, recording={"coupled": CONTRIBUTIONS},
        )  # fmt: skip
    model, compute_loss = make_cnn()
    PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=B,
    )  # fmt: skip
    with pytest.raises(SamplesMixed) as refused:
        compute_loss(model)
    assert "coupled" not in str(refused.value) and "persample.rows" not in str(refused.value)
