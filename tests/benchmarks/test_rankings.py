"""The comparison of rankings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import rankings


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_flipped_labels_are_wrong(share: float) -> None:
    labels = torch.arange(200) % 4
    flipped = rankings.flip_labels(labels, share, seed=1)
    assert int((flipped != labels).sum()) == round(200 * share) and set(flipped.tolist()) <= {0, 1, 2, 3}


def test_scores_of_a_ranking() -> None:
    wrong = np.array([True, False, True, False])
    assert rankings.score(np.array([4.0, 1.0, 3.0, 2.0]), wrong) == {"auc": 1.0, "precision": 1.0}
    assert rankings.score(np.array([1.0, 4.0, 2.0, 3.0]), wrong) == {"auc": 0.0, "precision": 0.0}


@pytest.mark.parametrize("name", rankings.DATASETS)
def test_models_fit_their_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankings, "COUNT", 12)
    dataset = rankings.DATASETS[name]
    x, y = dataset.make(0)
    assert dataset.model(0)(x[:5]).shape == (5, {"digits": 10}.get(name[:6], int(y.max()) + 1))


def test_a_case_is_measured_and_summarised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankings, "NOISE", (0.1,))
    monkeypatch.setattr(rankings, "SEEDS", (0,))
    cases = [rankings.measure_case("tumours, MLP", 0.1, 0, 0, with_peer=False)]
    (other,) = rankings.measure_dataset("tumours, MLP", cases, has_peer=False)
    assert other["training"] == "memorised"  # the other one is done
    summary = rankings.summarise(cases)
    assert summary["rankings"]["all"]["mean_loss"]["auc"] > 0.8
    assert summary["estimates"]["0.1"]["cases"] == 1
