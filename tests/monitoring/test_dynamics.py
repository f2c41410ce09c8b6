"""dynamics(): the columns equal a loop over steps and samples, and a scan of them can be reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import PerSampleError
from persample.testing import loop_gradients

pytestmark = pytest.mark.quick

COUNT, SIZE, CLASSES = 12, 4, 3


def make_data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    return model, torch.randn(COUNT, 4).double(), torch.randint(CLASSES, (COUNT,))


def train(epochs: int = 4, state: Any = None, name: Any = int, **options: Any) -> persample.Dynamics:
    model, x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    torch.manual_seed(1)
    with persample.dynamics(model, **options) as found:
        if state is not None:
            found.load_state_dict(state)
        for _ in range(epochs):
            for ids in torch.randperm(COUNT).split(SIZE):
                found.ids = [name(i) for i in ids.tolist()]
                logits = model(x[ids])
                found.note(logits, y[ids])
                optimizer.zero_grad()
                F.cross_entropy(logits, y[ids]).backward()
                optimizer.step()
    return found


def compute_columns_by_loop(epochs: int = 4) -> dict[str, Tensor]:
    model, x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    seen: dict[int, list[dict[str, float]]] = {i: [] for i in range(COUNT)}
    torch.manual_seed(1)
    for _ in range(epochs):
        for ids in torch.randperm(COUNT).split(SIZE):
            rows = loop_gradients(model, (x[ids], y[ids]), nn.CrossEntropyLoss())
            matrix = torch.cat([part.flatten(1) for part in rows.values()], 1)
            logits = model(x[ids])
            outputs = logits.detach()
            for n, i in enumerate(ids.tolist()):
                others = matrix.sum(0) - matrix[n]
                label = int(y[i])
                rest = [float(outputs[n, c]) for c in range(CLASSES) if c != label]
                found = {"margin": float(outputs[n, label]) - max(rest), "p": float(outputs[n].softmax(0)[label])}
                found["cosine"] = float(F.cosine_similarity(matrix[n], others, dim=0))
                seen[i].append({**found, "norm": float(matrix[n].norm()), "right": float(found["margin"] > 0)})
            optimizer.zero_grad()
            F.cross_entropy(logits, y[ids]).backward()
            optimizer.step()

    def collect(name: str) -> Tensor:
        return torch.tensor([[one[name] for one in seen[i]] for i in range(COUNT)], dtype=torch.float64)

    right = collect("right")
    return {
        "label": y.double(),
        "norm": collect("norm")[:, -1],
        "loss": -collect("p")[:, -1].log(),
        "aum": collect("margin").mean(1),
        "forgetting": (right[:, :-1] * (1 - right[:, 1:])).sum(1),
        "confidence": collect("p").mean(1),
        "variability": collect("p").var(1, correction=0).sqrt(),
        "correctness": right.mean(1),
        "coherence": collect("cosine").mean(1),
    }


def test_columns_equal_a_loop() -> None:
    found = train()
    order = torch.tensor(found.seen).argsort()
    expected = compute_columns_by_loop()
    assert float(expected["forgetting"].sum()) > 0
    for name, column in expected.items():
        torch.testing.assert_close(found.columns()[name][order], column, rtol=1e-6, atol=1e-8, msg=name)


def test_checkpoints_keep_the_columns() -> None:
    state = train().state_dict()
    restored = train(epochs=0, state=state)
    for name, column in restored.columns().items():
        torch.testing.assert_close(column, train().columns()[name], msg=name)


def test_gradients_may_be_measured_in_some_steps() -> None:
    found = train(epochs=1, every=3)
    assert int(found.columns()["norm"].isnan().sum()) == COUNT - SIZE
    assert not found.columns()["aum"].isnan().any()


@pytest.mark.parametrize("name", [int, "case {}".format])
def test_a_scan_of_the_run_is_ranked_and_reported(name: Any, tmp_path: Path) -> None:
    found = train(name=name).write(tmp_path / "run", classes=["a", "b", "c"])
    assert len(found) == COUNT and {"aum", "forgetting", "coherence"} <= {*found.columns}
    aum = torch.from_numpy(found.column("aum"))
    assert int(found.ranked("aum", k=1).ids[0]) == int(aum.argmin())
    assert float(found.column("label").sum()) == float(make_data()[2].sum())
    text = found.report().read_text()
    assert "aum" in text and "forgetting" in text
    with pytest.raises(PerSampleError, match="contains no scan"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full/file").write_text("")
        train(epochs=1).write(tmp_path / "full")


def test_outputs_need_ids_and_two_dimensions() -> None:
    model, x, y = make_data()
    with persample.dynamics(model) as found:
        with pytest.raises(PerSampleError, match="set `ids`"):
            found.note(model(x), y)
        found.ids = range(COUNT)
        with pytest.raises(PerSampleError, match="needs logits"):
            found.note(model(x)[:, 0], y)
