"""Rankings, the estimated number of wrong labels, and the cut of the list of suspects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import persample
from persample.scanning import ScanError
from persample.scanning.estimates import count_far_out, estimate_wrong_labels
from persample.scanning.suggestions import Opinion, choose_checkpoints
from tests.support.scans import QUICK

COUNT, FLIPPED = 400, 20


def train_on_blobs(flipped: int, epochs: int = 6) -> tuple[Any, list[Any], list[int]]:
    """Data of three separated classes, checkpoints of a model that was trained on it, and the flipped examples."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(3, (COUNT,), generator=generator)
    x = torch.randn(COUNT, 5, generator=generator) + 4 * F.one_hot(y, 5)
    wrong = torch.randperm(COUNT, generator=generator)[:flipped]
    y[wrong] = (y[wrong] + 1) % 3
    torch.manual_seed(0)
    model, states = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(epochs):
        for part in torch.randperm(COUNT, generator=generator).split(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return (model, (x, y)), states[epochs // 3 - 1 :: epochs // 3], wrong.tolist()


@pytest.fixture(scope="module")
def noisy() -> tuple[Any, list[int]]:
    (model, data), states, wrong = train_on_blobs(FLIPPED)
    found = persample.scan(
        model, nn.CrossEntropyLoss(), data, checkpoints=states, project=32, progress=False, batch_size=100
    )
    return found, wrong


def test_every_ranking_finds_flipped_labels(noisy: Any) -> None:
    found, wrong = noisy
    assert found.default_ranking == "mean_loss"
    for by in (*found.rankings, None):
        if by is not None and ("alignment" in by or by.startswith("norm/")):
            continue
        first = set(found.ranked(by, 2 * FLIPPED).ids.tolist())
        assert len(first & set(wrong)) >= 0.9 * FLIPPED, by
    assert {"confident", "el2n", "normalised_self_influence", "whitened_self_influence"} <= set(found.rankings)


def test_only_cosines_rank_the_smallest_first() -> None:
    """The name of a module may contain the name of a column."""
    model = nn.Sequential()
    model.add_module("alignment", nn.Linear(3, 2))
    x, y = torch.randn(9, 3), torch.arange(9) % 2
    found = persample.scan(model, nn.CrossEntropyLoss(), (x, y), **QUICK)
    for by, sign in (("norm/alignment", -1), ("estimated_alignment", 1)):
        ranking = found.ranked(by)
        assert ranking.ids.tolist() == np.argsort(sign * found.column(by), kind="stable").tolist()
        np.testing.assert_array_equal(ranking.scores, found.column(by)[ranking.ids])


def test_suspects_are_cut_at_the_estimate(noisy: Any) -> None:
    found, wrong = noisy
    estimate = found.estimate_wrong_labels()
    assert estimate.low <= FLIPPED <= estimate.high and 0.6 * FLIPPED <= estimate.count <= 1.5 * FLIPPED
    suspects = found.suspects()
    assert len(suspects.ids) == estimate.count and set(suspects.ids.tolist()) <= {*found.ranked(k=40).ids.tolist()}
    suggested = found.column("suggested")
    right = (found.column("label")[wrong] - 1) % 3
    assert (suggested[wrong] == right).mean() >= 0.4 and (suggested >= 0).sum() <= FLIPPED + 2


def test_clean_data_has_few_suspects(tmp_path: Path) -> None:
    (model, data), states, _ = train_on_blobs(0)
    found = persample.scan(model, nn.CrossEntropyLoss(), data, checkpoints=states, project=None, progress=False)
    assert len(found.suspects().ids) <= 4
    page = found.report(tmp_path / "report.html", plots=False).read_text()
    assert page.count('id="example-') <= 20


def test_normalised_self_influence_gives_each_checkpoint_the_same_weight(noisy: Any) -> None:
    found, _ = noisy
    norms = [
        np.concatenate([found.store.read_columns(c, s, ["norm"])["norm"] for s in range(found.store.count_shards(c))])
        for c in range(3)
    ]
    expected = np.mean([n**2 / (n**2).mean() for n in norms], axis=0)
    np.testing.assert_allclose(found.scores_by("normalised_self_influence"), expected)
    assert expected.mean() == pytest.approx(1.0)


def test_whitened_self_influence_matches_dense_formula(noisy: Any) -> None:
    found, _ = noisy
    expected = np.zeros(COUNT)
    for c in range(3):
        shards = range(found.store.count_shards(c))
        rows = np.concatenate([found.store.read_rows(c, s) for s in shards]).astype(np.float64)
        rows *= np.concatenate([found.store.read_columns(c, s, ["length"])["length"] for s in shards])[:, None]
        moment = rows.T @ rows / COUNT
        means = np.zeros(len(moment))
        for _, start, stop in found.settings["blocks"]:
            means[start:stop] = np.diag(moment)[start:stop].mean()
        damped = moment + 0.1 * np.diag(means)
        expected += np.einsum("ni,ij,nj->n", rows, np.linalg.inv(damped), rows) / 3
    np.testing.assert_allclose(found.scores_by("whitened_self_influence"), expected, rtol=1e-3, atol=1e-5)


def test_rankings_are_compared_with_the_default(noisy: Any) -> None:
    found, _ = noisy
    shares = found.compare_rankings(20)
    own = set(found.ranked(k=20).ids.tolist())
    assert shares["loss"] == len(own & set(found.ranked("loss", 20).ids.tolist())) / 20
    assert "mean_loss" not in shares and all(0 <= share <= 1 for share in shares.values())


def test_default_and_unknown_rankings() -> None:
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    found = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), quantities=["loss"], **QUICK)
    assert found.default_ranking == "loss"
    assert found.ranked(k=3).ids.tolist() == found.column("loss").argsort(kind="stable")[::-1][:3].tolist()
    with pytest.raises(ScanError, match=r"no column 'confident' to rank by\. Choose from loss, whitened"):
        found.ranked("confident")
    nothing = persample.scan(
        nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), quantities=["noise_scale"], **{**QUICK, "project": None}
    )
    assert nothing.default_ranking is None and nothing.compare_rankings() == {}
    with pytest.raises(ScanError, match="no column to rank by"):
        nothing.ranked()


def test_regression_suspects_lie_far_above_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(300, 1, generator=generator)
    y[[5, 70]] += 30
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    found = persample.scan(model, nn.MSELoss(), (x, y), **QUICK)
    assert "targets are numbers" in found.estimate_wrong_labels().reason and not found.estimate_wrong_labels()
    assert set(found.suspects().ids.tolist()) == {5, 70}
    y[[5, 70]] -= 30
    assert persample.scan(model, nn.MSELoss(), (x, y), **QUICK).count_suspects() <= 3


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_far_out_does_not_depend_on_the_scale(scale: float) -> None:
    squares = np.random.default_rng(0).normal(size=2000) ** 2
    assert count_far_out(squares * scale) <= 6
    assert count_far_out(np.concatenate([squares, [400.0, np.nan]]) * scale) >= 2
    assert count_far_out(np.ones(3)) == count_far_out(np.ones(30)) == 0


@pytest.mark.parametrize(
    ("fits", "chosen"),
    [([0.9], [0]), ([1.0], [0]), ([0.3, 0.8, 0.9], [1, 2]), ([0.8, 0.99], [0]), ([0.98, 1.0, 0.99], [0])],
)
def test_checkpoints_that_are_untrained_or_memorised_do_not_count(fits: list[float], chosen: list[int]) -> None:
    assert choose_checkpoints(fits) == chosen


def test_estimate_warns_of_memorised_and_of_untrained_models() -> None:
    opinion = Opinion(np.array([1, 0]), np.array([0.1, 0.1]), np.array([0.9, 0.9]))
    labels = np.array([0, 1])
    assert "memorised" in estimate_wrong_labels(labels, opinion, [0.99, 1.0]).warning
    assert "too high" in estimate_wrong_labels(labels, opinion, [0.4, 0.6]).warning
    assert estimate_wrong_labels(labels, opinion, [0.5, 0.9, 1.0]).warning == ""


def test_results_in_notebooks(noisy: Any) -> None:
    found, _ = noisy
    page = found._repr_html_()
    assert "Wrong labels: about" in page and page.count("<tr>") == 11 and "<th>mean_loss</th>" in page
    assert found.neighbours(3, 30)._repr_html_().endswith("and 10 more</td></tr></table>")
    empty = persample.scan(
        nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.randn(5, 3), torch.arange(5) % 2), quantities=["noise_scale"]
    )
    assert "Scan of 5 examples" in empty._repr_html_()
