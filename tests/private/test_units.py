"""Private training of units: sampling, the bound of each unit, accounting, split batches, augmentations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from persample import PerSampleError
from persample.private import BatchMemoryManager, PrivacyEngine
from persample.private.units import SplitUnitSampler, UnitBatch, UnitSampler
from persample.testing.oracle import loop_gradients
from tests.support.processes import in_two_processes

pytestmark = pytest.mark.filterwarnings("ignore")
D, CLASSES = 4, 3
SIZES = [1, 5, 2, 3, 1, 4, 2, 6, 1, 3, 2, 2]  # examples of each unit


class Kept(Dataset[Any]):
    """A dataset that notes nothing but its number of examples; items are (x, y)."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, D, generator=generator, dtype=torch.float64)
        self.y = torch.arange(count) % CLASSES

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def make_private(noise: float = 0.0, bound: float = 0.3, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    names = [f"user {u}" for u, size in enumerate(SIZES) for _ in range(size)]
    order = torch.randperm(len(names)).tolist()
    names = [names[i] for i in order]
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    data, engine = Kept(len(names)), PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=noise,
        max_grad_norm=bound, data_loader=DataLoader(data, batch_size=4), unit_ids=names, **options,
    )  # fmt: skip
    return engine, *made, data, names


def find_examples(data: Kept, x: Tensor) -> list[int]:
    return [int((data.x == row).all(1).nonzero()[0]) for row in x]


def compute_expected_step(
    model: nn.Module, data: Kept, names: Sequence[Hashable], examples: list[int], bound: float, mean: bool
) -> Tensor:
    """The sum of the clipped gradients of the units, by a loop over the samples, over 4 expected units."""
    rows = loop_gradients(model, (data.x[examples], data.y[examples]), nn.CrossEntropyLoss())
    matrix = torch.cat([part.flatten(1) for part in rows.values()], 1)
    units = {names[i] for i in examples}
    total = torch.zeros(matrix.shape[1], dtype=matrix.dtype)
    for unit in units:
        own = matrix[[k for k, i in enumerate(examples) if names[i] == unit]]
        row = own.mean(0) if mean else own.sum(0)
        total += row * min(1, bound / float(row.norm()))
    return total / 4


def flatten_grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("options", [{}, {"unit_reduction": "sum"}, {"passes": 2}, {"examples_per_unit": 2}], ids=str)
def test_step_clips_the_gradient_of_each_unit(options: dict[str, Any]) -> None:
    _, model, optimizer, loader, data, names = make_private(**options)
    assert len(loader) == len(SIZES) // 4
    steps = 0
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            examples = find_examples(data, x)
            if examples:
                expected = compute_expected_step(
                    model, data, names, examples, 0.3, options.get("unit_reduction") != "sum"
                )
                optimizer.step()
                torch.testing.assert_close(flatten_grads(model), expected)
                steps += 1
            counts = Counter(names[i] for i in examples)
            limit = options.get("examples_per_unit", 99)
            assert all(n == min(limit, SIZES[int(name[5:])]) for name, n in counts.items())
    assert steps > 5


def test_accountant_counts_units() -> None:
    engine, model, optimizer, loader, *_ = make_private(noise=1.0)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    ((noise, rate, steps),) = engine.accountant.history
    assert (noise, rate, steps) == (1.0, pytest.approx(1 / 3), 3)


def test_units_are_poisson_samples() -> None:
    torch.manual_seed(0)
    sampler = UnitSampler([0, 0, 1, 2, 2, 2], batches=4)
    drawn = [{sampler.units[i] for i in batch} for _ in range(500) for batch in sampler]
    for unit in range(3):
        assert abs(sum(unit in units for units in drawn) / len(drawn) - 0.25) < 0.03
    both = sum({0, 1} <= units for units in drawn) / len(drawn)
    assert abs(both - 1 / 16) < 0.02
    assert any(not units for units in drawn)


def test_examples_of_a_unit_are_drawn_anew() -> None:
    sampler = UnitSampler([0] * 5 + [1], batches=1, examples_per_unit=2)
    drawn = [tuple(sorted(batch)) for _ in range(60) for batch in sampler]
    assert {len(batch) for batch in drawn} == {3}
    assert len(set(drawn)) > 5


def test_processes_draw_from_disjoint_units() -> None:
    units = [n % 7 for n in range(20)]
    shares = [
        {units[i] for batch in UnitSampler(units, batches=1, rank=rank, processes=2) for i in batch} for rank in (0, 1)
    ]
    assert shares[0] | shares[1] == set(range(7)) and not shares[0] & shares[1]


@in_two_processes
def test_two_processes() -> None:
    """Each process has its own units; the step has the clipped gradients of the units of both."""
    torch.manual_seed(0)
    names = [unit for unit, size in enumerate(SIZES) for _ in range(size)]
    model = DistributedDataParallel(nn.Linear(D, CLASSES).double())
    data, engine = Kept(len(names)), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.3,
        data_loader=DataLoader(data, batch_size=2), unit_ids=names,
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            examples = find_examples(data, x)
            expected = torch.zeros(D * CLASSES + CLASSES, dtype=torch.float64)
            if examples:
                expected = compute_expected_step(model.module, data, names, examples, 0.3, True)
            dist.all_reduce(expected)
            optimizer.step()
            torch.testing.assert_close(flatten_grads(model), expected)
    assert engine.accountant.history[0][1:] == (pytest.approx(1 / 3), 6)


@pytest.mark.parametrize("options", [{}, {"unit_reduction": "sum"}, {"passes": 2}], ids=str)
@in_two_processes
def test_a_unit_in_two_processes_is_bounded_as_one(options: dict[str, Any]) -> None:
    """A batch from elsewhere than the sampler, which gives each unit to one process."""
    torch.manual_seed(0)
    rank, bound, data = dist.get_rank(), 0.3, Kept(10)
    model = DistributedDataParallel(nn.Linear(D, CLASSES).double())
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=bound,
        data_loader=DataLoader(data, batch_size=2), unit_ids=[0, 0, 1, 1, 2, 3, 4, 5, 6, 7], **options,
    )  # fmt: skip
    ids = [0, 1, 1, 0, 2, 1, 1, 3, 3, 0]
    own = range(10)[:4] if rank == 0 else range(10)[4:]
    for _ in range(2):
        optimizer.zero_grad()
        batch = data.x[own.start : own.stop], data.y[own.start : own.stop]
        optimizer.add_samples(UnitBatch(torch.tensor(ids[own.start : own.stop]), batch))
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        mean = options.get("unit_reduction") != "sum"
        expected = compute_expected_step(model.module, data, ids, list(range(10)), bound, mean)
        optimizer.step()
        torch.testing.assert_close(flatten_grads(model), expected)


@pytest.mark.parametrize("limit", [6, 7, 100])
def test_split_batches_have_whole_units(limit: int) -> None:
    _, model, optimizer, loader, data, names = make_private()
    steps, examples = 0, []
    for _ in range(4):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                assert len(x) <= limit
                before = flatten_parameters(model)
                examples += find_examples(data, x)
                expected = compute_expected_step(model, data, names, examples, 0.3, True) if examples else None
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    steps += 1
                    if expected is not None:
                        torch.testing.assert_close(before - flatten_parameters(model), expected)
                    examples = []
    assert steps == 4 * len(loader)


def flatten_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_split_units_are_refused() -> None:
    with pytest.raises(PerSampleError, match="examples_per_unit"):
        SplitUnitSampler(UnitSampler([0, 0, 0, 1], batches=1), 2, lambda skip: None)


def test_bound_holds_for_units_whose_samples_cancel() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    x = torch.randn(1, 64).repeat(2, 1) * torch.tensor([[1.0], [1.0001]])
    y = model(x).detach() + 1e6 * torch.tensor([[1.0], [-1.0]])
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1), unit_ids=["a", "a"], unit_reduction="sum",
    )[0:3]  # fmt: skip
    for a, b in loader:
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        optimizer.step()
    assert 0.5 < flatten_grads(model).norm() <= 1 + 1e-4


CHANGES: dict[str, tuple[Any, Any]] = {
    "as it is": (lambda x: x, lambda ids: ids),
    "shuffled": (lambda x: x[torch.arange(len(x)).flip(0)], lambda ids: ids[::-1]),
    "other dtype": (lambda x: x.float().to(x.dtype), lambda ids: ids),
    "a part": (lambda x: x[1:], lambda ids: ids[1:]),
    "repeated": (lambda x: torch.cat([x, x]), lambda ids: ids * 2),
    "repeated side by side": (lambda x: x.repeat_interleave(2, 0), lambda ids: [i for i in ids for _ in range(2)]),
}


@pytest.mark.parametrize("name", [*CHANGES, "sorted"])
def test_units_follow_their_rows(name: str) -> None:
    """Whatever a loop does to the order of a batch by functions of torch, each row keeps its unit."""
    _, model, optimizer, _, data, _ = make_private(unit_reduction="sum")
    x, y, ids = data.x[:6], data.y[:6], [0, 0, 0, 1, 1, 2]
    optimizer.add_samples(UnitBatch(torch.tensor(ids), (x, y)))
    if name == "sorted":
        order = x[:, 0].argsort()
        x, y, ids = x[order], y[order], [ids[i] for i in order.tolist()]
    else:
        change, change_ids = CHANGES[name]
        x, y, ids = change(x), change(y), change_ids(ids)
    rows = loop_gradients(model, (x, y), F.cross_entropy)
    F.cross_entropy(model(x), y).backward()
    flat = torch.cat([part.flatten(1) for part in rows.values()], 1)
    units = torch.zeros(3, flat.shape[1], dtype=flat.dtype).index_add(0, torch.tensor(ids), flat)
    clipped = (units * (0.3 / units.norm(dim=1).clamp(min=1e-9)).clamp(max=1)[:, None]).sum(0)
    optimizer.step()
    optimizer.release()
    torch.testing.assert_close(4 * flatten_grads(model), clipped)


def test_rows_that_cannot_be_followed_are_refused() -> None:
    _, model, optimizer, loader, *_ = make_private()
    x, _ = next(iter(loader))
    with pytest.raises(PerSampleError, match="not known which samples"):
        model(torch.from_numpy(x.numpy()[::-1].copy()))
    optimizer.release()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poisson_sampling": False}, "poisson_sampling"),
        ({"examples_per_unit": 0}, "positive"),
        ({"unit_ids": ["a"]}, "1 ids"),
        ({"unit_ids": None, "examples_per_unit": 2}, "requires unit_ids"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(D, CLASSES).double()
    arguments = {"unit_ids": list(range(8)), **options}
    with pytest.raises(PerSampleError, match=message):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(Kept(8), batch_size=4), **arguments,
        )  # fmt: skip


# ---- augmentations ----


class Augmented(Kept):
    """Four noisy copies of each example."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.arange(4.0).view(4, 1), y


def make_augmented() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, data = nn.Linear(D, CLASSES).double(), Augmented(12)
    return PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.1,
        data_loader=DataLoader(data, batch_size=6), units=4,
    )  # fmt: skip


def test_mean_over_the_augmentations_of_an_example_is_clipped() -> None:
    model, optimizer, loader = make_augmented()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.flatten(0, 1)), y.repeat_interleave(4)).backward()
        rows = loop_gradients(model, (x.flatten(0, 1), y.repeat_interleave(4)), nn.CrossEntropyLoss())
        optimizer.step()
        means = torch.cat([part.flatten(1) for part in rows.values()], 1).unflatten(0, (-1, 4)).mean(1)
        expected = (means * (0.1 / means.norm(dim=1)).clamp(max=1)[:, None]).sum(0) / 6
        torch.testing.assert_close(flatten_grads(model), expected)


def test_other_numbers_of_augmentations_are_refused() -> None:
    model, _, loader = make_augmented()
    x, _ = next(iter(loader))
    with pytest.raises(PerSampleError, match="units=4"):
        model(x[:, :2].flatten(0, 1))


def test_a_batch_after_one_that_was_given_up_has_its_own_units() -> None:
    _, model, optimizer, _, data, _ = make_private(unit_reduction="sum")
    x, y = data.x[:6], data.y[:6]
    rows = loop_gradients(model, (x, y), F.cross_entropy)
    for units in ([0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]):
        optimizer.add_samples(UnitBatch(torch.tensor(units), (x, y)))
        output = model(x)  # the one before is alive
    F.cross_entropy(output, y).backward()
    norms = torch.cat([part.flatten(1) for part in rows.values()], 1).norm(dim=1)
    factors = (0.3 / norms).clamp(max=1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.einsum("n,n...->...", factors, rows[name]))
    optimizer.release()


def test_rows_of_a_parameter_without_a_gradient_are_those_of_units() -> None:
    model = nn.ModuleList([nn.Linear(D, 2), nn.Linear(D, 2)]).double()
    model.forward = lambda x: model[0](x)
    made = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.3,
        data_loader=DataLoader(TensorDataset(torch.randn(8, D).double()), batch_size=4),
        unit_ids=[0, 0, 1, 1, 2, 2, 3, 3], grad_samples=True,
    )  # fmt: skip
    _, optimizer, _ = made
    x = torch.randn(6, D).double()
    optimizer.add_samples(UnitBatch(torch.tensor([0, 0, 1, 1, 2, 2]), x))
    model(x).square().mean().backward()
    assert [len(rows) for rows in optimizer.grad_samples] == [3, 3, 3, 3]
    optimizer.release()
