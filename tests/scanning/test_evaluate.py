"""The evaluation of influence: its statistics against scipy, its trainings, and a task with a known answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import persample
from persample.scanning import ScanError, Trained, retraining, statistics
from persample.scanning.evaluation import estimate_ceiling
from persample.scanning.retraining import SubsetRuns

N, TESTS = 60, 12


def make_data(count: int = N + TESTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, 0] + 0.3 * torch.randn(count, generator=generator) > 0).long()


DATA, TEST = tuple(part[:N] for part in make_data()), tuple(part[N:] for part in make_data())


def train(data: Any, seed: int) -> nn.Module:
    """Ridge-like logistic regression to convergence, so that its influence functions are precise."""
    x, y = (
        data
        if isinstance(data, tuple)
        else [torch.stack(list(map(torch.as_tensor, p))) for p in zip(*data, strict=True)]
    )
    model = nn.Linear(6, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, weight_decay=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def score_by_label(trained: Trained, test: Any) -> Tensor:
    return (test[1][:, None] == DATA[1][None]).double()


def test_scores_of_a_convex_task_predict_retraining() -> None:
    methods = {"whitened": "whitened", "same label": score_by_label, "random": lambda t, b: torch.randn(TESTS, N)}
    torch.manual_seed(1)
    found = persample.evaluate(
        train, DATA, TEST, nn.CrossEntropyLoss(), methods=methods, subsets=40, project=64, resamples=100, progress=False
    )
    assert found.lds["whitened"].value > 0.5 and found.lds["whitened"].low > 0.3
    assert found.lds["random"].low < 0 < found.lds["random"].high
    assert found.lds["whitened"].value > found.lds["same label"].value
    assert found.mislabel_auc["loss"].value > 0.8
    assert found.ceiling is None and found.runs.losses.shape == (40, 1, TESTS)
    shown = repr(found)
    assert "random" in shown.split("same label")[1] and "on par with random" in shown


def test_ensembles_checkpoints_and_datasets() -> None:
    seen: list[Any] = []

    def train_with_checkpoints(data: Any, seed: int) -> Any:
        seen.append((len(data), seed))
        model = train(data, seed)
        return model, [{k: 0.5 * v for k, v in model.state_dict().items()}, model.state_dict()]

    found = persample.evaluate(
        train_with_checkpoints,
        TensorDataset(*DATA),
        TEST,
        nn.CrossEntropyLoss(),
        methods={"damped": {"method": "whitened", "damping": 0.3}, "trak": "trak"},
        rankings={"mine": lambda scan: torch.from_numpy(scan.column("loss")), "mean loss": "mean_loss"},
        subsets=3,
        repeats=2,
        models=2,
        project=16,
        resamples=5,
        progress=False,
    )
    assert [size for size, _ in seen] == [N // 2] * 6 + [N] * 3
    assert len({seed for _, seed in seen[:8]}) == 8, "every training has a seed of its own"
    assert found.lds.keys() == {"damped", "trak"} and found.mislabel_auc.keys() == {"mine", "mean loss"}
    assert found.ceiling is not None and 0 <= found.ceiling <= 1
    assert {"scan", "trainings on subsets", "method trak"} <= found.seconds.keys()


def test_no_labels_no_flips() -> None:
    x = DATA[0]

    def train_reconstruction(data: Any, seed: int) -> nn.Module:
        return nn.Linear(6, 6)

    found = persample.evaluate(
        train_reconstruction,
        (x, x),
        (x[:4], x[:4]),
        nn.MSELoss(),
        methods=["tracin"],
        subsets=3,
        project=8,
        resamples=2,
        progress=False,
    )
    assert not found.mislabel_auc


@pytest.mark.parametrize("kind", ["tensors", "dict", "dataset", "dataset of dicts"])
def test_flipped_labels(kind: str) -> None:
    class Dicts(Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": DATA[0][i], "y": DATA[1][i]}

    kinds: dict[str, Any] = {
        "tensors": DATA,
        "dict": {"x": DATA[0], "y": DATA[1]},
        "dataset": TensorDataset(*DATA),
        "dataset of dicts": Dicts(),
    }
    flipped = retraining.flip_labels(kinds[kind], 0.2, torch.Generator().manual_seed(0))
    assert flipped is not None
    data, is_flipped = flipped
    if kind == "tensors":
        labels = data[1]
    elif kind == "dict":
        labels = data["y"]
    else:
        labels = torch.tensor([int(data[i]["y"] if "dicts" in kind else data[i][1]) for i in range(N)])
    assert int(is_flipped.sum()) == 12 and torch.equal(labels != DATA[1], is_flipped)
    assert torch.equal(DATA[1], make_data()[1][:N]), "the original labels are not changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subsets": 2}, "at least 3 subsets"),
        ({"part": 1.0}, "part must be between 0 and 1"),
        ({"train": lambda data, seed: None}, "must return a model"),
        ({"loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])}, "one loss per sample"),
        ({"methods": {"bad": lambda trained, batch: torch.zeros(3)}}, "must return scores"),
        ({"data": iter([])}, "iterator"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    given = {"train": train, "data": DATA, "test_batch": TEST, "loss_fn": nn.CrossEntropyLoss(), "subsets": 3, **change}
    with pytest.raises(ScanError, match=message):
        persample.evaluate(**given, project=8, progress=False)


# ---- statistics ----


def test_rank_correlations_match_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    one, other = torch.randint(5, (7, 20)).double(), torch.randn(7, 20)
    expected = [stats.spearmanr(a, b).statistic for a, b in zip(one.numpy(), other.numpy(), strict=True)]
    np.testing.assert_allclose(statistics.correlate_ranks(one, other).numpy(), expected, rtol=1e-9)


def test_auc_matches_all_pairs() -> None:
    scores, positive = torch.randint(6, (50,)).double(), torch.arange(50) % 3 == 0
    pairs = scores[positive][:, None] - scores[~positive][None]
    expected = float(((pairs > 0).double() + 0.5 * (pairs == 0)).mean())
    found = statistics.estimate_auc(scores, positive, 200, torch.Generator().manual_seed(0))
    assert found.value == pytest.approx(expected) and found.low < found.value < found.high


def test_intervals_cover_the_truth() -> None:
    """Over independent repetitions, 95 % intervals contain the true correlation about that often."""
    generator, covered = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        truth, noise = (torch.randn(30, 40, generator=generator) for _ in range(2))
        found = statistics.estimate_lds(truth + noise, truth, 100, generator)
        covered += found.low <= 0.69 <= found.high  # Spearman for a Pearson correlation of 0.707
    assert covered >= 32


def test_ceiling_of_noise_and_of_exact_trainings() -> None:
    members, losses = torch.zeros(30, 5, dtype=torch.long), torch.randn(30, 1, 50).expand(30, 4, 50)
    assert estimate_ceiling(SubsetRuns(members, losses)) == pytest.approx(1)
    assert float(estimate_ceiling(SubsetRuns(members, torch.randn(30, 4, 50))) or 0) < 0.35
