"""Queries on a scan, compared with direct computations on the stored and on the original gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import persample
from persample.scanning import ScanError, queries, stored_gradients
from persample.scanning.queries import StoredGradients
from persample.scanning.store import Store
from tests.support.modules import make_mlp

pytestmark = pytest.mark.quick

N, CLASSES = 60, 4
OPTIONS: dict[str, Any] = {"batch_size": 8, "shard_size": 16, "project": 64, "dtype": "float32", "progress": False}


def data(count: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 10, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def make_model() -> nn.Module:
    return make_mlp(10, 12, CLASSES, dtype=torch.float32)


def make_states(model: nn.Module) -> list[dict[str, Tensor]]:
    return [{name: value * scale for name, value in model.state_dict().items()} for scale in (0.5, 1.0, 1.5)]


def compute_gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """`(samples, numbers)`: gradients by a loop over the samples."""
    rows = []
    for x, y in zip(*batch, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def store_rows(directory: Path, rows: Tensor, shard: int = 16, dtype: str = "float32") -> StoredGradients:
    """Store gradients as a scan does."""
    lengths = rows.norm(dim=1)
    unit = torch.where(lengths[:, None] > 0, rows / lengths[:, None], 0.0)
    store = Store(directory)
    for i, (part, length) in enumerate(zip(unit.split(shard), lengths.split(shard), strict=True)):
        store.write_shard(0, i, {"length": length.double().numpy()}, part.numpy().astype(dtype))
    return StoredGradients(store, 0)


# ---- influence ----


def test_tracin_matches_direct_computation(tmp_path: Path) -> None:
    model, rates = make_model(), [0.3, 0.2, 0.1]
    scanned = make_states(model)
    found = persample.scan(
        model, nn.CrossEntropyLoss(), data(), out=tmp_path, checkpoints=scanned, learning_rates=rates, **OPTIONS
    )
    test = data(5, seed=1)
    scores = found.scores(test, "tracin")
    exact, projected, slack = torch.zeros(5, N), torch.zeros(5, N), torch.zeros(5, N)
    for checkpoint, (rate, state) in enumerate(zip(rates, scanned, strict=True)):
        model.load_state_dict(state)
        train_rows, test_rows = compute_gradients(model, data()), compute_gradients(model, test)
        exact += rate * test_rows @ train_rows.T
        slack += rate * test_rows.norm(dim=1)[:, None] * train_rows.norm(dim=1)
        recordings = []
        for batch in (test, data()):
            with persample.record(model) as grads:
                F.cross_entropy(model(batch[0]), batch[1]).backward()
            recordings.append(grads.project(64, seed=checkpoint, method="kronecker"))
        projected += rate * recordings[0] @ recordings[1].T
    torch.testing.assert_close(scores, projected, rtol=1e-4, atol=1e-5)
    errors = (scores - exact) / slack
    assert errors.square().mean().sqrt() < 2 / 64**0.5, "the error is larger than that of a projection to 64 dimensions"
    assert float(torch.corrcoef(torch.stack([scores.flatten(), exact.flatten()]))[0, 1]) > 0.9

    model.load_state_dict(scanned[-1])
    answer = persample.Scan(tmp_path, model, nn.CrossEntropyLoss(), scanned).influence(test, 4, "tracin")
    order = scores.argsort(dim=1, descending=True)
    assert torch.equal(answer.for_ids, order[:, :4]) and torch.equal(answer.against_ids, order[:, -4:].flip(1))
    assert torch.equal(answer.for_scores, scores.gather(1, order[:, :4]))
    assert (answer.for_scores[:, 0] > 0).all() and (answer.against_scores[:, 0] < 0).all()


def test_sign_of_score_predicts_effect_of_training_step(tmp_path: Path) -> None:
    model, test, rate = make_model(), data(1, seed=1), 1e-3
    found = persample.scan(model, nn.CrossEntropyLoss(), data(), out=tmp_path, **{**OPTIONS, "project": 512})
    answer = found.influence(test, 1, "tracin")
    before = F.cross_entropy(model(test[0]), test[1]).item()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for i, smaller in ((int(answer.for_ids), True), (int(answer.against_ids), False)):
        model.load_state_dict(state)
        x, y = data()[0][i : i + 1], data()[1][i : i + 1]
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), rate).step()
        model.zero_grad()
        assert (F.cross_entropy(model(test[0]), test[1]).item() < before) == smaller


def test_whitened_scores_match_direct_computation(tmp_path: Path) -> None:
    model = make_model()
    found = persample.scan(model, nn.CrossEntropyLoss(), data(), out=tmp_path, **OPTIONS)
    rows = StoredGradients(found.store, 0)
    stored = (rows[torch.arange(N)] * rows.lengths[:, None].float()).double()
    with persample.record(model) as grads:
        F.cross_entropy(model(data()[0][:3]), data()[1][:3]).backward()
    moment = stored.T @ stored / N
    ridge = torch.zeros(64, dtype=torch.float64)
    for _, start, stop in found.settings["blocks"]:  # the damping is relative to the mean of each parameter
        ridge[start:stop] = 1e-3 * moment.diagonal()[start:stop].mean()
    damped = moment + torch.diag(ridge)
    expected = grads.project(64, method="kronecker").double() @ torch.linalg.inv(damped) @ stored.T
    scores = found.scores(tuple(part[:3] for part in data()), "whitened", damping=1e-3)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-3, atol=1e-3)
    assert scores.argmax(1).tolist() == [0, 1, 2], "the best match of an example is the example"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no model", "influence needs the model and its loss"),
        ("weights", "The weights of the model differ from the scanned ones"),
        ("method", "method must be one of 'tracin', 'cosine'"),
    ],
)
def test_influence_errors(change: str, message: str, tmp_path: Path) -> None:
    model = make_model()
    persample.scan(model, nn.CrossEntropyLoss(), data(), out=tmp_path, **OPTIONS)
    if change == "weights":
        model[0].weight.data += 1
    given = () if change == "no model" else (model, nn.CrossEntropyLoss())
    method: Any = "magic" if change == "method" else "tracin"
    with pytest.raises(ScanError, match=message):
        persample.Scan(tmp_path, *given).influence(data(2), method=method)


# ---- neighbours, outliers, duplicates ----


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_neighbours_have_largest_cosines(dtype: str, tmp_path: Path) -> None:
    matrix = torch.randn(N, 12)
    rows = store_rows(tmp_path, matrix, dtype=dtype)
    cosines = F.cosine_similarity(matrix[:, None], matrix[None], dim=2).fill_diagonal_(-2)
    for i in (0, 17, N - 1):
        found = queries.find_neighbours(rows, i, 5)
        expected = cosines[i].topk(5)
        torch.testing.assert_close(found.scores, expected.values, rtol=0, atol=2e-3)
        assert len(set(found.ids.tolist()) & set(expected.indices.tolist())) >= (5 if dtype == "float32" else 4)


def test_outliers_have_largest_leverage(tmp_path: Path) -> None:
    plane = torch.randn(N, 2) @ torch.randn(2, 12)
    plane[23] = torch.randn(12)
    rows = store_rows(tmp_path, plane)
    found = queries.find_outliers(rows, 3, damping=1e-3)
    unit = F.normalize(plane.double(), dim=1)
    moment = unit.T @ unit / N
    leverages = (unit @ torch.linalg.inv(moment + 1e-3 * moment.trace() / 12 * torch.eye(12)) * unit).sum(1)
    expected = (leverages / leverages.mean()).topk(3)
    assert found.ids[0] == 23 and torch.equal(found.ids, expected.indices)
    torch.testing.assert_close(found.scores.double(), expected.values, rtol=1e-4, atol=1e-6)


def find_groups_by_brute_force(matrix: Tensor, tolerance: float) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    leads: list[int] = []
    for i, row in enumerate(matrix):
        for lead in leads:
            longest = max(row.norm(), matrix[lead].norm())
            if longest > 0 and (row - matrix[lead]).norm() <= tolerance * longest:
                groups.setdefault(lead, [lead]).append(i)
                break
        else:
            leads.append(i)
    return sorted(groups.values())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    originals=st.integers(1, 12),
    copies=st.integers(1, 80),
    rank=st.integers(1, 20),
    noise=st.sampled_from([0.0, 0.002, 0.3]),
)
def test_duplicates_match_brute_force(
    tmp_path_factory: pytest.TempPathFactory, seed: int, originals: int, copies: int, rank: int, noise: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randn(originals, rank, generator=generator) @ torch.randn(rank, 20, generator=generator)
    matrix = kinds[torch.randint(originals, (copies,), generator=generator)]
    matrix = matrix + noise * matrix.std() * torch.randn(matrix.shape, generator=generator)
    matrix[-1] *= 3  # same direction as another row, different length
    rows = store_rows(tmp_path_factory.mktemp("rows"), matrix)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(queries, "_COMPARED_AT_ONCE", 7)
        patched.setattr(queries, "BLOCK_SIZE", 16)
        patched.setattr(stored_gradients, "BLOCK_SIZE", 16)
        assert sorted(queries.find_duplicates(rows, 0.1)) == find_groups_by_brute_force(matrix, 0.1)


def test_work_for_duplicates_is_bounded_where_all_rows_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained model: all pairs may be close. Rows are read in blocks, not for each pair."""
    torch.manual_seed(0)
    matrix = torch.randn(64) + 0.15 * torch.randn(600, 64)
    matrix[400] = matrix[7]
    rows, read = store_rows(tmp_path, matrix), []
    get = type(rows).__getitem__
    monkeypatch.setattr(type(rows), "__getitem__", lambda self, ids: read.append(len(ids)) or get(self, ids))
    monkeypatch.setattr(queries, "BLOCK_SIZE", 256)
    monkeypatch.setattr(queries, "_COMPARED_AT_ONCE", 64)
    bounds = queries._compute_bounds(rows)
    candidates = int((bounds @ bounds.T >= (1 - 0.1**2) ** 0.5).sum())
    assert candidates > 100_000  # the bound says nothing here
    read.clear()
    assert sorted(queries.find_duplicates(rows, 0.1)) == find_groups_by_brute_force(matrix, 0.1) == [[7, 400]]
    assert sum(read) < candidates / 10


@pytest.mark.parametrize("tolerance", [0.003, 0.1])
def test_duplicates_in_float16(tolerance: float, tmp_path: Path) -> None:
    matrix = torch.randn(200, 64).repeat(2, 1)
    rows = store_rows(tmp_path, matrix, dtype="float16")
    assert sorted(queries.find_duplicates(rows, tolerance)) == [[i, i + 200] for i in range(200)]


def test_duplicates_of_a_scan(tmp_path: Path) -> None:
    x, y = data()
    x[31], y[31] = x[4], y[4]
    x[50], y[50] = x[4], y[4]
    x[33], y[33] = x[20], (y[20] + 1) % CLASSES  # same input, different label
    found = persample.scan(make_model(), nn.CrossEntropyLoss(), (x, y), out=tmp_path, **{**OPTIONS, "dtype": "float16"})
    assert found.duplicates() == [[4, 31, 50]]
    assert found.neighbours(4, 2).ids.sort().values.tolist() == [31, 50]


def test_ranking_by_column(tmp_path: Path) -> None:
    found = persample.scan(make_model(), nn.CrossEntropyLoss(), data(), out=tmp_path, **OPTIONS)
    for name in ("norm", "loss"):
        assert found.ranked(name, 3).ids.tolist() == np.argsort(-found.column(name), kind="stable")[:3].tolist()
    aligned = found.column("estimated_alignment")
    assert found.ranked("estimated_alignment", 2).ids.tolist() == np.argsort(aligned)[:2].tolist()
    assert len(found.ranked().ids) == N


WRONG_QUERIES = [lambda s: s.neighbours(N), lambda s: s.neighbours(-1), lambda s: s.duplicates(1.5)]


@pytest.mark.parametrize("query", WRONG_QUERIES)
def test_wrong_arguments_of_queries(query: Any, tmp_path: Path) -> None:
    found = persample.scan(make_model(), nn.CrossEntropyLoss(), data(), out=tmp_path, **OPTIONS)
    with pytest.raises(ScanError, match=r"There is no example|tolerance must be between"):
        query(found)
