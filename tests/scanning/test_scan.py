"""Scans of datasets: quantities compared with a loop, kinds of data, interruption and continuation."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyarrow import csv, parquet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import persample
from persample.gradients.projection import METHODS
from persample.scanning import QUANTITIES, NotFinite, ScanError, gradient_sum, store
from persample.scanning.groups import group_parameters
from persample.scanning.measure import ALL_QUANTITIES
from persample.scanning.packing import pack_shard
from persample.scanning.queries import StoredGradients
from persample.scanning.store import Store
from tests.support.modules import flatten_rows
from tests.support.paths import ROOT
from tests.support.processes import TwoProcesses
from tests.support.scans import (
    CASES,
    QUICK,
    N,
    assert_near,
    build,
    build_layers,
    images,
    language_loss,
    loop,
    make_stale,
    read_files,
)

# ---- quantities ----


@pytest.mark.parametrize("case", CASES)
def test_quantities_match_loop(case: str, tmp_path: Path) -> None:
    model, data, loss_fn, reduction = build(case)
    options = {**QUICK, "loss_reduction": reduction, "quantities": ALL_QUANTITIES}
    found = persample.scan(model, loss_fn, data, out=tmp_path / "out", **options)
    losses, rows = loop(model, data, loss_fn)
    matrix = flatten_rows(rows)
    mean = matrix.mean(0)
    assert_near(found.column("loss"), losses)
    assert_near(found.column("norm"), matrix.norm(dim=1))
    assert_near(found.column("self_influence"), matrix.square().sum(1))
    assert_near(found.column("alignment"), F.cosine_similarity(matrix, mean[None]))
    for group, names in group_parameters(list(rows), None).items():
        assert_near(found.column(f"norm/{group}"), flatten_rows({name: rows[name] for name in names}).norm(dim=1))
    spread = matrix.var(0).sum()
    square = mean.square().sum() - spread / N
    if square > 0:
        assert_near(found.summary["noise_scale"], spread / square)
    assert (found.summary["noise_scale"] is None) == (square <= 0)
    assert found.summary["examples"] == len(found) == N
    assert found.column("id").tolist() == list(range(N))
    if not isinstance(data, dict):
        assert found.column("label").tolist() == data[1].tolist()


@pytest.mark.parametrize("project", [16, 1000])
@pytest.mark.parametrize("case", CASES)
def test_one_pass_matches_loop(case: str, project: int, tmp_path: Path) -> None:
    """Without the exact alignment, the mean gradient is that of the projected rows."""
    model, data, loss_fn, reduction = build(case)
    options = {**QUICK, "project": project, "loss_reduction": reduction}
    found = persample.scan(model, loss_fn, data, out=tmp_path / "out", **options)
    assert "alignment" not in found.columns
    matrix = flatten_rows(loop(model, data, loss_fn)[1])
    assert_near(found.column("norm"), matrix.norm(dim=1))
    rows = StoredGradients(found.store, 0)
    projected = rows[torch.arange(N)].double() * rows.lengths[:, None]
    projected = matrix if project > matrix.shape[1] else projected  # then the projection is exact
    mean, spread = projected.mean(0), projected.var(0).sum()
    square = mean.square().sum() - spread / N
    assert found.summary["mean_gradient_norm"] == pytest.approx(float(mean.norm()), rel=1e-3)  # rows in float16
    assert (found.summary["noise_scale"] is None) == (square <= 0)
    if square > 0:
        assert found.summary["noise_scale"] == pytest.approx(float(spread / square), rel=1e-2)
    expected = F.cosine_similarity(projected, mean[None])
    np.testing.assert_allclose(found.column("estimated_alignment"), expected, atol=2e-3)
    assert not list(tmp_path.rglob("mean-*.npz"))


@pytest.mark.parametrize(
    "dtype, scale", [("float32", 1e-37), ("float32", 1e38), ("float64", 1e-120), ("float64", 1e120)]
)
def test_rows_of_extreme_lengths_are_stored_with_length_1(dtype: str, scale: float) -> None:
    rows = torch.rand(5, 64, generator=torch.Generator().manual_seed(0)).add(1).to(getattr(torch, dtype)) * scale
    rows[2] = 0
    rows[3] = torch.nan
    columns, stored = pack_shard([{"id": torch.arange(5), "projection": rows}], "float16")
    lengths = rows.double().norm(dim=1).nan_to_num()
    np.testing.assert_allclose(columns["length"], lengths)
    expected = (rows.double() / lengths[:, None]).nan_to_num()
    np.testing.assert_allclose(stored, expected, atol=1e-3)


def test_estimated_alignment_needs_projections(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    options = {**QUICK, "project": None}
    with pytest.raises(ScanError, match="project=None keeps none"):
        persample.scan(model, loss_fn, data, quantities=["loss", "estimated_alignment"], **options)
    found = persample.scan(model, loss_fn, data, out=tmp_path, **options)
    assert "estimated_alignment" not in found.columns and found.summary["noise_scale"] is not None
    matrix = flatten_rows(loop(model, data, loss_fn)[1])
    assert_near(found.column("alignment"), F.cosine_similarity(matrix, matrix.mean(0)[None]))


@pytest.mark.parametrize("projection", METHODS)
def test_projections_match_recording(projection: Any, tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    options = {**QUICK, "projection": projection, "dtype": "float32", "seed": 3}
    found = persample.scan(model, loss_fn, data, out=tmp_path, **options)
    model.eval()
    with persample.record(model) as grads:
        loss_fn(model(data[0]), data[1]).backward()
    expected = grads.project(16, seed=3, method=projection)
    blocks = found.settings["blocks"]
    assert blocks == (
        [[n, s.start, s.stop] for n, s in grads.projection_blocks(16).items()] if projection == "kronecker" else None
    )
    stored = np.concatenate([found.store.read_rows(0, s) for s in range(found.store.count_shards(0))])
    lengths = np.concatenate([found.store.read_columns(0, s)["length"] for s in range(found.store.count_shards(0))])
    torch.testing.assert_close(torch.from_numpy(stored * lengths[:, None]), expected.double(), rtol=1e-5, atol=1e-6)


def test_rows_are_read_with_numpy(tmp_path: Path) -> None:
    """As described in scan.json and in docs/scan.md."""
    model, data, loss_fn, _ = build("images")
    found = persample.scan(model, loss_fn, data, out=tmp_path, **QUICK)
    layout = json.loads((tmp_path / "scan.json").read_text())["rows"]
    files = [layout["files"].format(checkpoint=0, shard=shard) for shard in range(3)]
    rows = [np.load(tmp_path / file, mmap_mode="r") for file in files]
    assert [part.shape for part in rows] == [
        (8, layout["columns"]),
        (8, layout["columns"]),
        (N - 16, layout["columns"]),
    ]
    assert all(isinstance(part, np.memmap) and part.dtype == layout["dtype"] for part in rows)
    lengths = [np.load(tmp_path / file.replace(".npy", ".npz"))["length"] for file in files]
    stored = StoredGradients(found.store, 0)
    assert np.array_equal(np.concatenate(rows).astype(np.float32), stored[torch.arange(N)].numpy())
    assert np.array_equal(np.concatenate(lengths), stored.lengths.numpy())


@pytest.mark.parametrize("kept", [0, 2])
def test_summary_does_not_depend_on_files_that_are_kept(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, loss_fn, _ = build("images")
    persample.scan(model, loss_fn, data, out=tmp_path / "all", **QUICK)
    monkeypatch.setattr(store, "_MAX_KEPT", kept)
    persample.scan(model, loss_fn, data, out=tmp_path / "some", **QUICK)
    assert read_files(tmp_path / "some") == read_files(tmp_path / "all")


def test_several_checkpoints_match_loop(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    other = {name: value * 0.5 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    last = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save({"state_dict": other, "epoch": 3}, tmp_path / "first.pt")
    rates, states = [0.3, 0.1], [tmp_path / "first.pt", last]
    found = persample.scan(
        model, loss_fn, data, out=tmp_path / "out", checkpoints=states, learning_rates=rates, **QUICK
    )
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    losses, squares = [], []
    for state in (other, last):
        model.load_state_dict(state)
        loss, rows = loop(model, data, loss_fn)
        losses.append(loss)
        squares.append(flatten_rows(rows).square().sum(1))
    assert_near(found.column("self_influence"), rates[0] * squares[0] + rates[1] * squares[1])
    assert_near(found.column("norm"), squares[1].sqrt())
    assert_near(found.column("loss"), losses[1])
    assert_near(found.column("mean_loss"), torch.stack(losses).mean(0))


def test_only_requested_quantities_are_measured(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    found = persample.scan(
        model, loss_fn, data, out=tmp_path, quantities=["norm"], **{**QUICK, "project": None}
    )  # no mean gradient, no projected gradients
    assert found.columns == ["id", "label", "norm"]
    assert not list(tmp_path.glob("**/*.npy")) and not list(tmp_path.glob("mean*"))
    with pytest.raises(ScanError, match=r"no column 'loss'\. It has id, label, norm"):
        found.column("loss")
    with pytest.raises(ScanError, match="project=None"):
        found.neighbours(0)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (None, ["0", "1", "5"]),
        (lambda name: name.rpartition(".")[2], ["weight", "bias"]),
        ({"head": ["5.weight", "5.bias"], "first": ["0.weight"]}, ["head", "first"]),
    ],
)
def test_groups_of_parameters(groups: Any, expected: list[str], tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    found = persample.scan(model, loss_fn, data, out=tmp_path, groups=groups, **QUICK)
    assert [name for name in found.columns if "/" in name] == [f"norm/{name}" for name in expected]
    if callable(groups):
        both = np.square(found.column("norm/weight")) + np.square(found.column("norm/bias"))
        np.testing.assert_allclose(both, np.square(found.column("norm")))


def test_many_layers_are_grouped_by_parent_module() -> None:
    names = [f"blocks.{i}.{part}.weight" for i in range(12) for part in ("attention", "mlp")]
    assert list(group_parameters(names, None)) == [f"blocks.{i}" for i in range(12)]


# ---- data ----


class Stream(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.data, strict=True)


class Pairs(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, i: int) -> Any:
        return self.data[0][i], self.data[1][i]


SOURCES: dict[str, Callable[[Any], Any]] = {
    "dataset": lambda data: Pairs(data),
    "list": lambda data: list(zip(*data, strict=True)),
    "loader": lambda data: DataLoader(TensorDataset(*data), batch_size=4),
    "shuffling loader": lambda data: DataLoader(Pairs(data), batch_size=4, shuffle=True),
    "loader with workers": lambda data: DataLoader(Pairs(data), batch_size=4, num_workers=2),
    "stream": lambda data: Stream(data),
    "loader of a stream": lambda data: DataLoader(Stream(data), batch_size=4),
}


@pytest.mark.parametrize("source", SOURCES)
def test_kinds_of_data_give_the_same_table(source: str, tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    plain = persample.scan(model, loss_fn, data, out=tmp_path / "plain", **QUICK).table()
    found = persample.scan(model, loss_fn, SOURCES[source](data), out=tmp_path / "out", **QUICK)
    assert found.table().equals(plain)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda d: iter(zip(*d, strict=True)), "can be read only once"),
        (lambda d: DataLoader(Pairs(d), sampler=WeightedRandomSampler([1.0] * N, 5)), "WeightedRandomSampler of the"),
        (lambda d: DataLoader(Pairs(d), batch_sampler=[[0, 1], [5, 6]]), "The list of the loader selects"),
        (lambda d: {"x": d[0], "names": ["a"] * N}, "All values of a dict of data must be tensors"),
        (lambda d: Stream((d[0][:0], d[1][:0])), "the data has no examples"),
        (lambda d: DataLoader(Pairs(d), batch_size=None), "does not batch"),
        (lambda d: (d[0], d[1][:-1]), "different numbers of examples"),
        (lambda d: 3, "got an int"),
        (lambda d: (d[0][:0], d[1][:0]), "The data has no examples"),
        (lambda d: (d[0],), "CrossEntropyLoss takes outputs and targets"),
    ],
)
def test_data_errors(data: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    model, given, loss_fn, _ = build("images")
    with pytest.raises(persample.PerSampleError, match=message):
        persample.scan(model, loss_fn, data(given), out=tmp_path / "out", **QUICK)


def test_temporary_directory_is_removed_with_the_scan() -> None:
    model, data, loss_fn, _ = build("images")
    found = persample.scan(model, loss_fn, data, **QUICK)
    directory = found.directory
    assert directory.is_dir() and len(found.column("loss")) == N
    del found
    assert not directory.exists()


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_table_file(kind: Any, tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    found = persample.scan(model, loss_fn, data, out=tmp_path, table=kind, classes=["cat", "dog", "owl"], **QUICK)
    path = tmp_path / f"table.{kind}"
    table = parquet.read_table(path) if kind == "parquet" else csv.read_csv(path)
    assert table.column_names == [*found.columns, "class", "predicted_class", "suggested_class"]
    np.testing.assert_allclose(table["norm"].to_numpy(), found.column("norm"))
    assert table["class"].to_pylist() == [["cat", "dog", "owl"][label] for label in data[1].tolist()]


# ---- the model is restored ----


def test_model_is_restored(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("language")
    model.mix.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for wrong in (False, True):
        torch.manual_seed(5)
        fails = lambda model, batch: (model(batch["tokens"]) - model(batch["tokens"]).mean(0)).sum((1, 2))  # noqa: E731
        try:
            persample.scan(model, fails if wrong else loss_fn, data, out=tmp_path / str(wrong), device="cpu", **QUICK)
        except persample.SamplesMixed:
            assert wrong
        after = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(1))
        assert model.training and model.drop.training and not model.mix.training
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_mixed_samples_are_refused_before_the_mean_is_computed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, track_running_stats=False), nn.Linear(36, 3)).double()
    with pytest.raises(persample.SamplesMixed, match=r"module '1' \(BatchNorm1d\)"):
        persample.scan(model, nn.CrossEntropyLoss(), images(), out=tmp_path, **QUICK)
    assert not list(tmp_path.glob("*.npz"))


# ---- values that are not finite ----


def make_images_with_nan() -> tuple[Tensor, Tensor]:
    pictures, labels = images()
    pictures[9] = math.nan
    return pictures, labels


@pytest.mark.parametrize("quantities", [["loss", "norm"], ["loss", "norm", "alignment", "noise_scale"]])
def test_loss_that_is_not_finite(quantities: list[str], tmp_path: Path) -> None:
    model, _, loss_fn, _ = build("images")
    data = make_images_with_nan()
    with pytest.raises(NotFinite, match=r"loss of example 9 is not a finite number.*nonfinite='keep'") as caught:
        persample.scan(model, loss_fn, data, out=tmp_path / "out", quantities=quantities, **QUICK)
    assert caught.value.ids == [9]
    found = persample.scan(
        model, loss_fn, data, out=tmp_path / "kept", quantities=quantities, nonfinite="keep", **QUICK
    )
    assert np.flatnonzero(np.isnan(found.column("norm"))).tolist() == [9] == found.summary["not_finite"]
    assert found.ranked("norm", 1).ids.tolist() == [9]
    rest = [i for i in range(N) if i != 9]
    plain = persample.scan(
        model, loss_fn, (data[0][rest], data[1][rest]), out=tmp_path / "rest", quantities=quantities, **QUICK
    )
    for name in set(plain.columns) - {"id"}:
        np.testing.assert_allclose(found.column(name)[rest], plain.column(name), rtol=1e-6)
    if "noise_scale" in quantities:
        assert found.summary["noise_scale"] == pytest.approx(plain.summary["noise_scale"])


def test_finite_loss_with_gradient_that_is_not_finite(tmp_path: Path) -> None:
    x = torch.rand(N, 3).double() + 0.1
    x[5] = 0  # the derivative of the square root is infinite at 0
    model = nn.Linear(3, 1, bias=False).double()
    loss_fn = lambda model, batch: model(batch).abs().sum(1).sqrt()  # noqa: E731
    with pytest.raises(NotFinite, match="gradient of example 5 is"):
        persample.scan(model, loss_fn, x, out=tmp_path / "out", **QUICK)
    options = {**QUICK, "quantities": ALL_QUANTITIES}
    kept = persample.scan(model, loss_fn, x, out=tmp_path / "kept", nonfinite="keep", **options)
    rest = [i for i in range(N) if i != 5]
    plain = persample.scan(model, loss_fn, x[rest], out=tmp_path / "rest", **options)
    np.testing.assert_allclose(kept.column("alignment")[rest], plain.column("alignment"))
    estimates = kept.column("estimated_alignment")
    np.testing.assert_allclose(estimates[rest], plain.column("estimated_alignment"))
    assert np.isnan(estimates[5]) and kept.summary["noise_scale"] == pytest.approx(plain.summary["noise_scale"])


def test_queries_ignore_nan(tmp_path: Path) -> None:
    model, _, loss_fn, _ = build("images")
    found = persample.scan(model, loss_fn, make_images_with_nan(), out=tmp_path, nonfinite="keep", **QUICK)
    assert found.neighbours(8, 3).scores.isfinite().all() and 9 not in found.neighbours(8, N).ids.tolist()[:3]
    assert 9 not in found.outliers(3).ids.tolist() and not any(9 in group for group in found.duplicates())


class Interrupted(Exception):
    pass


SUMMED = {"quantities": ["loss", "norm", "noise_scale"], "project": None}  # the gradients are added up in the one pass


@pytest.mark.parametrize("chosen", [{"quantities": QUANTITIES}, {"quantities": ALL_QUANTITIES}, SUMMED])
@pytest.mark.parametrize("after", [0, 1, 3, 4, 6, 8, 9, 11, 12, 13])
def test_interrupted_scan_continues(
    after: int, chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after a number of losses: for the mean or for the shards, of the first or second checkpoint."""
    monkeypatch.setattr(gradient_sum, "SHARE_OF_SAVES", math.inf)  # save the sum after each shard
    model, data, _, _ = build("images")
    states = [{name: value * scale for name, value in model.state_dict().items()} for scale in (1, 2)]
    options = {**QUICK, "checkpoints": states, **chosen}
    calls = [0, math.inf]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] > calls[1]:
            raise Interrupted
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    persample.scan(model, loss_fn, data, out=tmp_path / "whole", **options)
    uninterrupted = calls[0]
    calls[:] = [0, after * uninterrupted // 14]
    with pytest.raises(Interrupted):
        persample.scan(model, loss_fn, data, out=tmp_path / "stopped", **options)
    with pytest.raises(ScanError, match="is not finished"):
        persample.Scan(tmp_path / "stopped")
    calls[1] = math.inf
    persample.scan(model, loss_fn, data, out=tmp_path / "stopped", **options)
    assert read_files(tmp_path / "stopped") == read_files(tmp_path / "whole")
    assert calls[0] <= uninterrupted + 10, "more than a shard was computed again"
    calls[0] = 0
    persample.scan(model, loss_fn, data, out=tmp_path / "stopped", **options)
    assert calls[0] == 0, "a finished scan was computed again"


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_scan_of_equal_layers_continues(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted two times at random places, of one checkpoint or of both."""
    generator = np.random.default_rng(seed)
    monkeypatch.setattr(gradient_sum, "SHARE_OF_SAVES", math.inf if seed % 2 else 1e-9)
    model, data, _ = build_layers()
    states = [{name: value * scale for name, value in model.state_dict().items()} for scale in (1, 2)]
    quantities = ALL_QUANTITIES if seed >= 2 else QUANTITIES
    options = {**QUICK, "checkpoints": states, "quantities": quantities, "project": 64, "dtype": "float32"}
    calls = [0, math.inf]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] > calls[1]:
            raise Interrupted
        return language_loss(model, batch)

    persample.scan(model, loss_fn, data, out=tmp_path / "whole", **options)
    places = sorted(generator.choice(calls[0] - 4, 2, replace=False).tolist())
    for place in (places[0], places[1] - places[0] + 1):
        calls[:] = [0, place]
        with pytest.raises(Interrupted):
            persample.scan(model, loss_fn, data, out=tmp_path / "stopped", **options)
    calls[1] = math.inf
    persample.scan(model, loss_fn, data, out=tmp_path / "stopped", **options)
    assert read_files(tmp_path / "stopped") == read_files(tmp_path / "whole")


KILLED = """
import sys, time, torch
sys.path.insert(0, {root!r})
import persample
from persample.scanning import gradient_sum
from tests.support.scans import build, build_layers
gradient_sum.SHARE_OF_SAVES = {share}
model, data, loss_fn = {build}[:3]
def slow(model, batch):
    time.sleep(0.05)
    print("batch", flush=True)
    if isinstance(batch, dict):
        return loss_fn(model, batch)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
persample.scan(model, slow, data, out={out!r}, **{options!r})
"""


@pytest.mark.parametrize(
    ("share", "case", "chosen"),  # the sum of the gradients is saved after each shard, or after the first one
    [
        ("0", "build('images')", {}),  # there is no sum
        ("float('inf')", "build('images')", SUMMED),
        ("1e-9", "build_layers()", SUMMED),
    ],
)
def test_killed_scan_continues(share: str, case: str, chosen: dict[str, Any], tmp_path: Path) -> None:
    options = {**QUICK, **chosen}
    script = KILLED.format(root=str(ROOT), out=str(tmp_path / "killed"), share=share, build=case, options=options)
    for wanted in (5, 8, 100):  # in the second shard, in the third one, and not at all
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(wanted):
            if not process.stdout.readline():
                break
        process.send_signal(signal.SIGKILL) if wanted < 100 else process.wait()
        process.communicate()
    model, data, loss_fn = (build_layers() if case == "build_layers()" else build("images"))[:3]
    persample.scan(model, loss_fn, data, out=tmp_path / "whole", **options)
    killed, whole = read_files(tmp_path / "killed"), read_files(tmp_path / "whole")
    assert killed.keys() == whole.keys() and all(killed[name] == whole[name] for name in whole if name != "scan.json")


def test_incomplete_shard_is_computed_again(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    persample.scan(model, loss_fn, data, out=tmp_path, **QUICK)
    whole = read_files(tmp_path)
    make_stale((tmp_path / "0" / "00001.npz").rename(tmp_path / "0" / "00001.npz.77.unfinished"))
    (tmp_path / "0" / "00001.npy").write_bytes(b"half of it")
    (tmp_path / "summary.json").unlink()
    assert Store(tmp_path).count_shards(0) == 1
    persample.scan(model, loss_fn, data, out=tmp_path, **QUICK)
    assert read_files(tmp_path) == whole


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 2}, "The batch size changed since .* was started: 4 -> 2"),
        ({"project": None}, "The option 'project' changed since .* was started: 16 -> None"),
        ({"quantities": ["norm"]}, "The option 'quantities' changed since"),
        ({"data": (images()[0] + 1, images()[1])}, "The data changed since"),
        (
            {"data": tuple(part[:-1] for part in images())},
            "The number of examples changed since .* was started: 23 -> 22",
        ),
        ({"weights": 2.0}, "The weights of the model changed since"),
        ({"parameters": ["5.weight"]}, "The option 'groups' changed since"),
    ],
)
def test_changed_settings_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    persample.scan(model, loss_fn, data, out=tmp_path, **QUICK)
    before = read_files(tmp_path)
    options = {**QUICK, **changed}
    data = options.pop("data", data)
    with torch.no_grad():
        model[0].weight *= options.pop("weights", 1.0)
    with pytest.raises(ScanError, match=message):
        persample.scan(model, loss_fn, data, out=tmp_path, **options)
    assert read_files(tmp_path) == before
    persample.scan(model, loss_fn, data, out=tmp_path, resume=False, **options)
    persample.scan(model, loss_fn, data, out=tmp_path / "fresh", **options)
    fresh = read_files(tmp_path / "fresh")
    assert {name: part for name, part in read_files(tmp_path).items() if not name.startswith("fresh")} == fresh


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    model, data, loss_fn, _ = build("images")
    with pytest.raises(ScanError, match="exists and contains no scan"):
        persample.scan(model, loss_fn, data, out=tmp_path, resume=False, **QUICK)
    assert (tmp_path / "thesis.txt").exists()
    with pytest.raises(ScanError, match="There is no scan in"):
        persample.Scan(tmp_path)


FULL = """
import resource, sys
sys.path.insert(0, {root!r})
import persample
from tests.support.scans import QUICK, build
model, data, loss_fn, _ = build("images")
resource.setrlimit(resource.RLIMIT_FSIZE, (2800, 2800))
try:
    persample.scan(model, loss_fn, data, out={out!r}, **{{**QUICK, "project": 300}})
except persample.PerSampleError as error:
    sys.exit(str(error))
"""


def test_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files has the same effect as a full disk."""
    out = tmp_path / "out"
    script = FULL.format(root=str(ROOT), out=str(out))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No space left to write" in done.stderr and "run the scan again to continue" in done.stderr
    assert not list(out.rglob("*.unfinished")) and not (out / "0" / "00000.npy").exists()
    assert Store(out).count_shards(0) == 0
    model, data, loss_fn, _ = build("images")
    for directory in (out, tmp_path / "whole"):
        persample.scan(model, loss_fn, data, out=directory, **{**QUICK, "project": 300})
    assert read_files(out) == read_files(tmp_path / "whole")


# ---- several processes ----


def scan_in_this_process(directory: str) -> None:
    """Scan as one of the two processes of `by_two`."""
    model, data, loss_fn, _ = build("images")
    for name, given in {"data": data, "stream": Stream(data)}.items():
        persample.scan(model, loss_fn, given, out=Path(directory) / name, **QUICK)
        persample.scan(model, loss_fn, given, out=Path(directory) / f"exact {name}", **QUICK, quantities=ALL_QUANTITIES)


@pytest.fixture(scope="module")
def by_two(processes: TwoProcesses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with scans that two processes have made."""
    directory = tmp_path_factory.mktemp("two")
    processes.run(scan_in_this_process, directory=str(directory))
    return directory


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("stream", [False, True])
def test_two_processes_write_the_bytes_of_one(stream: bool, by_two: Path, tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    persample.scan(model, loss_fn, Stream(data) if stream else data, out=tmp_path, **QUICK)
    alone, shared = read_files(tmp_path), read_files(by_two / ("stream" if stream else "data"))
    assert alone.keys() == shared.keys() and [name for name in alone if alone[name] != shared[name]] in (
        [],
        ["scan.json"],
    )


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("stream", [False, True])
def test_two_processes_give_the_result_of_one(stream: bool, by_two: Path, tmp_path: Path) -> None:
    """With the exact alignment, for which the gradients are added up."""
    model, data, loss_fn, _ = build("images")
    given, options = Stream(data) if stream else data, {**QUICK, "quantities": ALL_QUANTITIES}
    alone = persample.scan(model, loss_fn, given, out=tmp_path, **options)
    shared = persample.Scan(by_two / f"exact {'stream' if stream else 'data'}")
    assert shared.columns == alone.columns
    for name in alone.columns:  # the mean is summed in a different order
        np.testing.assert_allclose(shared.column(name), alone.column(name), rtol=1e-12, atol=1e-14)
    exact = {"loss", "norm", "self_influence", "id", "label"}
    assert all(np.array_equal(shared.column(name), alone.column(name)) for name in exact)
    for shard in range(alone.store.count_shards(0)):
        assert np.array_equal(shared.store.read_rows(0, shard), alone.store.read_rows(0, shard))
    assert shared.summary["noise_scale"] == pytest.approx(alone.summary["noise_scale"], rel=1e-9)


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantities": ["loss", "colour"]}, r"Unknown quantities \['colour'\]. Choose from loss, norm"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'keep'"),
        ({"project": 0}, "project must be a positive number of dimensions"),
        ({"dtype": "int8"}, "dtype must be 'float16' or 'float32'"),
        ({"table": "xls"}, "table must be 'parquet' or 'csv'"),
        ({"checkpoints": []}, "at least one state dict or file"),
        ({"checkpoints": ["no.pt"]}, "There is no checkpoint no.pt"),
        ({"checkpoints": [{"other": torch.ones(2)}]}, "Checkpoint 0 does not fit the model"),
        ({"learning_rates": [0.1, 0.2]}, "2 learning rates for 1 checkpoints"),
        ({"groups": {"a": ["none"]}}, "groups contains 'none', which is not a scanned parameter"),
        ({"groups": {"a": ["5.bias"], "b": ["5.bias"]}}, "groups contains '5.bias' twice"),
        ({"parameters": []}, "none of the chosen parameters requires grad"),
        (
            {"loss_fn": lambda m, b: m(b[0])},
            r"returned a tensor of shape \(4, 3\) for 4 examples; it must return one loss per example",
        ),
        ({"loss_fn": lambda m, b: 3.0}, "returned a float; it must return a tensor"),
        ({"loss_fn": 3}, "loss_fn must be a function"),
        ({"model": "resnet"}, "model must be an nn.Module, got a str"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    options = {"model": model, "loss_fn": loss_fn, **QUICK, **changed}
    with pytest.raises(persample.PerSampleError, match=message):
        persample.scan(data=data, out=tmp_path / "out", **options)


def test_progress_bar_shows_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, loss_fn, _ = build("images")
    persample.scan(model, loss_fn, data, out=tmp_path, **{**QUICK, "progress": True})
    shown = capsys.readouterr().err
    assert "examples: 100%" in shown and "mean gradient" not in shown and "examples/s]" in shown
    options = {**QUICK, "progress": True, "quantities": ["alignment"]}
    persample.scan(model, loss_fn, data, out=tmp_path / "exact", **options)
    shown = capsys.readouterr().err
    assert "examples: 100%" in shown and "mean gradient: 100%" in shown


def test_missing_package_is_named() -> None:
    code = "import sys; sys.modules['pyarrow'] = None\nimport persample\npersample.scan(None, None, None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: persample.scan needs pyarrow: pip install 'persample[scan]'" in done.stderr


def test_examples_of_a_stream_are_not_kept(tmp_path: Path) -> None:
    """At no time are more examples alive than a few batches have."""
    alive = [0, 0]

    class Example:
        def __init__(self) -> None:
            alive[0] += 1
            alive[1] = max(alive)

        def __del__(self) -> None:
            alive[0] -= 1

    class Examples:
        def __iter__(self) -> Iterator[Any]:
            for _ in range(400):
                yield Example()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum(1)

    persample.scan(
        nn.Linear(3, 2), loss_fn, Examples(), out=tmp_path, collate=lambda part: torch.ones(len(part), 3), **QUICK
    )
    assert alive[1] <= 8
