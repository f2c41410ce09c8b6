"""What belongs to the batch is refused in private training: numbers of samples, and samples that outlive their step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.data_loader import DPDataLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, BertConfig, BertModel, GPT2Config, GPT2Model

from persample import SamplesMixed, record
from persample.isolation.places import has_equal_rows
from persample.layouts import Layout
from persample.private import BatchMemoryManager, PrivacyEngine, PrivateOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")
B, T, D = 6, 5, 4
STARTED: list[Any] = []


@pytest.fixture(autouse=True)
def release_optimizers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    while STARTED:
        STARTED.pop().release()


class Model(nn.Module):
    """Computes `function(self, linear(x))`; `parts` become attributes."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Tensor:
        return self.function(self, self.linear(x))


def make_optimizer(model: nn.Module, **recording: Any) -> PrivateOptimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = PrivateOptimizer(
        torch.optim.SGD(trainable, lr=0.1),
        module=model, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1, loss_reduction="sum",
        poisson_sampling=False, recording=recording,
    )  # fmt: skip
    STARTED.append(optimizer)
    return optimizer


def compute_loss(output: Any) -> Tensor:
    output = getattr(output, "last_hidden_state", output)
    rows = output.reshape(len(output), output.numel() // max(1, len(output)))
    return (rows.sin() * torch.arange(1.0, 1 + rows.shape[1])).sum() + rows.square().sum()


def train(
    model: nn.Module, x: Any, steps: int = 2, loss: Callable[[Any], Tensor] = compute_loss, **recording: Any
) -> list[Tensor]:
    """The clipped sums of some steps."""
    optimizer, sums = make_optimizer(model, **recording), []
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
            sums.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    finally:
        optimizer.release()
    return sums


def make_flat() -> Tensor:
    return torch.randn(B, D)


def make_sequences(length: int = T) -> Tensor:
    return torch.randn(B, length, D)


# ---- the number of a sample in the batch ----


def write(h: Tensor, item: Any, value: Any) -> Tensor:
    h = h.clone()
    h[item] = value
    return h


def keep_noise(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "noise"):
        m.noise = torch.randn(B, D)
    return h + m.noise


def warm_up(m: Any, h: Tensor) -> Tensor:
    m.steps = getattr(m, "steps", -1) + 1
    return h * (1 + m.steps * torch.arange(B))[:, None]


numbers = torch.arange

PLACES: dict[str, Callable[..., Tensor]] = {
    "signs": lambda m, h: h * (-1.0) ** numbers(B)[:, None],
    "signs before a layer": lambda m, h: m.linear(h * (-1.0) ** numbers(B)[:, None]),
    "embedding": lambda m, h: h + m.table(numbers(B)),
    "embedding, times": lambda m, h: h * m.table(numbers(len(h))),
    "layer": lambda m, h: h + m.layer(numbers(B)[:, None].float()),
    "one-hot beside": lambda m, h: torch.cat([h, torch.eye(len(h))], 1),
    "one-hot added": lambda m, h: h + torch.eye(len(h))[:, :D],
    "linspace": lambda m, h: h * torch.linspace(0, 1, len(h))[:, None],
    "where": lambda m, h: torch.where(numbers(len(h))[:, None] < 3, h, 0 * h),
    "masked_fill": lambda m, h: h.masked_fill(numbers(len(h))[:, None] < 3, 0),
    "mask": lambda m, h: h * (numbers(len(h))[:, None] < 3),
    "in place": lambda m, h: h.mul_(numbers(len(h))[:, None]),
    "into a constant": lambda m, h: numbers(B)[:, None].expand(B, D).float().contiguous().add_(h),
    "stack": lambda m, h: torch.stack([h, numbers(B)[:, None].expand(B, D).float()], 1),
    "hstack": lambda m, h: torch.hstack([h, numbers(B)[:, None].float()]),
    "column_stack": lambda m, h: torch.column_stack([h, numbers(B).float()]),
    "meshgrid": lambda m, h: h * torch.meshgrid(numbers(B), numbers(D), indexing="ij")[0],
    "counted": lambda m, h: h * torch.ones(B, 1).cumsum(0),
    "lower triangle": lambda m, h: h.tril(),
    "upper triangle of ones": lambda m, h: h * torch.ones_like(h).triu(),
    "index_fill": lambda m, h: h.index_fill(0, torch.tensor([2]), 0.0),
    "some by a mask": lambda m, h: h[numbers(B) > 2],
    "some by numbers": lambda m, h: h[torch.where(numbers(B) > 2)[0]],
    "stack in front": lambda m, h: torch.stack([numbers(B)[:, None].expand(B, D).float(), h]).transpose(0, 1),
    "product": lambda m, h: h[:, None] @ numbers(B * D * D).float().view(B, D, D),
    "einsum": lambda m, h: torch.einsum("bd,b->bd", h, numbers(B).float()),
    "a parameter for each place": lambda m, h: h * m.own,
    "gather": lambda m, h: h.gather(1, numbers(B)[:, None] % D),
    "index": lambda m, h: h[numbers(B), numbers(B) % D],
    "write": lambda m, h: write(h, (numbers(B), numbers(B) % D), 0.0),
    "write numbers": lambda m, h: write(h, (slice(None), 0), numbers(B).float()),
    "copies": lambda m, h: h.repeat_interleave(torch.tensor([1, 2, 1, 1, 1, 1]), 0),
    "zeros_like": lambda m, h: h * torch.zeros_like(h[:, 0]).copy_(numbers(B))[:, None],
    "new_tensor": lambda m, h: h * h.new_tensor(list(range(B)))[:, None],
    "numpy": lambda m, h: h * torch.from_numpy(numbers(B).numpy())[:, None],
    "buffer": lambda m, h: h + m.rows,
    "noise that grows": lambda m, h: h + torch.randn(B, D) * numbers(B)[:, None],
    "noise of the first half": lambda m, h: h + torch.cat([torch.randn(B // 2, D), torch.zeros(B // 2, D)]),
    "noise that is kept": keep_noise,
    "from the second step on": warm_up,
    "state of a cell": lambda m, h: m.cell(h, numbers(B * D).float().view(B, D)),
}

SEQUENCE_PLACES: dict[str, Callable[..., Tensor]] = {
    "positions, buffer": lambda m, h: h + m.positions[: h.size(0)],
    "positions, learned": lambda m, h: h + m.learned[: h.size(0)],
    "positions, learned, zero": lambda m, h: h + m.zero[: h.size(0)],
    "merged": lambda m, h: h.flatten(0, 1) * numbers(B * T)[:, None],
    "merged, repeated": lambda m, h: h.flatten(0, 1) * numbers(B).repeat_interleave(T)[:, None],
    "state of a layer": lambda m, h: m.lstm(h, (numbers(B * D).float().view(1, B, D), torch.zeros(1, B, D)))[0],
    "mask of attention": lambda m, h: m.attention(h, h, h, key_padding_mask=torch.ones(B, T).tril(-1).bool())[0],
}


def make_placed(name: str) -> tuple[nn.Module, Tensor]:
    if name in PLACES:
        own = nn.Parameter(torch.ones(B, 1))
        parts = {"table": nn.Embedding(9, D), "layer": nn.Linear(1, D), "own": own, "cell": nn.GRUCell(D, D)}
        return Model(PLACES[name], rows=nn.Buffer(torch.randn(B, D)), **parts), make_flat()
    zero, learned = nn.Parameter(torch.zeros(9, 1, D)), nn.Parameter(torch.randn(9, 1, D))
    parts = {"lstm": nn.LSTM(D, D, batch_first=True), "attention": nn.MultiheadAttention(D, 2, batch_first=True)}
    positions = nn.Buffer(torch.randn(9, 1, D))
    return Model(SEQUENCE_PLACES[name], positions=positions, zero=zero, learned=learned, **parts), make_sequences()


@pytest.mark.parametrize("name", [*PLACES, *SEQUENCE_PLACES])
def test_numbers_of_samples_are_refused(name: str) -> None:
    """By the tracker, without a verification; outside private training the number of a sample is a fact."""
    model, x = make_placed(name)
    with pytest.raises(SamplesMixed, match=r"(?s)in (Model|module '.*').*each of the 6 samples.*number in the batch"):
        train(model, x, verify=False)
    model, x = make_placed(name)
    with record(model, verify=False):
        compute_loss(model(x)).backward()


@pytest.mark.parametrize("name", ["positions, learned, zero", "merged", "mask of attention"])
def test_numbers_of_samples_are_refused_if_all_sizes_are_equal(name: str) -> None:
    model = Model(SEQUENCE_PLACES[name], zero=nn.Parameter(torch.zeros(9, 1, D)))
    model.attention = nn.MultiheadAttention(D, 2, batch_first=True)
    if name == "merged":
        model.function = lambda m, h: h.flatten(0, 1) * numbers(B * B)[:, None]
    if name == "mask of attention":
        model.function = lambda m, h: m.attention(h, h, h, key_padding_mask=torch.ones(B, B).tril(-1).bool())[0]
    with pytest.raises(SamplesMixed, match="number in the batch"):
        train(model, make_sequences(B), verify=False)


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": lambda h, own: torch.cat([h, own], 1),
    "stack": lambda h, own: torch.stack([h, own], 1),
    "hstack": lambda h, own: torch.hstack([own, h]),
    "vstack": lambda h, own: torch.vstack([h.t(), own.t()]).t(),
    "dstack": lambda h, own: torch.dstack([h, own]),
    "column_stack": lambda h, own: torch.column_stack([h, own, h]),
}


@pytest.mark.parametrize("name", JOINS)
def test_rows_of_weights_beside_samples_are_refused_although_they_are_zero(name: str) -> None:
    """Their gradients depend on the numbers of samples. Random numbers, and equal rows, may stand there."""
    join = JOINS[name]
    model = Model(lambda m, h: join(h, m.own[: len(h)]), own=nn.Parameter(torch.zeros(B, D)))
    with pytest.raises(SamplesMixed, match="number in the batch"):
        train(model, make_flat(), verify=False)
    model = Model(lambda m, h: join(h, m.own.expand(len(h), D)), own=nn.Parameter(torch.zeros(D)))
    train(model, make_flat())
    train(Model(lambda m, h: join(h, torch.randn_like(h))), make_flat(), verify=False)
    with pytest.raises(SamplesMixed, match="number in the batch"):
        train(Model(lambda m, h: join(h, torch.eye(len(h), D))), make_flat(), verify=False)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda y: (y * torch.linspace(0, 1, len(y))[:, None]).sum(),
    "labels": lambda y: F.cross_entropy(y, numbers(len(y)) % D, reduction="sum"),
    "targets": lambda y: (y - numbers(len(y))[:, None]).square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_of_samples_are_refused_in_the_loss(name: str) -> None:
    with pytest.raises(SamplesMixed, match="number in the batch"):
        train(Model(lambda m, h: h), make_flat(), loss=LOSSES[name], verify=False)


def test_numbers_of_samples_are_refused_as_gradients() -> None:
    model, x = Model(lambda m, h: h.square().sum(1)), make_flat()
    optimizer = make_optimizer(model)
    with pytest.raises(SamplesMixed, match="number in the batch"):
        model(x).backward(torch.linspace(0, 1, B))
    model(x).backward(torch.ones(B))
    optimizer.zero_grad()
    torch.autograd.backward([model(x)], [x[:, 0]])


def test_numbers_of_samples_are_refused_in_code_without_torch_functions() -> None:
    model = Model(lambda m, h: torch.vmap(lambda row, n: row * n)(h, numbers(B).float()))
    with pytest.raises(SamplesMixed, match="number in the batch"):
        train(model, make_flat(), verify=False)
    train(Model(lambda m, h: torch.vmap(lambda row: row * torch.linspace(0, 1, D))(h)), make_flat())


def test_one_step_with_one_sample_does_not_hide_later_ones() -> None:
    model = Model(lambda m, h: h * (1.0 + numbers(len(h)))[:, None])
    optimizer = make_optimizer(model)
    for size in (1, 0, 1):
        optimizer.zero_grad()
        compute_loss(model(torch.randn(size, D))).backward()
        optimizer.step()
    with pytest.raises(SamplesMixed, match="number in the batch"):
        model(make_flat())


UNSEEN: dict[str, Callable[..., Tensor]] = {
    "samples in the middle": lambda m, h: torch.cat([h[:2], h[2:4] * 2, h[4:]]),
    "a loop": lambda m, h: torch.stack([row * (1 + (i == 2)) for i, row in enumerate(h)]),
    "a split batch": lambda m, h: (h.view(2, 3, D) * torch.tensor([1.0, 2.0, 1.0])[:, None]).view(B, D),
    "with dropout": lambda m, h: m.drop(torch.stack([row * (1 + (i == 2)) for i, row in enumerate(h)])),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_places_that_only_a_verification_sees(name: str) -> None:
    """The first and the last sample are right, so that each sample has to change its place."""
    with pytest.raises(SamplesMixed, match=r"output of sample \d depends on its place in the batch"):
        train(Model(UNSEEN[name], drop=nn.Dropout(0.5)), make_flat())


def test_outputs_with_different_numbers_of_rows_are_not_compared_by_place() -> None:
    """If the samples are rotated, their rows begin elsewhere."""
    kept = torch.tensor([3, 2, 2, 4, 4, 1])[:, None] > torch.arange(T)
    x = make_sequences()
    x[..., 0] = torch.where(kept, 1.0, -1.0)

    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[x[..., 0] > 0]

    model = Selecting()
    make_optimizer(model, verify="always")
    output = model(x)
    assert len(output) == int(kept.sum())
    compute_loss(output).backward()


class PaddedNorm(nn.Module):
    """Cuts to the longest sample of the batch, and normalises over time."""

    def __init__(self, reduce: Callable[[Tensor], Tensor], has_norm: bool = True, on_the_left: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.GroupNorm(2, D) if has_norm else nn.Identity()
        self.reduce, self.on_the_left = reduce, on_the_left

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.linear(x)[:, : int(lengths.max())]
        h = h * (numbers(h.size(1)) < lengths[:, None])[..., None]
        h = self.reduce(self.norm(h.transpose(1, 2)))
        return h.flip(2) if self.on_the_left else h


# The longest sample at the end is one of those that run alone.
LENGTHS = [[2, 5, 9, 3, 4, 4], [2, 5, 4, 3, 4, 9], [9, 5, 4, 3, 4, 2]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("reduce", [lambda h: h.sum(2), lambda h: h], ids=["sum", "positions"])
def test_padding_to_the_longest_under_a_norm_over_time_is_refused(
    reduce: Callable[[Tensor], Tensor], lengths: list[int]
) -> None:
    model = PaddedNorm(reduce)
    optimizer = make_optimizer(model)
    with pytest.raises(SamplesMixed, match=r"changes with the other samples|the size of the batch"):
        model(torch.randn(B, 9, D), torch.tensor(lengths))
    optimizer.release()


@pytest.mark.parametrize("on_the_left", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_padding_to_the_longest_without_influence_is_not_refused(lengths: list[int], on_the_left: bool) -> None:
    model = PaddedNorm(lambda h: h, has_norm=False, on_the_left=on_the_left)
    optimizer = make_optimizer(model)
    model(torch.randn(B, 9, D), torch.tensor(lengths))
    optimizer.release()


def test_equal_rows() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 4.0]])
    assert has_equal_rows(rows, Layout(0, inner=2), 2) and not has_equal_rows(rows, Layout(0), 2)
    assert has_equal_rows(rows, Layout(0, ids=(0, 0, 1, 1)), 2) and not has_equal_rows(
        rows, Layout(0, ids=(0, 1, 1, 0)), 2
    )
    assert has_equal_rows(rows[:3], Layout(0, ids=(0, 0, 1)), 2)  # a shorter sample
    assert has_equal_rows(rows * (1 + 1e-7 * torch.rand(4, 1)), Layout(0, inner=2), 2)
    assert not has_equal_rows(torch.tensor([0.0, 1e-4, 1.0, 1.0]), Layout(0), 4)


# ---- samples that outlive their step ----


def update_after_use(m: Any, h: Tensor) -> Tensor:
    result = h - m.mean
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return result


def update_by_data(m: Any, h: Tensor) -> Tensor:
    result = h - m.mean
    m.mean.data.copy_(0.9 * m.mean + 0.1 * h.detach().mean(0))
    return result


def update_by_detach(m: Any, h: Tensor) -> Tensor:
    result = h - m.mean
    with torch.no_grad():
        m.mean.detach().add_(h.mean(0))
    return result


def update_by_numpy(m: Any, h: Tensor) -> Tensor:
    result = h - m.mean
    mean = m.mean.numpy()
    mean += h.detach().mean(0).numpy()
    return result


def assign(m: Any, h: Tensor) -> Tensor:
    result = h - m.mean
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return result


def assign_data(m: Any, h: Tensor) -> Tensor:
    result = h - m.mean
    m.mean.data = h.detach().mean(0)
    return result


def use_codes(m: Any, h: Tensor) -> Tensor:
    nearest = (h[:, None] - m.codes).square().sum(-1).argmin(1)
    chosen = F.one_hot(nearest, 5).float()
    result = h + (m.codes[nearest] - h).detach()
    with torch.no_grad():
        m.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        m.codes.mul_(0.9).add_(chosen.t() @ h, alpha=0.1)
    return result


def use_codes_of_a_table(m: Any, h: Tensor) -> Tensor:
    weight = m.table.weight
    nearest = (h[:, None] - weight.detach()).square().sum(-1).argmin(1)
    result = h + (F.embedding(nearest, weight.detach()) - h).detach()
    weight.data.mul_(0.9).add_(F.one_hot(nearest, 5).float().t() @ h.detach(), alpha=0.1)
    return result


def replace_parameter(m: Any, h: Tensor) -> Tensor:
    result = h + m.frozen.detach()
    m.frozen = nn.Parameter(h.detach().mean(0), requires_grad=False)
    return result


def enqueue(m: Any, h: Tensor) -> Tensor:
    result = h @ m.queue.clone()
    m.queue[:, :B] = h.detach().t()
    return result


def count_choices(m: Any, h: Tensor) -> Tensor:
    m.counts.index_add_(0, h.argmax(1), torch.ones(len(h)))
    return h


STATES: dict[str, Callable[[], nn.Module]] = {
    "a mean, updated after its use": lambda: Model(update_after_use, mean=nn.Buffer(torch.zeros(D))),
    "a mean, through data": lambda: Model(update_by_data, mean=nn.Buffer(torch.zeros(D))),
    "a mean, through detach": lambda: Model(update_by_detach, mean=nn.Buffer(torch.zeros(D))),
    "a mean, through numpy": lambda: Model(update_by_numpy, mean=nn.Buffer(torch.zeros(D))),
    "a mean, replaced": lambda: Model(assign, mean=nn.Buffer(torch.zeros(D))),
    "a mean, with other data": lambda: Model(assign_data, mean=nn.Buffer(torch.zeros(D))),
    "code book": lambda: Model(use_codes, codes=nn.Buffer(torch.randn(5, D)), counts=nn.Buffer(torch.zeros(5))),
    "code book in a table": lambda: Model(use_codes_of_a_table, table=nn.Embedding(5, D).requires_grad_(False)),
    "a parameter, replaced": lambda: Model(replace_parameter, frozen=nn.Parameter(torch.zeros(D), requires_grad=False)),
    "queue": lambda: Model(enqueue, queue=nn.Buffer(torch.zeros(D, 9))),
    "counts": lambda: Model(count_choices, counts=nn.Buffer(torch.zeros(D))),
    "instance norm": lambda: Model(lambda m, h: m.n(h[:, None]), n=nn.InstanceNorm1d(1, track_running_stats=True)),
    "affine instance norm": lambda: Model(
        lambda m, h: m.n(h[:, None]), n=nn.InstanceNorm1d(1, affine=True, track_running_stats=True)
    ),
    "native batch norm": lambda: Model(
        lambda m, h: (torch.native_batch_norm(h.detach(), None, None, m.mean, m.var, True, 0.1, 1e-5), h)[1],
        mean=nn.Buffer(torch.zeros(D)),
        var=nn.Buffer(torch.ones(D)),
    ),
    "statistics of batch norm": lambda: Model(
        lambda m, h: (torch.batch_norm_update_stats(h.detach(), m.mean, m.var, 0.1), h)[1],
        mean=nn.Buffer(torch.zeros(D)),
        var=nn.Buffer(torch.ones(D)),
    ),
    "max_norm": lambda: Model(lambda m, h: h + m.e(h.argmax(1)), e=nn.Embedding(D, D, max_norm=0.1)),
    "max_norm of bags": lambda: Model(lambda m, h: h + m.e(h.argsort(1)), e=nn.EmbeddingBag(D, D, max_norm=0.1)),
    "max_norm of a function": lambda: Model(
        lambda m, h: h + F.embedding(h.argmax(1), m.w, max_norm=0.1), w=nn.Parameter(torch.randn(D, D))
    ),
}


@pytest.mark.parametrize("seen_before", [False, True], ids=["new", "recorded before"])
@pytest.mark.parametrize("name", STATES)
def test_state_that_samples_write_is_refused(name: str, seen_before: bool) -> None:
    """Again after a refusal, and if recordings, which allow it, have seen the model before."""
    model, x = STATES[name](), make_flat()
    if seen_before:
        for _ in range(2):
            with record(model, verify=False):
                compute_loss(model(x)).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        with pytest.raises(SamplesMixed, match=r"(?s)(The (buffer|parameter) '|max_norm=).*every checkpoint"):
            train(model, x, steps=1, verify=False)
        if name not in ("code book in a table", "a parameter, replaced", "a mean, through numpy"):
            for key, value in model.state_dict().items():
                torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def add_number(m: Any, h: Tensor) -> Tensor:
    m.mean.add_(h.mean().item())
    return h


def replace_by_number(m: Any, h: Tensor) -> Tensor:
    m.mean = torch.full((D,), float(h.abs().max()))
    return h


@pytest.mark.parametrize("write", [add_number, replace_by_number])
def test_state_that_only_a_verification_sees(write: Callable[..., Tensor]) -> None:
    model = Model(write, mean=nn.Buffer(torch.zeros(D)))
    with pytest.raises(SamplesMixed, match=r"(?s)The buffer 'mean' .*sample 5 alone.*every checkpoint"):
        train(model, make_flat(), steps=1)


def count_steps(m: Any, h: Tensor) -> Tensor:
    m.steps += 1
    m.noise.normal_()
    return h + m.noise


def test_state_without_samples_passes_a_verification() -> None:
    train(Model(count_steps, steps=nn.Buffer(torch.tensor(0)), noise=nn.Buffer(torch.zeros(D))), make_flat(), steps=2)


def carry_mean(m: Any, h: Tensor) -> Tensor:
    result = h - m.carried if hasattr(m, "carried") else h
    m.carried = h.detach().mean(0)
    return result


def carry_rows(m: Any, h: Tensor) -> Tensor:
    result = h + m.carried if hasattr(m, "carried") else h
    m.carried = h.detach()
    return result


def carry_list(m: Any, h: Tensor) -> Tensor:
    m.carried = getattr(m, "carried", [])
    result = h + m.carried[-1] if m.carried else h
    m.carried.append(h.detach().mean(0))
    return result


def carry_by_data(m: Any, h: Tensor) -> Tensor:
    m.carried = getattr(m, "carried", torch.zeros(D))
    result = h - m.carried
    m.carried.data.copy_(h.detach().mean(0))
    return result


def carry_data(m: Any, h: Tensor) -> Tensor:
    result = h - m.carried.mean(0) if hasattr(m, "carried") else h
    m.carried = m.data
    return result


def carry_into_a_layer(m: Any, h: Tensor) -> Tensor:
    result = m.linear(m.carried) + h if hasattr(m, "carried") else h
    m.carried = h.detach().mean(0, keepdim=True)
    return result


@pytest.mark.parametrize("use", [carry_mean, carry_rows, carry_list, carry_by_data, carry_data, carry_into_a_layer])
def test_samples_of_an_earlier_step_are_refused(use: Callable[..., Tensor]) -> None:
    model = Model(use)
    optimizer = make_optimizer(model, verify=False)
    for step in range(4):
        optimizer.zero_grad()
        model.data = x = make_flat()
        if not step:
            compute_loss(model(x)).backward()
            optimizer.step()
            continue
        with pytest.raises(SamplesMixed, match="samples of an earlier step"):
            compute_loss(model(x)).backward()


def test_state_of_the_loop_is_refused() -> None:
    """A centre that the loss keeps over the steps; an output that is an argument of the next step."""
    model, x, centre = Model(lambda m, h: h), make_flat(), torch.zeros(D)
    optimizer = make_optimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        out = model(x)
        loss = compute_loss(out - centre)
        centre = 0.9 * centre + 0.1 * out.detach().mean(0)
        if step:
            with pytest.raises(SamplesMixed, match="samples of an earlier step"):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
    optimizer.release()
    optimizer = make_optimizer(model)
    out = model(x)
    kept = out.detach()
    compute_loss(out).backward()
    optimizer.step()
    with pytest.raises(SamplesMixed, match="samples of an earlier step"):
        model(kept)


def test_logs_of_the_loop_are_allowed() -> None:
    model, x, total, losses = Model(lambda m, h: h), make_flat(), torch.zeros(()), []
    optimizer = make_optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compute_loss(model(x))
        total = 0.9 * total + 0.1 * loss.detach()
        losses.append(loss.detach())
        model.last = loss.detach()
        loss.backward()
        optimizer.step()
    assert len(losses) == 3 and torch.stack(losses).isfinite().all()


@pytest.mark.parametrize("read", [lambda p: p.detach(), lambda p: p.data, lambda p: p.detach().clone()])
def test_weights_with_as_many_rows_as_samples_may_be_read_before_backward(read: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(D, B)
    optimizer = make_optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = compute_loss(model(make_flat()))
        assert torch.cat([read(p).flatten() for p in model.parameters()]).norm() > 0
        loss.backward()
        optimizer.step()
    optimizer.release()


# ---- ordinary models ----


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Linear(D, D), nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.zeros(1, 20, D))
        self.layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], 1)
        return self.layer(h + self.positions[:, : h.size(1)])[:, 0]


class Queries(nn.Module):
    """As in DETR: learned queries, one set for each sample, attend to it."""

    def __init__(self, is_batch_first: bool) -> None:
        super().__init__()
        self.queries, self.is_batch_first = nn.Embedding(3, D), is_batch_first
        self.layer = nn.TransformerDecoderLayer(D, 2, 8, dropout=0.0, batch_first=is_batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_batch_first:
            queries = self.queries.weight[None].repeat(len(x), 1, 1)
            return self.layer(torch.zeros_like(queries) + queries, x)
        queries = self.queries.weight[:, None].repeat(1, len(x), 1)
        return self.layer(queries, x.transpose(0, 1)).transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(D, D)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(len(x), D), torch.zeros(len(x), D)
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(step, (h, c))
            else:
                h = self.cell(step, h)
        return h


class LearnedState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.GRU(D, D, batch_first=True), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.state.expand(1, len(x), D).contiguous())[0]


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), D)
        for step in x.unbind(1):
            h = torch.tanh(self.a(step) + self.b(h))
        return h


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, 3 * D)
        self.register_buffer("frequencies", 1 / 10000 ** (numbers(0, D, 2) / D))

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k, v = self.project(x).chunk(3, -1)
        angles = numbers(length).expand(size, length)[..., None] * self.frequencies
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

        def rotate(z: Tensor) -> Tensor:
            return z * cos + torch.cat([-z[..., D // 2 :], z[..., : D // 2]], -1) * sin

        mask = torch.full((length, length), -1e9).triu(1)
        return (rotate(q) @ rotate(k).transpose(1, 2) + mask).softmax(-1) @ v


class Relative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.table = nn.Linear(D, 3 * D), nn.Embedding(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        steps = numbers(x.size(1))
        return (q @ k.transpose(1, 2) + self.table(steps[:, None] - steps + 20).squeeze(-1)).softmax(-1) @ v


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.probabilities: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        self.probabilities = p = self.gate(flat).softmax(-1)
        chosen, out = p.argmax(-1), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            out = out.index_add(0, rows, expert(flat[rows]) * p[rows, i, None])
        return out.view_as(x)


class Counting(nn.Module):
    """Counts its steps, and normalises its weight by a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))
        self.norm = nn.InstanceNorm1d(T, affine=True)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.norm(self.linear(x)) if x.size(1) == T else self.linear(x)


class Frozen(nn.Module):
    """BatchNorm in eval() keeps its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2))


def take_last(m: Any, h: Tensor) -> Tensor:
    lengths = (h[:, :, 0].detach() > 0).sum(1).clamp(max=h.size(1) - 1)
    return h[numbers(len(h)), lengths] + h[numbers(len(h)), -1] + h[numbers(len(h)), torch.full((len(h),), 2)]


def pad_by_writing(m: Any, h: Tensor) -> Tensor:
    padded = torch.zeros(len(h), h.size(1) + 2, D)
    padded[:, : h.size(1)] = h
    return padded


def embed_positions(kind: str) -> Callable[..., Tensor]:
    def embed(m: Any, h: Tensor) -> Tensor:
        length = h.size(1)
        if kind == "flat":
            return (h.reshape(-1, D) + m.table(numbers(length).repeat(len(h)))).view(h.shape)
        positions = {
            "expanded": lambda: numbers(length).expand(len(h), length),
            "repeated": lambda: numbers(length).repeat(len(h), 1),
            "of one type": lambda: torch.zeros(len(h), length, dtype=torch.long),
            "counted": lambda: torch.ones(len(h), length).cumsum(1).long(),
        }[kind]()
        return m.linear(h + m.table(positions))

    return embed


NOISE: dict[str, Callable[..., Tensor]] = {
    "randn": lambda m, h: torch.randn(len(h), D),
    "randn_like": lambda m, h: torch.randn_like(h[:, 0]),
    "scaled": lambda m, h: 0.1 * torch.randn(len(h), D) + 1,
    "torch.normal": lambda m, h: torch.normal(0.0, 1.0, (len(h), D)),
    "normal_": lambda m, h: torch.empty(len(h), D).normal_(),
    "a mask": lambda m, h: (torch.rand(len(h), 1) < 0.5).float().expand(-1, D),
    "bernoulli": lambda m, h: torch.bernoulli(torch.full((len(h), 1), 0.5)),
    "drop path": lambda m, h: h.new_empty(len(h), 1).bernoulli_(0.5) / 0.5,
    "a distribution": lambda m, h: torch.distributions.Normal(torch.zeros(len(h), D), 1.0).sample(),
    "through a layer": lambda m, h: m.linear(torch.randn(len(h), D)),
    "filled": lambda m, h: torch.zeros(len(h), D).masked_fill(torch.rand(len(h), D) < 0.3, 1.0),
    "two kinds": lambda m, h: torch.cat([torch.randn(len(h), 2), torch.rand(len(h), D - 2)], 1),
    "a window": lambda m, h: torch.randn(len(h), D) * torch.linspace(0, 1, D),
}


def select_at_random(m: Any, h: Tensor) -> Tensor:
    rows = torch.randperm(len(h))[:4]
    return h.index_add(0, rows, h[rows])


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "vision transformer": VisionTransformer,
    "queries": lambda: Queries(True),
    "queries, time first": lambda: Queries(False),
    "lstm cell": lambda: Recurrent(nn.LSTMCell),
    "gru cell": lambda: Recurrent(nn.GRUCell),
    "rnn cell": lambda: Recurrent(nn.RNNCell),
    "learned state": LearnedState,
    "recurrence by hand": ByHand,
    "rotary": Rotary,
    "relative": Relative,
    "experts": Experts,
    "counting": Counting,
    "batch norm in eval": Frozen,
    "last step": lambda: Model(take_last),
    "joined": lambda: Model(
        lambda m, h: torch.hstack([h, torch.ones(len(h), 2, D), m.linear(torch.zeros(len(h), 1, D))])
    ),
    "triangles": lambda: Model(lambda m, h: (h @ h.transpose(1, 2)).tril() @ h),
    "filled": lambda: Model(lambda m, h: h.index_fill(1, torch.tensor([2]), 0.0)),
    "permuted and back": lambda: Model(lambda m, h: h[numbers(len(h)).flip(0)].flip(0)),
    "first and last step": lambda: Model(lambda m, h: h[:, torch.tensor([0, -1])]),
    "padding": lambda: Model(pad_by_writing),
    "dropout": lambda: Model(lambda m, h: F.dropout(h, 0.5)),
    "a mask of ones": lambda: Model(lambda m, h: h * torch.ones(len(h), h.size(1), 1)),
    "chunks": lambda: Model(lambda m, h: torch.cat([m.linear(part) for part in h.split(2)])),
    "selected at random": lambda: Model(select_at_random),
    **{
        f"positions, {kind}": lambda kind=kind: Model(embed_positions(kind), table=nn.Embedding(20, D))  # type: ignore[misc]
        for kind in ("flat", "expanded", "repeated", "of one type", "counted")
    },
    **{
        f"noise, {name}": lambda draw=draw: Model(lambda m, h: h[:, 0] + h[:, 1].exp() * draw(m, h))  # type: ignore[misc]
        for name, draw in NOISE.items()
    },
}


@pytest.mark.parametrize("length", [T, B], ids=["T != B", "T == B"])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_not_refused(name: str, length: int) -> None:
    """And their steps are the same as without the checks."""
    model, x = ORDINARY[name](), make_sequences(length)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    sums = train(model, x, steps=3)
    torch.manual_seed(1)
    for ours, plain in zip(sums, train(other, x, steps=3, guard=None), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("length", [T, B], ids=["T != B", "T == B"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_transformers_are_not_refused(kind: str, length: int) -> None:
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: nn.Module
    if kind == "bert":
        model = BertModel(BertConfig(**sizes, intermediate_size=8, max_position_embeddings=16))
    else:
        model = GPT2Model(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    model.requires_grad_(True)
    tokens = torch.randint(11, (B, length))
    for p in (p for name, p in model.named_parameters() if "pooler" in name):
        p.requires_grad_(False)
    assert all(total.isfinite().all() for total in train(model, tokens, steps=2))


def test_a_teacher_outside_the_model_is_not_refused() -> None:
    model, x = Model(lambda m, h: h.tanh()), make_flat()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = make_optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(x)
        (model(x) - target - 0.1).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for own, p in zip(teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(p, 0.1)


# ---- the loader's tensors are samples ----


@dataclass
class Pair:
    x: Tensor
    mask: Tensor


def collate(kind: str) -> Callable[[list[Any]], Any]:
    def join(samples: list[Any]) -> Any:
        x, mask = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
        if kind == "dict":
            return {"x": x, "mask": mask}
        if kind == "encoding":
            return BatchEncoding({"x": x, "mask": mask})
        return Pair(x, mask) if kind == "dataclass" else (x, mask)

    return join


def get(batch: Any, name: str) -> Tensor:
    if isinstance(batch, Pair):
        return getattr(batch, name)
    return batch[("x", "mask").index(name)] if isinstance(batch, (tuple, list)) else batch[name]


def start_engine(model: nn.Module, kind: str = "tuple", **options: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(24, D, generator=generator) < 0.5).float()
    mask[:, 0] = 1
    data = TensorDataset(torch.randn(24, D, generator=generator), mask)
    settings: dict[str, Any] = {"poisson_sampling": False, "loss_reduction": "sum", **options}
    workers = settings.pop("num_workers", 0)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8, collate_fn=collate(kind), num_workers=workers),
        noise_multiplier=0.0, max_grad_norm=1.0, **settings,
    )  # fmt: skip
    STARTED.append(optimizer)
    return optimizer, loader


KINDS = ["tuple", "dict", "encoding", "dataclass"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_of_the_loader_are_samples_inside_the_model(kind: str, workers: int) -> None:
    """A mask that the model finds in an attribute is no constant, whose rows would differ."""
    model = Model(lambda m, h: h * m.mask)
    optimizer, loader = start_engine(model, kind, num_workers=workers)
    steps = 0
    for batch in loader:
        optimizer.zero_grad()
        model.mask = get(batch, "mask")
        model(get(batch, "x")).square().sum().backward()
        optimizer.step()
        steps += 1
    assert steps == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [1, 3])
def test_masked_means_over_the_batch_are_refused(kind: str, ahead: int) -> None:
    """Also of batches that were loaded ahead, and of views that were made before the model was called."""
    model = Model(lambda m, h: h)
    optimizer, loader = start_engine(model, kind)
    batches = iter(loader)
    first, *_ = [next(batches) for _ in range(ahead)]
    mask = get(first, "mask").view(-1)
    losses = model(get(first, "x")).square().view(-1)
    with pytest.raises(SamplesMixed):
        ((losses * mask).sum() / mask.sum()).backward()
    optimizer.zero_grad()
    losses = model(get(first, "x")).square()
    own = get(first, "mask")
    ((losses * own).sum(1) / own.sum(1)).sum().backward()


@pytest.mark.parametrize("workers", [0, 1])
def test_parts_of_split_batches_are_samples(workers: int) -> None:
    model = Model(lambda m, h: h * m.mask)
    optimizer, loader = start_engine(model, num_workers=workers)
    sizes = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        for x, mask in parts:
            optimizer.zero_grad()
            model.mask = mask
            model(x).square().sum().backward()
            optimizer.step()
            sizes.append(len(x))
    assert max(sizes) == 3 and sum(sizes) == 24


def test_the_loader_is_an_ordinary_loader() -> None:
    model = Model(lambda m, h: h)
    optimizer, loader = start_engine(model, poisson_sampling=True)
    assert isinstance(loader, DPDataLoader) and len(iter(loader)) == len(loader) == 3
    loader.collate_fn = None
    for copied in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(copied) is DPDataLoader and copied.batch_sampler is not None
    optimizer.release()
    data = DataLoader(TensorDataset(torch.randn(8, D)), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    expected = [x for (x,) in data]
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    STARTED.append(optimizer)
    torch.manual_seed(3)
    for x, (y,) in zip(expected, loader, strict=True):
        assert torch.equal(x, y)
    assert type(data) is DataLoader


def test_declared_tensors_are_not_kept() -> None:
    model = Model(lambda m, h: h)
    optimizer = make_optimizer(model)
    for _ in range(40):
        optimizer.add_samples([make_flat()])
    compute_loss(model(make_flat())).backward()
    assert not any(list(declared.items()) for declared in optimizer.arrivals.watch.declared.batches)


# ---- modules that are refused at once ----


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_by_name_and_can_be_removed(kind: Any) -> None:
    model = nn.Sequential(kind(5, D, max_norm=1.0), nn.Linear(D, D))
    with pytest.raises(SamplesMixed, match=r"'0' \(Embedding(Bag)?\).*max_norm"):
        PrivacyEngine().validate(module=model)
    fixed = PrivacyEngine.get_compatible_module(model)
    PrivacyEngine().validate(module=fixed)
    assert fixed[0].max_norm is None and model[0].max_norm == 1.0
    assert torch.equal(fixed[0].weight, model[0].weight)


class DividesByMean(nn.Module):
    """Divides by a statistic of the batch that leaves torch: only a comparison with samples alone notices it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) / (1 + float(x.nan_to_num(0.0, 0.0, 0.0).abs().mean()))
        return result


@pytest.mark.parametrize("first", [0.0, float("nan")])
def test_a_batch_that_tells_nothing_is_not_remembered(first: float) -> None:
    """A first batch of equal samples, or without finite outputs, does not stand for those that follow."""
    module = DividesByMean()
    optimizer = PrivateOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), module=module, noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=6, loss_reduction="sum",
    )  # fmt: skip
    module(torch.full((6, 4), first)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(SamplesMixed, match="other samples"):
        module(torch.randn(6, 4)).square().sum().backward()
    optimizer.release()


def test_copies_between_two_parts_of_a_model() -> None:
    """A later pass is verified again, which takes single samples out of the copies."""
    model = nn.ModuleDict({"encoder": nn.Linear(D, D), "head": nn.Linear(D, 2)})
    optimizer = make_optimizer(model)
    for _ in range(4):
        x = make_flat()
        optimizer.add_samples(x)
        optimizer.zero_grad()
        model["head"](model["encoder"](x).repeat(3, 1)).square().sum().backward()
        optimizer.step()
    optimizer.release()
