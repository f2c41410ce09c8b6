"""A model in private training that is monitored: the norms are those of the private recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import persample
from persample.private import PrivacyEngine
from persample.testing import loop_gradients

pytestmark = pytest.mark.filterwarnings("ignore")
D, CLASSES, SIZE = 4, 3, 24


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, D, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(SIZE) % CLASSES)


def make_private(data: TensorDataset, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    return model, lambda: PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=1.0, max_grad_norm=0.5,
        data_loader=DataLoader(data, batch_size=6), noise_generator=torch.Generator().manual_seed(0), **options,
    )  # fmt: skip


def train(made: tuple[Any, ...]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights at the end, and the norms of the samples in each step."""
    model, optimizer, loader = made
    torch.manual_seed(3)
    norms = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            if len(x):
                rows = loop_gradients(model, (x, y), nn.CrossEntropyLoss())
                norms.append(torch.cat([part.flatten(1) for part in rows.values()], 1).norm(dim=1))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, norms


@pytest.mark.parametrize("is_monitored_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"passes": 2}, {"clipping": "per_layer"}], ids=str)
def test_the_monitor_uses_the_norms_of_private_training(
    options: dict[str, Any], is_monitored_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if options.get("clipping"):
        options = {**options, "max_grad_norm": [0.2] * 4}
    data = make_data()
    _, make = make_private(data)
    expected, _ = train(make())
    model, make = make_private(data)
    made = None if is_monitored_first else make()
    with persample.monitor(model, every=1, bounds=[0.5]) as watching:
        found, norms = train(made or make())
        assert len(watching.history) == len(norms)
        for measured, own in zip(watching.history, norms, strict=True):
            assert measured.samples == len(own) and measured.noise is None
            assert measured.norms["most"] == pytest.approx(float(own.max()))
            assert measured.norms["median"] == pytest.approx(float(own.quantile(0.5)))
            assert measured.clipped == {"0.5": pytest.approx(float((own > 0.5).double().mean()))}
    torch.testing.assert_close(found, expected)
    (warning,) = [record for record in caplog.records if record.name == "persample.monitoring"]
    assert "are not private" in warning.getMessage()


def test_the_monitor_goes_on_when_private_training_ends() -> None:
    model, make = make_private(make_data())
    module, optimizer, _ = make()
    x = torch.randn(6, D, dtype=torch.float64)
    with persample.monitor(model, every=1) as watching:
        module(x)  # without a backward pass
        optimizer.release()
        for _ in range(3):
            module(x).square().mean().backward()
    assert [measured.step for measured in watching.history] == [1, 2, 3]
    assert all(measured.noise is not None for measured in watching.history)
