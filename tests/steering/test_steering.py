"""Selection, aggregation and accumulation equal the same on dense rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import PerSampleError
from persample.monitoring import NoiseScale
from persample.steering import (
    AccumulationScheduler,
    avoid_conflicts,
    median_of_means,
    normalise,
    select,
    trim,
    weighted_sum,
)
from persample.steering.aggregation import find_conflict_free_weights, find_median_weights

pytestmark = pytest.mark.quick

SIZE = 9


def record(seed: int = 0, **options: Any) -> tuple[Any, Tensor]:
    """A recording and its rows as a matrix."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(SIZE, 4).double(), torch.randint(3, (SIZE,))
    with persample.record(model, **options) as grads:
        F.cross_entropy(model(x), y).backward()
    return grads, torch.cat([part.flatten(1) for part in grads.dense().values()], 1)


def flatten(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


# ---- selection ----


@pytest.mark.parametrize("count", [1, 4, SIZE])
@pytest.mark.parametrize("diversity", [0.0, 1.0, 3.0])
def test_selection_equals_a_greedy_loop(count: int, diversity: float) -> None:
    grads, rows = record()
    direction = {name: torch.randn_like(part) for name, part in grads.mean().items()}
    values, target = rows @ flatten(direction), []
    factor = diversity / count

    def gain(i: int) -> float:
        similar = sum((rows[i] @ rows[k] for k in target), rows[i] @ rows[i] / 2)
        return float(values[i] - factor * similar)

    for _ in range(count):
        target.append(max((i for i in range(SIZE) if i not in target), key=gain))
    assert select(grads, count, direction, diversity).tolist() == target


def test_copies_of_an_example_are_chosen_later() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.eye(4).double()[[0, 0, 0, 1, 2]]
    with persample.record(model) as grads:
        (model(x) * torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0])[:, None]).sum().backward()
    direction = {"weight": torch.ones(1, 4).double()}
    assert set(select(grads, 3, direction, 0.0).tolist()) == {0, 1, 2}
    assert set(select(grads, 3, direction, 1.0).tolist()) >= {3, 4}


def test_the_mean_of_the_choice_comes_close_to_the_direction() -> None:
    grads, rows = record()
    direction = {name: part / 3 for name, part in grads.mean().items()}
    wanted = flatten(direction)
    chosen = rows[select(grads, 3, direction, 1.0)].mean(0)
    pairs = torch.combinations(torch.arange(SIZE), 3)
    errors = (rows[pairs].mean(1) - wanted).norm(dim=1)
    assert float((chosen - wanted).norm()) <= float(errors.quantile(0.1))


def test_the_gradient_of_a_choice_needs_no_second_pass() -> None:
    grads, rows = record()
    chosen = torch.tensor([4, 1, 7])
    torch.testing.assert_close(flatten(weighted_sum(grads, chosen)), rows[chosen].mean(0))
    weights = torch.tensor([0.5, 2.0, -1.0])
    torch.testing.assert_close(flatten(weighted_sum(grads, chosen, weights)), weights.double() @ rows[chosen])


def test_a_choice_of_more_than_the_pool_is_refused() -> None:
    with pytest.raises(PerSampleError, match="count must be between 1 and the 9 rows"):
        select(record()[0], SIZE + 1)


# ---- aggregation ----


def test_normalised_rows_count_alike() -> None:
    grads, rows = record()
    torch.testing.assert_close(normalise(grads) @ rows, (rows / rows.norm(dim=1, keepdim=True)).mean(0))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_trimmed_mean(share: float) -> None:
    grads, rows = record()
    kept = (rows - rows.mean(0)).norm(dim=1).argsort()[: max(1, SIZE - int(share * SIZE))]
    torch.testing.assert_close(trim(grads, share) @ rows, rows[kept].mean(0))


@pytest.mark.parametrize("groups", [1, 3, 4, SIZE])
def test_median_of_means(groups: int) -> None:
    grads, rows = record()
    found = median_of_means(grads, groups) @ rows
    means = torch.stack([rows[i::groups].mean(0) for i in range(groups)])

    def measure(point: Tensor) -> float:
        return float((means - point).norm(dim=1).sum())

    assert all(measure(found) <= measure(found + 1e-3 * torch.randn_like(found)) + 1e-9 for _ in range(50))


def test_half_of_the_rows_may_be_wrong() -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 5).double() * 0.1 + 1
    rows[:4] = 1e6 * torch.randn(4, 5).double()
    found = find_median_weights(rows @ rows.mT) @ rows
    assert float((found - 1).norm()) < 1


@pytest.mark.parametrize("seed", range(6))
def test_conflict_free_sum_is_the_projection_on_the_dual_cone(seed: int) -> None:
    """It has no conflict with a row; and it differs from the mean only by rows that it is orthogonal to."""
    torch.manual_seed(seed)
    rows = torch.randn(4, 3 + seed).double()
    weights = find_conflict_free_weights(rows @ rows.mT, torch.full((4,), 1 / 4).double())
    found, extra = weights @ rows, weights - 1 / 4
    scale = float(rows.norm() ** 2)
    assert bool((rows @ found >= -1e-6 * scale).all()) and bool((extra >= 0).all())
    assert bool(((rows @ found * extra).abs() < 1e-6 * scale).all())


def test_rows_without_conflict_keep_their_mean() -> None:
    rows = torch.rand(4, 5).double()
    mean = torch.full((4,), 0.25).double()
    torch.testing.assert_close(find_conflict_free_weights(rows @ rows.mT, mean), mean)


def test_units_and_losses_are_combined_without_conflict() -> None:
    grads, rows = record(units=[0, 0, 0, 1, 1, 1, 2, 2, 2])
    weights = avoid_conflicts(grads)
    assert weights.shape == (3,) and bool((rows @ flatten(grads.sum(weights)) > -1e-6).all())
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2).double(), torch.randn(6, 4).double()
    with persample.record(model, losses=["first", "second"]) as found:
        out = model(x)
        out[:, 0].square().mean().backward(retain_graph=True)
        (-2 * out[:, 0].square() + out[:, 1]).mean().backward()
    combined = flatten(found.mean(avoid_conflicts(found)))
    for name in found:
        assert float(flatten(found[name].mean()) @ combined) > -1e-6


# Properties of aggregators of Jacobians (Quinton and Rey, 2024), on losses that are linear in the weights, so that the
# rows of the Jacobian are chosen freely.


class Jacobian(nn.Module):
    """Losses with a given Jacobian: the row of sample n is row n."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width).double())

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


def aggregate(name: str, rows: Tensor) -> Tensor:
    model = Jacobian(rows.shape[1])
    with persample.record(model) as grads:
        model(rows).sum().backward()
    return AGGREGATORS[name](grads) @ rows


AGGREGATORS: dict[str, Any] = {
    "conflict-free mean": avoid_conflicts,
    "conflict-free rows": lambda grads: avoid_conflicts(grads, each=True),
    "normalise": normalise,
    "trim": lambda grads: trim(grads, 0.3),
    "median of means": lambda grads: median_of_means(grads, grads.row_count),
}
SHAPES = [(1, 3), (2, 1), (3, 2), (4, 9), (5, 5)]


def draw_jacobian(shape: tuple[int, int], kind: str) -> Tensor:
    torch.manual_seed(sum(shape))
    rows = torch.randn(*shape).double()
    return {
        "random": rows,
        "opposite": torch.cat([rows, -rows]),
        "low rank": rows[:, :1] @ torch.randn(1, shape[1]).double(),
        "zero": torch.zeros_like(rows),
        "ill-scaled": rows * torch.logspace(-3, 3, len(rows)).double()[:, None],
    }[kind]


KINDS = ["random", "opposite", "low rank", "zero", "ill-scaled"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["conflict-free mean", "conflict-free rows"])
def test_no_row_conflicts_with_the_sum(name: str, shape: tuple[int, int], kind: str) -> None:
    rows = draw_jacobian(shape, kind)
    found = aggregate(name, rows)
    assert bool((rows @ found >= -1e-6 * rows.norm(dim=1) * max(float(rows.norm()), 1e-12)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_order_of_the_rows_does_not_matter(name: str, shape: tuple[int, int], kind: str) -> None:
    rows = draw_jacobian(shape, kind)
    if name == "trim" and kind == "opposite":
        pytest.skip("the distances of a row and of its opposite are equal")
    order = torch.randperm(len(rows))
    scale = max(float(rows.norm()), 1e-12)
    torch.testing.assert_close(aggregate(name, rows[order]), aggregate(name, rows), rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_common_scale_passes_through(name: str, shape: tuple[int, int]) -> None:
    """All but normalised rows, which have no scale."""
    rows = draw_jacobian(shape, "random")
    factor = 1.0 if name == "normalise" else 7.0
    torch.testing.assert_close(aggregate(name, 7 * rows), factor * aggregate(name, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 2), (3, 4), (4, 3)])
def test_projected_rows_are_linear_under_scaling(shape: tuple[int, int]) -> None:
    """The result is linear in the scales of the rows, in contrast to that of the projected mean."""
    rows = draw_jacobian(shape, "random")
    a, b = torch.rand(len(rows)).double() + 0.1, torch.rand(len(rows)).double() + 0.1

    def compute(scales: Tensor) -> Tensor:
        return aggregate("conflict-free rows", scales[:, None] * rows)

    torch.testing.assert_close(compute(2 * a + 3 * b), 2 * compute(a) + 3 * compute(b), rtol=1e-5, atol=1e-6)


# ---- accumulation ----


@dataclass
class Watching:
    noise_scale: NoiseScale | None


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (None, [1, 1]),
        (NoiseScale(64.0, 50.0, 80.0, 9), [2, 4, 8, 8]),
        (NoiseScale(1.0, 0.5, 2.0, 9), [1, 1]),
        (NoiseScale(None, 40.0, math.inf, 9), [2, 4, 5, 5]),
        (NoiseScale(1e6, 1e5, 1e7, 9), [2, 4, 8, 16, 16]),
    ],
)
def test_batches_follow_the_noise_scale(scale: NoiseScale | None, expected: list[int]) -> None:
    scheduler = AccumulationScheduler(Watching(scale), batch_size=8, most=16)  # type: ignore[arg-type]
    assert [scheduler.step() for _ in expected] == expected


def test_batches_become_fewer_again() -> None:
    watching = Watching(NoiseScale(64.0, 50.0, 80.0, 9))
    scheduler = AccumulationScheduler(watching, batch_size=8, most=16)  # type: ignore[arg-type]
    for _ in range(4):
        scheduler.step()
    watching.noise_scale = NoiseScale(8.0, 6.0, 9.0, 9)
    assert [scheduler.step() for _ in range(4)] == [4, 2, 1, 1]
