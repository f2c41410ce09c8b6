"""A sample of the loader is one row of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from persample import PerSampleError
from persample.private import BatchMemoryManager, Cancelling, PrivacyEngine
from persample.private.errors import PrivateTrainingError
from persample.private.handed_out import HandedOut

pytestmark = pytest.mark.filterwarnings("ignore")
N, D = 12, 4


def make_private(dataset: Any = None, batch_size: int = 4, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(N, D), torch.randn(N, 1)) if dataset is None else dataset
    collate = options.pop("collate_fn", None)
    model = nn.Linear(D, 1)
    return PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0, noise_multiplier=0.0,
        data_loader=DataLoader(dataset, batch_size=batch_size, collate_fn=collate), loss_reduction="sum",
        **{"poisson_sampling": False, **options},
    )  # fmt: skip


def train(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "augmentations": lambda x: torch.cat([x, 1.01 * x]),
    "copies": lambda x: x.repeat(3, 1),
    "tokens": lambda x: x[:, None].expand(-1, 5, -1).reshape(-1, D),
}


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_several_rows_of_a_sample_are_refused(name: str, is_split: bool) -> None:
    model, optimizer, loader = make_private()
    before = model.weight.detach().clone()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        for x, _ in parts if is_split else loader:
            with pytest.raises(PerSampleError, match=rf"with {len(COPIES[name](x))} samples.* loader has {len(x)}"):
                train(model, optimizer, COPIES[name](x))
            if is_split:  # the loop itself would raise: a part is missing
                break
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    optimizer.release()


def test_a_refused_step_leaves_nothing_for_the_next() -> None:
    model, optimizer, loader = make_private(TensorDataset(torch.randn(N, D)), batch_size=1)
    for (x,) in loader:
        with pytest.raises(PerSampleError, match="loader has 1"):
            train(model, optimizer, torch.cat([x, x]))
        before = model.weight.detach().clone()
        train(model, optimizer, 1000 * x)
        assert float((model.weight - before).norm()) <= 1 + 1e-4
    optimizer.release()


@pytest.mark.parametrize("ahead", [1, 2, 3, 40])
def test_batches_of_other_sizes_loaded_in_advance(ahead: int) -> None:
    model, optimizer, loader = make_private(TensorDataset(torch.randn(240, D)), 6, poisson_sampling=True)
    waiting: list[Tensor] = []
    for (x,) in loader:
        waiting.append(x)
        if len(waiting) == ahead:
            train(model, optimizer, waiting.pop(0))
    for x in waiting:
        train(model, optimizer, x)
    optimizer.release()


def test_a_part_of_the_batch_may_be_used() -> None:
    model, optimizer, loader = make_private()
    for x, _ in loader:
        train(model, optimizer, x[:2])
    optimizer.release()


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, str]:
        return torch.full((1, D), float(i)), f"image {i}"


@pytest.mark.parametrize("collate", [
    lambda items: [x for x, _ in items],
    lambda items: {"images": [x for x, _ in items], "count": torch.tensor(len(items))},
    lambda items: tuple(zip(*items, strict=True)),
])  # fmt: skip
def test_lists_have_an_item_for_each_sample(collate: Any) -> None:
    model, optimizer, loader = make_private(Images(), collate_fn=collate)
    for batch in loader:
        images = batch["images"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
        train(model, optimizer, torch.cat(list(images)))
        optimizer.zero_grad()
        with pytest.raises(PerSampleError, match="loader has 4"):
            train(model, optimizer, torch.cat([*images, *images]))
    optimizer.release()


def test_samples_in_another_dimension() -> None:
    batches = HandedOut()
    batches.add({"x": torch.zeros(3, 8, 2), "y": torch.zeros(8)}, batch_dim=1)
    batches.check(8)
    with pytest.raises(PerSampleError, match="loader has 8"):
        batches.check(9)


def test_samples_in_front_that_the_loop_turns() -> None:
    """The loader hands out `(batch, time)`, and the model takes `(time, batch)`."""
    batches = HandedOut()
    batches.add([torch.zeros(8, 3)], batch_dim=1)
    batches.check(8)
    for wrong in (16, 24):
        with pytest.raises(PerSampleError, match="loader has 3"):
            batches.check(wrong)


class Unknown:
    """Holds samples in a way that only its user knows."""


@pytest.mark.parametrize("batch", ["text", Unknown(), (Unknown(), Unknown()), {"x": Unknown(), "y": torch.zeros(2)}])
def test_batches_of_unknown_size_are_not_checked(batch: Any) -> None:
    batches = HandedOut()
    batches.check(100)
    batches.add(batch)
    batches.check(100)


@pytest.mark.parametrize("batch", [
    [np.zeros((8, 3)), np.zeros((8, 1)), None, 3],
    SimpleNamespace(x=torch.zeros(8, 3), y=torch.zeros(8)),
    [torch.nested.nested_tensor([torch.zeros(i + 1, 2) for i in range(8)]), torch.zeros(8)],
], ids=["arrays", "attributes", "nested tensor"])  # fmt: skip
def test_other_kinds_of_batches(batch: Any) -> None:
    batches = HandedOut()
    batches.add(batch)
    batches.check(8)
    with pytest.raises(PerSampleError, match="loader has 8"):
        batches.check(9)


def test_two_batches_in_one_loss_are_refused() -> None:
    """Without one sample, the samples after it would share their rows with other samples of the second batch."""
    model, optimizer, loader = make_private()
    (x, _), (other, _), _ = loader
    optimizer.zero_grad()
    with pytest.raises(PerSampleError, match="samples of an earlier step"):
        (model(x).square().sum() + model(other).square().sum()).backward()
    optimizer.release()


def test_copies_are_refused_if_a_larger_batch_was_handed_out_as_well() -> None:
    model, optimizer, _ = make_private()
    small, large = torch.randn(2, D), torch.randn(8, D)
    optimizer.add_samples([small])
    optimizer.add_samples([large])
    with pytest.raises(PerSampleError, match="loader has 2"):
        train(model, optimizer, torch.cat([small, small]))
    optimizer.release()


def test_several_calls_with_the_tensors_of_one_batch() -> None:
    dataset = TensorDataset(torch.randn(N, D), torch.randn(N, D))
    model, optimizer, loader = make_private(dataset)
    for x, other in loader:
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(x) - model(other)).square().sum().backward()
        optimizer.step()
        assert 0 < float((model.weight - before).norm()) <= len(x) * (1 + 1e-4)
    optimizer.release()


def test_generated_samples_may_be_declared() -> None:
    """As in the training of a discriminator."""
    model, optimizer, loader = make_private()
    for x, _ in loader:
        before = model.weight.detach().clone()
        batch = torch.cat([1000 * x, torch.zeros(8, D)])
        optimizer.add_samples(batch)
        train(model, optimizer, batch)
        assert float((model.weight - before).norm()) <= len(x) * (1 + 1e-4)
        optimizer.zero_grad()
        with pytest.raises(PerSampleError, match="add_samples"):
            train(model, optimizer, torch.cat([batch, batch]))
    optimizer.release()


# ---- one step for each batch ----


def keep_first(loader: Any, step: Callable[[Any], None]) -> None:
    batch = next(iter(loader))
    for _ in loader:
        step(batch)


def leave_out(loader: Any, step: Callable[[Any], None]) -> None:
    for i, batch in enumerate(loader):
        if i != 1:
            step(batch)


def repeat(loader: Any, step: Callable[[Any], None]) -> None:
    for batch in loader:
        step(batch)
        step(batch)


def take_in_advance(loader: Any, step: Callable[[Any], None]) -> None:
    batches = iter(loader)
    last = next(batches)
    for batch in batches:
        step(last)
        last = batch
    step(last)


def begin_again(loader: Any, step: Callable[[Any], None]) -> None:
    for number in (0, 2):
        for i, batch in enumerate(loader):
            if i == number:
                break  # as after an error
            step(batch)


def look_at(loader: Any, step: Callable[[Any], None]) -> None:
    for _ in loader:
        pass
    for batch in loader:
        step(batch)


def evaluate_in_between(loader: Any, step: Callable[[Any], None]) -> None:
    for batch in loader:
        for _ in range(5):
            list(loader)
        step(batch)


def leave_out_and_evaluate(loader: Any, step: Callable[[Any], None]) -> None:
    for i, batch in enumerate(loader):
        list(loader)
        if i != 1:
            step(batch)


def use_the_first_again_later(loader: Any, step: Callable[[Any], None]) -> None:
    first = next(iter(loader))
    step(first)
    for _ in range(4):
        for batch in loader:
            step(batch)
    next(iter(loader))
    step(first)


# The errors with independent and with correlated noise.
LOOPS: dict[Callable[..., None], tuple[str | None, str | None]] = {
    keep_first: ("used for a step before", "used for a step before"),
    repeat: ("used for a step before", "used for a step before"),
    leave_out: ("left out", "The batch was drawn for step"),
    take_in_advance: (None, "The batch was drawn for step"),
    begin_again: (None, None),
    look_at: (None, "The batch was drawn for step"),
    evaluate_in_between: (None, "The batch was drawn for step|No batch of the loader was handed out"),
    leave_out_and_evaluate: ("left out", "The batch was drawn for step|No batch of the loader was handed out"),
    use_the_first_again_later: ("used for a step before", "used for a step before|The batch was drawn for step"),
}


@pytest.mark.parametrize("is_correlated", [False, True], ids=["independent", "correlated"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_each_batch_makes_one_step(loop: Callable[..., None], is_correlated: bool) -> None:
    error = LOOPS[loop][is_correlated]
    strategy = Cancelling(20, 4, 0.5) if is_correlated else None
    model = nn.Linear(3, 1)
    _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=10), strategy=strategy,
    )  # fmt: skip

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().sum(1).mean().backward()
        optimizer.step()

    try:
        if error is None:
            loop(loader, step)
        else:
            with pytest.raises(PrivateTrainingError, match=error):
                loop(loader, step)
    finally:
        optimizer.release()
