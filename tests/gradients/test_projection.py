"""Kronecker-factored projections of rows: unbiased, linear, divided among the parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.errors import PerSampleError
from persample.gradients.projection import make_projection
from persample.gradients.stack import Stack
from persample.terms import Dense
from persample.terms.kronecker import MIN_NUMBERS, KroneckerSketch, allocate, split_shape

CPU = torch.device("cpu")


class Reader(nn.Module):
    """Reads tokens with an embedding that is tied to the head, a recurrent layer, a convolution and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.mix = nn.Linear(6, 6, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.embedding(ids))
        h = self.conv(h.mT).mT + F.linear(h, self.mix.weight.T) + self.mix(h)
        return F.linear(self.rnn(h)[0], self.embedding.weight)


def record_reader(ids: Tensor) -> tuple[persample.PerSampleGradients, nn.Module]:
    torch.manual_seed(0)
    model = Reader().double()
    with persample.record(model) as grads:
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    return grads, model


IDS = torch.randint(11, (5, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dim", [1, 7, 40, 300, 5000])
def test_rows_are_the_projections_of_dense_rows(dim: int) -> None:
    grads, model = record_reader(IDS)
    shapes = tuple((name, p.shape) for name, p in model.named_parameters())
    dense = {name: Dense(rows) for name, rows in grads.dense().items()}
    expected = make_projection("kronecker", dim, 3, shapes, CPU).project(dense, len(IDS))
    projected = grads.project(dim, seed=3, method="kronecker")
    assert projected.dtype == torch.float64
    torch.testing.assert_close(projected, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_rows_do_not_depend_on_the_batch() -> None:
    whole, _ = record_reader(IDS)
    alone, _ = record_reader(IDS[2:3])
    torch.testing.assert_close(
        alone.project(64, method="kronecker"), whole.project(64, method="kronecker")[2:3], rtol=1e-9, atol=1e-9
    )


def test_rows_with_enough_numbers_are_exact() -> None:
    grads, model = record_reader(IDS)
    count = sum(p.numel() for p in model.parameters())
    projected = grads.project(count + 5, method="kronecker")
    torch.testing.assert_close(projected @ projected.T, grads.gram(), rtol=1e-9, atol=1e-9)
    assert not projected[:, count:].any()


def test_each_parameter_has_its_own_entries() -> None:
    grads, model = record_reader(IDS)
    blocks, whole = grads.projection_blocks(400), grads.project(400, method="kronecker")
    shapes = tuple((name, p.shape) for name, p in model.named_parameters())
    projection = make_projection("kronecker", 400, 0, shapes, CPU)
    for name, rows in grads.dense().items():
        alone = projection.project({name: Dense(rows)}, len(IDS))
        inside = torch.zeros(400, dtype=torch.bool)
        inside[blocks[name]] = True
        assert not alone[:, ~inside].any() and alone[:, inside].any()
        if list(blocks.values()).count(blocks[name]) == 1:
            torch.testing.assert_close(alone[:, inside], whole[:, inside])


@pytest.mark.parametrize(
    ("shape", "size"), [((40, 30), 24), ((50,), 9), ((20, 3, 5), 100), ((9, 200), 60), ((3, 40, 50), 16)]
)
def test_inner_products_are_unbiased(shape: tuple[int, ...], size: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, *shape, dtype=torch.float64)
    rows[1] += rows[0]
    exact = (rows[0] * rows[1]).sum()
    found = []
    for seed in range(300):
        sketch = KroneckerSketch(size, seed, "w", torch.Size(shape), CPU)
        one, other = sketch.fold(Dense(rows).multiply_sides(sketch.sides))
        found.append(one @ other)
    estimates = torch.stack(found) / exact
    assert float((estimates.mean() - 1).abs()) < 4 * float(estimates.std()) / 300**0.5
    assert float(estimates.std()) < 3 / size**0.5


@pytest.mark.parametrize("size", [1, 5, 16, 100, 1000, 10**5])
@pytest.mark.parametrize(
    "shapes",
    [
        {"w": (64, 64), "b": (64,)},
        {"w": (10, 3), "empty": (0, 4), "scalar": ()},
        {f"{i}.{kind}": shape for i in range(40) for kind, shape in (("weight", (96, 96)), ("bias", (96,)))},
    ],
)
def test_allocation(size: int, shapes: dict[str, tuple[int, ...]]) -> None:
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    slices = allocate(size, sizes)
    assert slices.keys() == {name for name, shape in sizes.items() if shape.numel()}
    different = sorted({(part.start, part.stop) for part in slices.values()})
    assert different[0][0] == 0 and all(start < stop for start, stop in different)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(different))
    assert different[-1][1] == min(size, sum(shape.numel() for shape in sizes.values()))
    shared = [name for name, part in slices.items() if list(slices.values()).count(part) > 1]
    assert len({(slices[name].start, slices[name].stop) for name in shared}) <= 1
    for name in slices.keys() - set(shared):
        own = slices[name].stop - slices[name].start
        assert own == sizes[name].numel() or own >= MIN_NUMBERS or not shared


def test_terms_are_passed_on_when_they_arrive_or_at_the_end() -> None:
    torch.manual_seed(0)
    model = Reader()
    found: list[dict[str, Tensor]] = []
    for keep in ("norms", "everything"):
        sums: dict[str, Tensor] = {}

        def receive(stack: Stack, sums: dict[str, Tensor] = sums) -> None:
            sums.update(stack.sum(torch.ones(len(IDS))))

        with persample.record(model, keep=keep) as grads:  # type: ignore[call-overload]
            if keep == "norms":
                grads.pass_terms_to(receive)
            F.cross_entropy(model(IDS[:, :-1]).mT, IDS[:, 1:], reduction="sum").backward()
        if keep == "everything":
            grads.pass_terms_to(receive)
        found.append(sums)
    expected = torch.autograd.grad(
        F.cross_entropy(model(IDS[:, :-1]).mT, IDS[:, 1:], reduction="sum"), list(model.parameters())
    )
    for sums in found:
        for (name, _), total in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(sums[name], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((5, 70000), (5, 70000)), ((4, 300, 400), (1200, 400)), ((4, 30, 40), (4, 1200))],
)
def test_split_shape(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert split_shape(torch.Size(shape)) == expected


@pytest.mark.parametrize(("dim", "method", "message"), [(0, "tensor", "positive"), (8, "dense", "one of 'tensor'")])
def test_wrong_arguments_are_refused(dim: int, method: str, message: str) -> None:
    grads, _ = record_reader(IDS)
    with pytest.raises(PerSampleError, match=message):
        grads.project(dim, method=method)  # type: ignore[arg-type]
