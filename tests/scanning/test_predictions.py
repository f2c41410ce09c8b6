"""What the model says about each example: columns of the table compared with a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.scanning.examples import say_opinion
from persample.scanning.predictions import Outputs, find_logits
from persample.scanning.suggestions import (
    Opinion,
    choose_checkpoints,
    combine_checkpoints,
    compute_confidence,
    compute_fit,
    suggest_labels,
)
from tests.support.scans import QUICK, assert_near, build, read_files

N = 23


def make_net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def make_data(kind: str = "classes") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 6, generator=generator, dtype=torch.float64) * 2
    targets = {
        "classes": torch.randint(3, (N,), generator=generator),
        "numbers": torch.randn(N, generator=generator, dtype=torch.float64),
        "binary": torch.randint(2, (N,), generator=generator).double(),
        "labels": torch.randint(2, (N, 4), generator=generator).double(),
    }
    return x, targets[kind]


class Wrapped(nn.Module):
    """A model that returns a dict, a tuple or an object with logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = make_net(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        return {"dict": {"hidden": x, "logits": logits}, "tuple": (logits, x)}[self.kind]


def change_in_place(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    loss = F.cross_entropy(logits, batch[1], reduction="none")
    logits.detach().zero_()
    return loss


LOSSES: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1),
    "function": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    "mean": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "focal": lambda m, b: (1 - (c := F.cross_entropy(m(b[0]), b[1], reduction="none")).neg().exp()) ** 2 * c,
    "log probabilities": lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1], reduction="none"),
    "in place": change_in_place,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_predicted_classes_match_loop(loss: str, tmp_path: Path) -> None:
    net, (x, y) = make_net(), make_data()
    options = {**QUICK, "batch_size": N}  # of a user's loss, the first batch must show what it compares
    found = persample.scan(net, LOSSES[loss], (x, y), out=tmp_path, classes=["a", "b", "c"], **options)
    probabilities = torch.stack([net(x[i : i + 1])[0].softmax(0) for i in range(N)]).detach()
    table = found.table().to_pydict()
    assert table["predicted"] == probabilities.argmax(1).tolist()
    assert table["predicted_class"] == ["abc"[i] for i in table["predicted"]]
    assert_near(found.column("probability"), probabilities.amax(1).float().double())
    assert_near(found.column("given_probability"), probabilities[torch.arange(N), y].float().double())
    assert_near(found.column("el2n"), (probabilities - F.one_hot(y, 3)).norm(dim=1).float().double())
    limits = [probabilities[y == c, c].mean() for c in range(3)]
    for i, given in enumerate(y.tolist()):
        others = [c for c in range(3) if c != given]
        best = max(others, key=lambda c: probabilities[i, c])
        is_better = probabilities[i, best] > probabilities[i, given] and probabilities[i, best] >= limits[best]
        assert table["suggested"][i] == (best if is_better else None)
        assert table["suggested_class"][i] == ("abc"[best] if is_better else None)
    assert any(s is not None for s in table["suggested"])


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_logits_in_structured_outputs(kind: str) -> None:
    model, data = Wrapped(kind), make_data()

    def compute_losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(find_logits(model(batch[0])), batch[1], reduction="none")  # type: ignore[arg-type]

    found = persample.scan(model, compute_losses, data, **QUICK)
    assert found.column("predicted").tolist() == model.net(data[0]).argmax(1).tolist()


@pytest.mark.parametrize(
    ("loss_fn", "shape"),
    [(nn.MSELoss(), (N, 1)), (F.l1_loss, (N,)), (lambda m, b: (m(b[0])[:, 0] - b[1]).square(), (N,))],
)
def test_predicted_numbers_match_loop(loss_fn: Any, shape: tuple[int, ...]) -> None:
    x, y = make_data("numbers")
    net = make_net(1) if len(shape) == 2 or loss_fn is not F.l1_loss else nn.Sequential(make_net(1), nn.Flatten(0))
    found = persample.scan(net, loss_fn, (x, y.reshape(shape)), **QUICK)
    assert_near(found.column("prediction"), net(x).detach().flatten())
    assert_near(found.column("target"), y)
    assert "predicted" not in found.columns


VECTOR_LOSSES: dict[str, Any] = {
    "module": nn.MSELoss(),
    "function": lambda m, b: (m(b[0]) - b[1]).abs().sum(1),
    "mean": lambda m, b: (m(b[0]) - b[1]).square().mean(),
}


@pytest.mark.parametrize("table", ["parquet", "csv"])
@pytest.mark.parametrize("loss", VECTOR_LOSSES)
def test_predicted_vectors_match_loop(loss: str, table: str, tmp_path: Path) -> None:
    net, (x, _) = make_net(3), make_data()
    y = torch.randn(N, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {**QUICK, "batch_size": N}
    found = persample.scan(net, VECTOR_LOSSES[loss], (x, y), out=tmp_path, table=table, **options)
    assert_near(found.column("prediction"), torch.cat([net(x[i : i + 1]) for i in range(N)]).detach())
    assert_near(found.column("target"), y)
    assert found.table()["target"].to_pylist() == y.tolist()
    example = found.describe([4])[0]
    assert example["target"] == y[4].tolist() and len(example["prediction"]) == 3
    worst = int(np.abs(found.column("prediction")[4] - y[4].numpy()).argmax())
    assert say_opinion(example).startswith(f"output {worst}: target {y[4, worst]:.4g}, model says ")

    page = found.report(tmp_path / "report.html", plots=False).read_text()
    assert page.count('data-name="Model says"') == 10 and "(target" in page
    if table == "csv":
        row = (tmp_path / "table.csv").read_text().splitlines()[5]
        assert json.dumps(y[4].tolist()) in row


def test_other_vectors_are_no_predictions() -> None:
    x, y = make_data()[0], torch.rand(N, 3, dtype=torch.float64).softmax(1)
    soft = lambda m, b: -(m(b[0]).log_softmax(1) * b[1]).sum(1)  # noqa: E731
    wide = nn.Linear(6, 100).double()
    cases = [
        (make_net(3), soft, y),
        (make_net(3), nn.CrossEntropyLoss(), y),
        (wide, nn.MSELoss(), torch.zeros(N, 100).double()),
    ]
    for net, loss_fn, targets in cases:
        assert "prediction" not in persample.scan(net, loss_fn, (x, targets), **{**QUICK, "batch_size": N}).columns


@pytest.mark.parametrize("shard_size", [4, 8])
@pytest.mark.parametrize("first", [1, 3])
def test_vectors_of_other_lengths_are_missing(first: int, shard_size: int, tmp_path: Path) -> None:
    """Sequences of numbers that each batch pads to its longest one: columns have the length of the first batch."""
    x, y = torch.randn(8, 5, 6, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)

    def collate(ids: list[int]) -> list[Tensor]:
        length = first if ids[0] == 0 else 5
        return [x[ids, :length], y[ids, :length]]

    net = nn.Sequential(nn.Linear(6, 1), nn.Flatten(1)).double()
    options = {**QUICK, "batch_size": 4, "shard_size": shard_size}
    found = persample.scan(net, nn.MSELoss(), list(range(8)), out=tmp_path, collate=collate, **options)
    assert_near(found.column("target")[:4], y[:4, :first].reshape(found.column("target")[:4].shape))
    assert np.isnan(found.column("target")[4:]).all()
    found.report(plots=False)


@pytest.mark.parametrize("loss_fn", [nn.BCEWithLogitsLoss(), lambda m, b: _binary(m(b[0]), b[1]).mean(1)])
def test_binary_targets_are_labels(loss_fn: Any) -> None:
    net, (x, y) = make_net(1), make_data("binary")
    found = persample.scan(net, loss_fn, (x, y[:, None]), **QUICK)
    probability = net(x).detach().sigmoid()[:, 0]
    assert found.column("label").tolist() == y.tolist()
    assert found.column("predicted").tolist() == (probability > 0.5).long().tolist()
    assert_near(found.column("given_probability"), torch.where(y == 1, probability, 1 - probability).float().double())
    assert found.summary["labels"] == {"0": int((y == 0).sum()), "1": int((y == 1).sum())}


def _binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def test_worst_of_several_labels() -> None:
    net, (x, y) = make_net(4), make_data("labels")
    found = persample.scan(net, nn.BCEWithLogitsLoss(), (x, y), **QUICK)
    on = net(x).detach().sigmoid()
    worst = (on - y).abs().argmax(1)
    assert found.column("worst_label").tolist() == worst.tolist()
    assert found.column("worst_given").tolist() == y[torch.arange(N), worst].tolist()
    assert_near(found.column("worst_probability"), on[torch.arange(N), worst].float().double())


def test_outputs_that_are_no_scores_give_no_predictions() -> None:
    x, y = make_data()
    embeddings = persample.scan(make_net(5), lambda m, b: m(b[0]).square().sum(1), (x, y), **QUICK)
    called_twice = persample.scan(
        make_net(), lambda m, b: F.cross_entropy(m(b[0]) + m(-b[0]), b[1], reduction="none"), (x, y), **QUICK
    )
    unwanted = persample.scan(make_net(), nn.CrossEntropyLoss(), (x, y), quantities=["loss", "norm"], **QUICK)
    for found in (embeddings, called_twice, unwanted):
        assert "predicted" not in found.columns


def test_ignored_labels_have_a_prediction_and_no_suggestion() -> None:
    net, (x, y) = make_net(), make_data()
    y[[2, 9]] = -100
    found = persample.scan(net, nn.CrossEntropyLoss(reduction="sum"), (x, y), **QUICK)
    assert found.column("predicted").tolist() == net(x).argmax(1).tolist()
    assert np.isnan(found.column("given_probability")[[2, 9]]).all()
    assert found.column("suggested")[[2, 9]].tolist() == [-1, -1]
    assert found.summary["not_finite"] == []


def test_suggestions_come_from_all_checkpoints(tmp_path: Path) -> None:
    net, (x, y) = make_net(), make_data()
    states = [{name: scale * value for name, value in net.state_dict().items()} for scale in (1.0, 0.5, 2.0)]
    found = persample.scan(net, nn.CrossEntropyLoss(), (x, y), out=tmp_path, checkpoints=states, **QUICK)
    parts = []
    for state in states:
        net.load_state_dict(state)
        p = net(x).detach().softmax(1)
        hidden = p.scatter(1, y[:, None], -1.0).max(1)
        given = p[torch.arange(N), y]
        parts.append({"other": hidden.indices, "other_probability": hidden.values, "given_probability": given})
    arrays = [{k: v.numpy() for k, v in part.items()} for part in parts]
    fits = [compute_fit(part) for part in arrays]
    assert found.summary["fits"] == pytest.approx(fits)
    opinion = combine_checkpoints([arrays[i] for i in choose_checkpoints(fits)])
    expected = suggest_labels(opinion, compute_confidence(y.numpy(), opinion.given_probability))
    assert found.column("suggested").tolist() == expected.tolist()
    assert_near(found.column("el2n").mean(), torch.stack([_el2n(net, s, x, y) for s in states]).mean())


def _el2n(net: nn.Module, state: Any, x: Tensor, y: Tensor) -> Tensor:
    net.load_state_dict(state)
    return (net(x).softmax(1) - F.one_hot(y, 3)).norm(dim=1).detach()


def test_checkpoints_vote_with_their_probabilities() -> None:
    parts = [
        {"other": np.array([1]), "other_probability": np.array([0.5]), "given_probability": np.array([0.1])},
        {"other": np.array([2]), "other_probability": np.array([0.6]), "given_probability": np.array([0.3])},
        {"other": np.array([1]), "other_probability": np.array([0.4]), "given_probability": np.array([0.2])},
    ]
    opinion = combine_checkpoints(parts)
    assert (opinion.other[0], round(opinion.other_probability[0], 6)) == (1, 0.3)
    assert round(opinion.given_probability[0], 6) == 0.2


def test_no_class_is_suggested_that_is_nowhere_given() -> None:
    opinion = Opinion(np.array([5, 1]), np.array([0.9, 0.9]), np.array([0.1, 0.1]))
    assert suggest_labels(opinion, {0: 0.5, 1: 0.8}).tolist() == [-1, 1]
    assert suggest_labels(opinion, {}).tolist() == [-1, -1]


def test_continued_scan_has_the_same_bytes(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    for name in ("whole", "continued"):
        persample.scan(model, loss_fn, data, out=tmp_path / name, **QUICK)
    for path in ("summary.json", "table.parquet", "0/00001.npz", "0/00001.npy"):
        (tmp_path / "continued" / path).unlink()
    persample.scan(model, loss_fn, data, out=tmp_path / "continued", **QUICK)
    assert read_files(tmp_path / "whole") == read_files(tmp_path / "continued")


class Noisy(nn.Module):
    """Draws random numbers in evaluation mode, too: a verification then runs the whole batch once more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x, 0.1, training=True))  # type: ignore[no-any-return]


def test_predictions_of_a_model_that_draws_random_numbers(tmp_path: Path) -> None:
    found = persample.scan(Noisy(), nn.CrossEntropyLoss(), make_data(), out=tmp_path, **QUICK)
    assert "predicted" in found.columns


def test_one_forward_pass_per_batch() -> None:
    """Predictions come from the pass that is recorded."""
    counts = []
    for quantities in (["loss", "norm"], ["loss", "norm", "predictions"]):
        net, calls = make_net(), [0]
        net.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        persample.scan(net, nn.CrossEntropyLoss(), make_data(), quantities=quantities, **QUICK)
        counts.append(calls[0])
    assert counts[0] == counts[1]


def test_outputs_without_a_sample_dimension_are_ignored() -> None:
    outputs, net = Outputs(N, 0), nn.Linear(2, 2)
    with outputs.capture(net):
        net(torch.ones(N + 1, 2))
    assert outputs.get() is None
