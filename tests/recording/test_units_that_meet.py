"""Rows of units whose samples are combined: pairs in one call, augmentations that are averaged, bags of instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, SamplesMixed, record
from persample.testing.oracle import assert_rows_close, loop_gradients, perturb, stack_gradients

pytestmark = pytest.mark.quick

D, C, K = 4, 3, 3

# The loss of some units, given the model, their samples, a target of each unit and the unit of each sample.
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]


class Averaging(Net):
    """Averages the features of the augmentations of an example."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h.view(-1, K, 6).mean(1))  # type: ignore[no-any-return]


class Joining(Net):
    """Gives the features of all augmentations of an example to one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(K * 6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().view(-1, K * 6))  # type: ignore[no-any-return]


class Attending(Net):
    """Lets the instances of a bag attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().unflatten(0, (-1, K))
        return self.last(F.scaled_dot_product_attention(h, h, h)).sum(1)  # type: ignore[no-any-return]


def make_model(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    model = kind().double()
    perturb(model)
    return model


def split(outputs: Tensor) -> tuple[Tensor, Tensor]:
    first, second = outputs.sum(-1).chunk(2)
    return first, second


def prefer(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    chosen, rejected = split(model(x))
    return -F.logsigmoid(chosen - rejected - y).mean()


def prefer_by_slices(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    outputs, half = model(x), len(x) // 2
    return (outputs[:half] - outputs[half:]).square().sum() / len(y)


def prefer_sum(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    chosen, rejected = split(model(x))
    return -(F.logsigmoid(chosen - rejected) * y).sum()


def prefer_and_imitate(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    """The mean over the pairs and a mean over all samples."""
    outputs = model(x)
    chosen, rejected = split(outputs)
    return -F.logsigmoid(chosen - rejected).mean() + 0.1 * outputs.square().mean()


def prefer_by_view(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    both = model(x).view(2, -1, C)
    return (both[0] * both[1]).sum(-1).tanh().mean()


def contrast(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    first, second = F.normalize(model(x), dim=-1).chunk(2)
    return -(first @ second.T).diagonal().mean()


def prefer_neighbours(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    outputs = model(x)
    return (outputs[0::2] - outputs[1::2]).square().sum(1).mean()


PAIRS: dict[str, Loss] = {
    "preferences": prefer,
    "slices": prefer_by_slices,
    "a sum": prefer_sum,
    "with a mean over samples": prefer_and_imitate,
    "a view": prefer_by_view,
    "the diagonal of all pairs": contrast,
}


def classify(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    """The mean of the predictions for the augmentations."""
    return F.cross_entropy(model(x).view(len(y), -1, C).mean(1), (y > 0).long())


def agree(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    """Predictions for the augmentations of an example are to agree."""
    outputs = model(x).unflatten(0, (len(y), -1)).log_softmax(-1)
    return (outputs - outputs.mean(1, keepdim=True)).square().sum((1, 2)).mean()


def pick_largest(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    """The loss of the instance with the largest score, as for bags."""
    return F.mse_loss(model(x).sum(1).view(len(y), -1).amax(1), y)


CONSECUTIVE: dict[str, Loss] = {
    "averaged predictions": classify,
    "agreement": agree,
    "largest score": pick_largest,
}


def average_outputs(model: nn.Module, x: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    """The model combines the samples."""
    return F.mse_loss(model(x).sum(1), y)


def run(kind: type[nn.Module], loss: Loss, unit: Sequence[int], units: Any, count: int) -> Any:
    """The rows of two steps (in the second one, small uses are stacked), compared with a loop over the units."""
    model, of_sample = make_model(kind), torch.tensor(unit)
    x, y = torch.randn(len(unit), D).double(), torch.randn(count).double()
    losses = [
        loss(model, x[of_sample == u], y[u : u + 1], torch.zeros(int((of_sample == u).sum())).long())
        for u in range(count)
    ]
    expected = stack_gradients(iter(losses), dict(model.named_parameters()))
    for _ in range(2):
        with record(model, units=units) as grads:
            loss(model, x, y, of_sample).backward()
        assert_rows_close(grads.dense(), expected)
    return grads


@pytest.mark.parametrize("count", [3, D, 5])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_in_one_call(name: str, count: int) -> None:
    unit = [*range(count)] * 2
    grads = run(Net, PAIRS[name], unit, torch.tensor(unit), count)
    assert grads.loss_reduction.split()[0] == ("sum" if "sum" in name else "mean")
    assert grads.verification.startswith("verified")


@pytest.mark.parametrize("count", [3, K, 5])
def test_neighbours_as_pairs(count: int) -> None:
    run(Net, prefer_neighbours, [n // 2 for n in range(2 * count)], 2, count)


@pytest.mark.parametrize("count", [K, D, 5])
@pytest.mark.parametrize("name", CONSECUTIVE)
def test_augmentations(name: str, count: int) -> None:
    run(Net, CONSECUTIVE[name], [n // K for n in range(K * count)], K, count)


@pytest.mark.parametrize("count", [K, D, 5])
@pytest.mark.parametrize("kind", [Averaging, Joining, Attending])
def test_a_model_that_combines_augmentations(kind: type[nn.Module], count: int) -> None:
    grads = run(kind, average_outputs, [n // K for n in range(K * count)], K, count)
    assert grads.verification == "not verified: the model combines samples of one unit"


@pytest.mark.parametrize("options", [{"keep": "norms"}, {"keep": "clip", "max_norm": 0.1}], ids=str)
def test_reduced_answers(options: dict[str, Any]) -> None:
    model, x, y = make_model(), torch.randn(8, D).double(), torch.randn(4).double()
    unit = torch.arange(4).repeat(2)
    with record(model, units=unit) as grads:
        prefer(model, x, y, unit).backward()
    with record(model, units=unit, **options) as reduced:
        prefer(model, x, y, unit).backward()
    torch.testing.assert_close(reduced.norms(), grads.norms())


def test_own_divisors_of_pairs() -> None:
    """The pairs have different numbers of entries."""
    model, x, unit = make_model(), torch.randn(6, D).double(), torch.arange(3).repeat(2)
    valid = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()

    def loss(x: Tensor, valid: Tensor) -> Tensor:
        (first, second), (one, other) = model(x).chunk(2), valid.chunk(2)
        mask = one & other
        return ((first - second).square() * mask).sum() / mask.sum()

    rows = stack_gradients((loss(x[n::3], valid[n::3]) for n in range(3)), dict(model.named_parameters()))
    with record(model, units=unit, divisor="own") as grads:
        loss(x, valid).backward()
    assert_rows_close(grads.dense(), rows)
    with record(model, units=unit) as grads:
        loss(x, valid).backward()
    shares = 3 * torch.tensor([3, 1, 1]).double() / 5
    assert_rows_close(
        grads.dense(), {name: row * shares.view(-1, *[1] * (row.dim() - 1)) for name, row in rows.items()}
    )


def test_samples_of_different_units_may_not_meet() -> None:
    model, x, y = make_model(), torch.randn(8, D).double(), torch.randn(4).double()
    unit = torch.tensor([0, 1, 2, 3, 0, 2, 1, 3])
    with pytest.raises(SamplesMixed, match="different orders"), record(model, units=unit):
        prefer(model, x, y, unit).backward()
    with pytest.raises(SamplesMixed), record(model, units=2):
        (model(x) - model(x).view(2, 4, C).mean(1).repeat_interleave(4, 0)).square().sum().backward()


def test_the_mean_over_samples_that_meet_is_refused() -> None:
    model, x, y = make_model(), torch.randn(8, D).double(), torch.randn(4).double()
    unit = torch.arange(4).repeat(2)
    with (
        pytest.raises(PerSampleError, match=r"unit_reduction='mean'.*Leave unit_reduction out"),
        record(model, units=unit, unit_reduction="mean"),
    ):
        prefer(model, x, y, unit).backward()


def test_units_whose_samples_do_not_meet_are_sums_of_rows() -> None:
    """A margin under no_grad, for a log, changes nothing."""
    model, x, y = make_model(), torch.randn(8, D).double(), torch.randint(0, C, (8,))
    with record(model, units=torch.arange(4).repeat(2)) as grads:
        outputs = model(x)
        with torch.no_grad():
            chosen, rejected = split(outputs)
            assert (chosen - rejected).mean().item() < 100
        F.cross_entropy(outputs, y).backward()
    rows = loop_gradients(model, (x, y), nn.CrossEntropyLoss())
    assert_rows_close(grads.dense(), {name: row[:4] + row[4:] for name, row in rows.items()})


AUGMENTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "repeat_interleave": (lambda x: x.repeat_interleave(K, 0), f"units={K}"),
    "expand": (lambda x: x[:, None].expand(-1, K, -1).reshape(-1, D), f"units={K}"),
    "repeat": (lambda x: x.repeat(K, 1), rf"units=torch.arange\(4\).repeat\({K}\)"),
    "cat": (lambda x: torch.cat([x, x + 1, 2 * x]), rf"units=torch.arange\(4\).repeat\({K}\)"),
}


@pytest.mark.parametrize("name", AUGMENTED)
def test_without_units_an_error_names_them(name: str) -> None:
    augment, advice = AUGMENTED[name]
    model, x, y = make_model(), torch.randn(4, D).double(), torch.randn(4).double()
    shape = (K, 4, C) if "repeat(" in advice or "repeat\\(" in advice else (4, K, C)
    with pytest.raises(SamplesMixed, match=advice), record(model):
        outputs = model(augment(x)).view(shape).mean(shape.index(K))
        F.mse_loss(outputs.sum(1), y).backward()
    with record(model) as grads:
        model(augment(x)).square().sum().backward()
    assert len(grads) == 4 * K
