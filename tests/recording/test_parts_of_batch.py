"""Parts of one batch in several calls: halves joined by `cat`, chunks, accumulated gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record, watch
from persample.testing.oracle import assert_rows_close, loop_gradients, perturb, stack_gradients

D, T, C = 3, 4, 4


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 5, batch_first=True), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(D, 4, 2), nn.GroupNorm(2, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x.mT)).tanh().mean(-1))  # type: ignore[no-any-return]


class Checkpointed(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: self.lstm(x)[0].tanh(), x, use_reentrant=False)
        return self.head(h[:, -1])  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Small layers of one shape, which are computed as one, and a weight that is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.head = weight_norm(nn.Linear(D, C))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x.mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    "convolution": Convolution,
    "checkpointed": Checkpointed,
    "deep": Deep,
}


def join_halves(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    half = (len(x) + 1) // 2
    return F.cross_entropy(torch.cat([model(x[:half]), model(x[half:])]), y)


def join_chunks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.cat([model(part) for part in x.split(2)]), y)


def join_first_and_rest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.cat([model(x[:1]), model(x[1:])]), y)


def join_reversed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    last, first = model(x[2:]), model(x[:2])
    return F.cross_entropy(torch.cat([first, last]), y)


def add_sums(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = []
    for start in range(0, len(x), 2):
        stop = start + 2
        losses.append(F.cross_entropy(model(x[start:stop]), y[start:stop], reduction="sum"))
    return sum(losses) / len(x)  # type: ignore[no-any-return, return-value]


def add_to_total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    total: Any = 0
    for start in range(0, len(x), 2):
        total = total + F.cross_entropy(model(x[start : start + 2]), y[start : start + 2], reduction="sum")
    return total / len(x)  # type: ignore[no-any-return]


def add_single(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = [F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(len(x))]
    return torch.stack(losses).mean()


def overlap(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The second call has a row of the first one again."""
    first, second = model(x[:2]), model(x[1:])
    return F.cross_entropy(torch.cat([first[:1], second]), y)


LOSSES = [join_halves, join_chunks, join_first_and_rest, add_sums, add_to_total, add_single, overlap]


def make(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    perturb(model)
    return model, torch.randn(batch, T, D).double(), torch.randint(0, C, (batch,))


def find_expected(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return loop_gradients(model, (x, y), nn.CrossEntropyLoss())


@pytest.mark.parametrize("batch", [3, T, 5, 6])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_parts_in_one_loss(name: str, loss: Callable[..., Tensor], batch: int) -> None:
    model, x, y = make(name, batch)
    with record(model) as grads:
        loss(model, x, y).backward()
    assert grads.batch_size == batch
    assert_rows_close(grads.dense(), find_expected(model, x, y))


def test_parts_in_another_order() -> None:
    """Samples are counted in the order of the calls, unless they are declared."""
    model, x, y = make("deep", 5)
    with pytest.raises(PerSampleError, match="different orders"), record(model):
        join_reversed(model, x, y).backward()
    with record(model, samples=x) as grads:
        join_reversed(model, x, y).backward()
    assert_rows_close(grads.dense(), find_expected(model, x, y))


@pytest.mark.parametrize("cut_before", [False, True])
@pytest.mark.parametrize("batch", [2, T, 5])
@pytest.mark.parametrize("name", MODELS)
def test_accumulated_gradients(name: str, batch: int, cut_before: bool) -> None:
    model, x, y = make(name, batch)
    parts = [*zip(x.split(2), y.split(2), strict=True)] if cut_before else None
    with record(model, keep_grad=True) as grads:
        for a, b in parts or zip(x.split(2), y.split(2), strict=True):
            F.cross_entropy(model(a), b, reduction="sum").backward()
    expected = find_expected(model, x, y)
    assert_rows_close(grads.dense(), expected)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[key].sum(0))


@pytest.mark.parametrize("batch", [T, 5, 6])
def test_accumulated_means(batch: int) -> None:
    """A row is the batch size times the sample's share: the mean of the rows is the gradient that backward computes."""
    model, x, y = make("deep", batch)
    parts = len(x.split(2))
    with record(model, keep_grad=True) as grads:
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (F.cross_entropy(model(a), b) / parts).backward()
    shares = torch.cat([torch.full((len(part),), 1 / len(part) / parts, dtype=torch.float64) for part in x.split(2)])
    expected = {
        key: rows * (batch * shares).view(-1, *[1] * (rows.dim() - 1))
        for key, rows in find_expected(model, x, y).items()
    }
    assert_rows_close(grads.dense(), expected)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads.mean()[key])


@pytest.mark.parametrize("batch", [3, T, 5, 6])
def test_accumulated_sums_over_the_size_of_the_whole(batch: int) -> None:
    model, x, y = make("deep", batch)
    with record(model) as grads:
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (F.cross_entropy(model(a), b, reduction="sum") / batch).backward()
    assert grads.loss_reduction == "mean"
    assert_rows_close(grads.dense(), find_expected(model, x, y))


@pytest.mark.parametrize("order", ["aba", "aab", "abab", "baab"])
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", ["recurrent", "deep"])
def test_passes_over_graphs_in_turns(name: str, is_new: bool, order: str) -> None:
    """A pass that frees its graph leaves the graphs of other calls, which earlier passes have reached, as they are."""
    model, x, y = make(name, 4)
    parts = {"a": (x[:2], y[:2]), "b": (x[2:], y[2:])}
    if is_new:
        parts = {key: (a.clone(), b.clone()) for key, (a, b) in parts.items()}
    losses: dict[str, Tensor] = {}
    with record(model) as grads:
        for i, key in enumerate(order):
            if key not in losses:  # the second call comes after a backward pass
                a, b = parts[key]
                losses[key] = F.cross_entropy(model(a), b, reduction="sum")
            losses[key].backward(retain_graph=key in order[i + 1 :])
    rows = {key: find_expected(model, *part) for key, part in parts.items()}
    first, second = order[0], "b" if order[0] == "a" else "a"
    expected = {key: torch.cat([rows[part][key] * order.count(part) for part in (first, second)]) for key in rows["a"]}
    assert_rows_close(grads.dense(), expected)


def prepare_outside(x: Tensor) -> Tensor:
    return x.clone()


def prepare_inside(x: Tensor) -> Tensor:
    return (x.float() - 0.5).double()


ACCUMULATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, y: F.cross_entropy(out, y),
    "sum over the batch size": lambda out, y: F.cross_entropy(out, y, reduction="none").sum() / len(y),
    "own mean": lambda out, y: (out - F.one_hot(y, C)).square().sum(1).mean(0),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
}


@pytest.mark.parametrize("sizes", [(3, 3), (T, T, T), (3, 2), (1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("prepare", [prepare_outside, prepare_inside])
@pytest.mark.parametrize("loss", ACCUMULATED)
@pytest.mark.parametrize("name", ["recurrent", "deep"])
def test_accumulated_batches(name: str, loss: str, prepare: Any, sizes: tuple[int, ...]) -> None:
    """New batches, each with a backward pass: as many rows as samples. A mean over one batch is a share of all."""
    model, x, y = make(name, sum(sizes))
    for _ in range(2):  # the first step is audited
        batches = [(a.clone(), b.clone()) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
        model.zero_grad()
        with record(model, keep_grad=True) as grads:
            for a, b in batches:
                ACCUMULATED[loss](model(prepare(a)), b).backward(retain_graph=name == "deep")
        is_sum = loss == "sum" or sizes == (1, 1)  # a batch of one sample does not show which
        factors = [1.0 if is_sum else sum(sizes) / size for size in sizes for _ in range(size)]
        shares = torch.tensor(factors, dtype=torch.float64)
        alone = loop_gradients(
            model, (prepare(x), y), lambda model, batch: ACCUMULATED[loss](model(batch[0]), batch[1])
        )
        expected = {key: rows * shares.view(-1, *[1] * (rows.dim() - 1)) for key, rows in alone.items()}
        assert_rows_close(grads.dense(), expected)
        total = grads.sum() if is_sum else grads.mean()
        torch.testing.assert_close({key: p.grad for key, p in model.named_parameters()}, total)


def test_accumulated_batches_of_parts() -> None:
    """Parts of a model are called one after the other, each with tensors of the new batch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(D, C), "b": nn.Linear(D, C), "place": nn.Embedding(3, C)}).double()
    batches = [tuple(torch.randn(3, 3, D).double().unbind(1)) for _ in range(2)]

    def loss(model: Any, batch: Any) -> Tensor:
        a, b = batch[0].cos(), batch[1] + 1
        return (
            model["a"](a).tanh() * model["b"](b) + model["place"](torch.arange(3))[1] - batch[2].sum(1)[:, None]
        ).sum()

    with record(model) as grads:
        for batch in batches:
            loss(model, batch).backward()
    whole = tuple(torch.cat(both) for both in zip(*batches, strict=True))
    assert_rows_close(grads.dense(), loop_gradients(model, whole, loss))


@pytest.mark.parametrize("again", [
    lambda x: x, lambda x: x + 0.1, lambda x: x.detach().clone(), lambda x: torch.cat([x[1:], x[:1]])[[2, 0, 1]]
])  # fmt: skip
def test_passes_over_one_batch_are_added_up(again: Callable[[Tensor], Tensor]) -> None:
    model, x, y = make("deep", 3)
    with record(model) as grads:
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(again(x)), y).backward()
    expected = find_expected(model, x, y), find_expected(model, again(x), y)
    assert_rows_close(grads.dense(), {key: rows + expected[1][key] for key, rows in expected[0].items()})


def test_a_pass_for_inputs_alone_ends_no_batch() -> None:
    """Adversarial examples that come from NumPy, which the recording does not see, are the same samples."""
    model, x, y = make("recurrent", 3)
    x.requires_grad_()
    with record(model) as grads:
        F.cross_entropy(model(x), y).backward(inputs=[x])
        assert x.grad is not None
        adversarial = torch.from_numpy((x + 0.1 * x.grad.sign()).detach().numpy())
        F.cross_entropy(model(adversarial), y).backward()
    assert_rows_close(grads.dense(), find_expected(model, adversarial, y))


def test_other_tensors_of_the_same_samples() -> None:
    """Two views that were made before the block: with `batch_size=` they are one batch."""
    model, x, y = make("deep", 3)
    views, labels = (x + 0.1, x - 0.1), (y.clone(), y.clone())
    with record(model, batch_size=3) as grads:
        for view, label in zip(views, labels, strict=True):
            F.cross_entropy(model(view), label).backward()
    first, second = find_expected(model, views[0], y), find_expected(model, views[1], y)
    assert_rows_close(grads.dense(), {key: rows + second[key] for key, rows in first.items()})


def clear_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("options", [{}, {"keep_grad": True}, {"positions": T}], ids=str)
@pytest.mark.parametrize("zero_grad", [
    clear_gradients,
    lambda model: model.zero_grad(),
    lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    lambda model: model.head.zero_grad(),
])  # fmt: skip
def test_rows_begin_anew_with_zero_grad(zero_grad: Callable[[Any], None], options: dict[str, Any]) -> None:
    """As `p.grad`, for each parameter by itself. A last `zero_grad()` changes nothing."""
    model, x, y = make("recurrent", 3)
    is_whole = "head" not in zero_grad.__code__.co_names
    with record(model, **options) as grads:
        attacked = x.clone().requires_grad_()
        F.cross_entropy(model(attacked), y, reduction="sum" if is_whole else "mean").backward()
        adversarial = (attacked + 0.1 * attacked.grad.sign()).detach()
        zero_grad(model)
        F.cross_entropy(model(adversarial), y).backward()
        if not options:
            zero_grad(model)
    expected, before = find_expected(model, adversarial, y), find_expected(model, x, y)
    if not is_whole:
        expected = {key: rows if "head" in key else rows + before[key] for key, rows in expected.items()}
    assert_rows_close(grads.dense(), expected)
    if "keep_grad" in options:
        torch.testing.assert_close({key: p.grad for key, p in model.named_parameters()}, grads.mean())


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, C, dtype=torch.float64))

    def score(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh().sum(1)

    forward = score


@pytest.mark.parametrize("size", [1, 3, 5])
def test_accumulated_batches_by_a_method(size: int) -> None:
    """A method that uses weights by itself may get another batch after a backward pass, which is refused."""
    model, x, _ = WithMethod(), *make("deep", 3 + size)[1:]
    first, second = x[:3].clone(), x[3:].clone()
    for call in (model, model.score):
        with pytest.raises(PerSampleError, match=r"a recording for each batch.*constants="), record(model):
            call(first).square().sum().backward()
            model.score(second).square().sum().backward()
    with record(model) as grads:
        model.score(first).square().sum().backward()
        model(second).square().sum().backward()
    assert_rows_close(grads.dense(), loop_gradients(model, x, lambda model, x: model(x).square().sum()))
    with record(model, constants=[second]) as grads:
        model(first).square().sum().backward()
        model.score(second).square().sum().backward()
    torch.testing.assert_close(
        grads.shared()["weight"], loop_gradients(model, second, lambda m, x: m(x).square().sum())["weight"].sum(0)
    )
    with record(model, batch_size=3) as grads:
        model.score(first).square().sum().backward()
        model.score(first + 1).square().sum().backward()
        model.score(first.clone()).square().sum().backward()
    assert grads.batch_size == 3


def test_steps_of_several_batches_are_refused() -> None:
    model, x, y = make("deep", 3)
    batches = x, x.clone()
    with pytest.raises(PerSampleError, match="a recording for each batch"), record(model):
        for batch in batches:
            F.cross_entropy(model(batch), y).backward()
            model.zero_grad()


class TakesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, C)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.head(image).sum(0) for image in images])


@pytest.mark.parametrize("make_options", [lambda: {}, lambda: {"coupled": "contributions"}])
def test_accumulated_batches_without_rows_are_refused(make_options: Any) -> None:
    options = make_options()
    model, x, _ = make("deep", 3)
    called = model if options else TakesList().double()
    batches = [x, x.clone()] if options else [[x[0, :2], x[1]], [x[1].clone(), x[2, :2].clone()]]
    with pytest.raises(PerSampleError, match=r"a recording for each batch.*batch_size="), record(called, **options):
        for batch in batches:
            called(batch).square().sum().backward()


@pytest.mark.parametrize("batch", [2, D])
def test_calls_without_a_batch_dimension(batch: int) -> None:
    """A sample has as many features as there are samples, or it has not: the features are no samples."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(D, C).double(), torch.randn(batch, D).double(), torch.randint(0, C, (batch,))
    for _ in range(2):
        with record(model, samples=x) as grads:
            F.cross_entropy(torch.stack([model(row) for row in x]), y).backward()
        assert_rows_close(grads.dense(), find_expected(model, x, y))
        try:
            with record(model) as grads:
                F.cross_entropy(torch.stack([model(row) for row in x]), y).backward()
        except PerSampleError:
            assert batch != D
            continue
        assert_rows_close(grads.dense(), find_expected(model, x, y))


def test_answers_between_the_parts() -> None:
    model, x, y = make("deep", 4)
    with record(model) as grads:
        F.cross_entropy(model(x[:2]), y[:2], reduction="sum").backward()
        before = grads.norms()
        F.cross_entropy(model(x[2:]), y[2:], reduction="sum").backward()
    torch.testing.assert_close(grads.norms()[:2], before)


@pytest.mark.parametrize("options", [{"keep": "norms"}, {"keep": "clip", "max_norm": 0.1}], ids=str)
def test_reduced_answers(options: dict[str, Any]) -> None:
    model, x, y = make("recurrent", 5)
    with record(model) as grads:
        join_chunks(model, x, y).backward()
    with record(model, **options) as reduced:
        join_chunks(model, x, y).backward()
    torch.testing.assert_close(reduced.norms(), grads.norms())


@pytest.mark.parametrize("options", [{"keep": "norms"}, {"units": [0, 1, 0]}, {"positions": T}], ids=str)
def test_parts_that_need_the_whole_batch(options: dict[str, Any]) -> None:
    model, x, y = make("deep", 3)
    options = {**options, "units": options["units"][:2]} if "units" in options else options
    with pytest.raises(PerSampleError, match=r"another part of the batch.*samples="), record(model, **options):
        F.cross_entropy(model(x[:2]), y[:2], reduction="sum").backward()
        F.cross_entropy(model(x[2:]), y[2:], reduction="sum").backward()


def test_units_with_declared_samples() -> None:
    model, x, y = make("deep", 4)
    with record(model, samples=x, units=[0, 1, 0, 1]) as grads:
        for part, labels in zip(x.split(2), y.split(2), strict=True):
            F.cross_entropy(model(part), labels, reduction="sum").backward()
    expected = {key: rows.view(2, 2, *rows.shape[1:]).sum(0) for key, rows in find_expected(model, x, y).items()}
    assert_rows_close(grads.dense(), expected)


def test_a_watched_model() -> None:
    model, x, y = make("convolution", 6)
    received: list[Any] = []
    watched = watch(model, received.append)
    for join in (join_halves, lambda *given: F.cross_entropy(torch.cat([model(x[:4]), model(x[4:])]), y)):
        with pytest.raises(PerSampleError, match=r"different parts of one tensor.*record"):
            join(model, x, y).backward()
    for part, labels in zip(x.split(2), y.split(2), strict=True):  # each backward pass ends a step
        F.cross_entropy(model(part), labels).backward()
    watched.stop()
    for n, grads in enumerate(received):
        own = slice(2 * n, 2 * n + 2)
        assert_rows_close(grads.dense(), find_expected(model, x[own], y[own]))
    assert len(received) == 3


def test_a_slice_of_a_data_set_is_a_batch() -> None:
    model, x, y = make("deep", 9)
    with record(model) as grads:
        F.cross_entropy(model(x[3:6]), y[3:6]).backward()
    assert_rows_close(grads.dense(), find_expected(model, x[3:6], y[3:6]))


@pytest.mark.parametrize("given", [False, True])
def test_whole_batches_are_added_up(given: bool) -> None:
    """In other memory, or if the batch size is given: a pair of calls for each sample."""
    model, x, _ = make("recurrent", 6)
    chosen, rejected = x.chunk(2) if given else (x[:3].clone(), x[3:].clone())

    def loss(model: nn.Module, pair: Any) -> Tensor:
        return -F.logsigmoid(model(pair[0]) - model(pair[1])).sum(1).mean()

    with record(model, batch_size=3 if given else None) as grads:
        loss(model, (chosen, rejected)).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, (chosen, rejected), loss))


def test_parts_that_are_combined_name_both_readings() -> None:
    model, x, _ = make("recurrent", 6)
    with pytest.raises(PerSampleError, match="whole batch, as with pairs, pass batch_size="), record(model):
        chosen, rejected = x.chunk(2)
        (model(chosen) - model(rejected)).square().sum().backward()


def test_parts_that_are_mixed_are_refused() -> None:
    model, x, y = make("recurrent", 4)
    with pytest.raises(PerSampleError, match="mixed"), record(model):
        outputs = torch.cat([model(x[:2]), model(x[2:])])
        F.cross_entropy(outputs - outputs.mean(0), y).backward()


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 5), nn.Linear(5, C)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.lstm(x, state)
        return self.head(out), state


@pytest.mark.parametrize("batch", [1, 2, 3, T, 6])
def test_segments_of_sequences_are_no_parts_of_a_batch(batch: int) -> None:
    """The batch is in dimension 1, and the calls get slices along dimension 0."""
    torch.manual_seed(0)
    model, x, y = TimeFirst().double(), torch.randn(6, batch, D).double(), torch.randint(0, C, (6, batch))
    perturb(model)

    def compute_losses(x: Tensor, y: Tensor) -> Iterator[Tensor]:
        state = None
        for start in range(0, 6, 2):
            out, state = model(x[start : start + 2], state)
            state = [each.detach() for each in state]
            yield F.cross_entropy(out.reshape(-1, C), y[start : start + 2].reshape(-1))

    with record(model, batch_dim=1) as grads:
        for loss in compute_losses(x, y):
            loss.backward()
    losses = (sum(compute_losses(x[:, n : n + 1], y[:, n : n + 1])) for n in range(batch))
    assert_rows_close(grads.dense(), stack_gradients(losses, dict(model.named_parameters())))  # type: ignore[arg-type]


def test_parts_of_a_batch_in_dimension_1() -> None:
    torch.manual_seed(0)
    model, x, y = TimeFirst().double(), torch.randn(6, 5, D).double(), torch.randint(0, C, (6, 5))
    with record(model, batch_dim=1) as grads:
        out = torch.cat([model(x[:, :2])[0], model(x[:, 2:])[0]], 1)
        F.cross_entropy(out.reshape(-1, C), y.reshape(-1)).backward()
    losses = (F.cross_entropy(model(x[:, n : n + 1])[0][:, 0], y[:, n]) for n in range(5))
    assert_rows_close(grads.dense(), stack_gradients(losses, dict(model.named_parameters())))
