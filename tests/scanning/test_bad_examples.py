"""Examples that cannot be read or scanned: all are named, and all others can be scanned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import persample
from persample.scanning import BadExamples, ScanError, rescan
from persample.scanning.errors import UnreadableExample

N = 20
OPTIONS: dict[str, Any] = {"batch_size": 2, "shard_size": 4, "project": 8, "progress": False}
FAULTS = {
    0: "cannot be read: damaged",
    5: "the shape differs from the usual (6,): (5,)",
    8: "cannot be read: damaged",
    9: "cannot be read: damaged",
    10: "cannot be read: damaged",
    11: "cannot be read: damaged",
    13: "the label is not from 0 to 2: 7",
    17: "the inputs contain NaN or infinity",
}


class Dirty(Dataset[Any]):
    """Examples of which those in `faults` are bad. All of shard 2 is."""

    def __init__(self, faults: Any = FAULTS, size: int = N, error: type[Exception] = UnreadableExample) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(size, 6, generator=generator), torch.arange(size) % 3
        self.faults, self.error = faults, error

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x, y, fault = self.x[i], int(self.y[i]), self.faults.get(i, "")
        if fault.startswith("cannot"):
            raise self.error("damaged")
        if "shape" in fault:
            x = x[:5]
        return (x * float("nan") if "NaN" in fault else x), (7 if "label" in fault else y)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def scan(data: Any, **options: Any) -> persample.scanning.Scan:
    return persample.scan(make_net(), nn.CrossEntropyLoss(), data, **{**OPTIONS, **options})


@pytest.mark.parametrize("error", [UnreadableExample, OSError])
@pytest.mark.parametrize("first", [0, 5])
def test_all_bad_examples_are_named_at_once(error: type[Exception], first: int) -> None:
    """Also if the first example is one of them, and whatever the error of the dataset is."""
    faults = {i: fault for i, fault in FAULTS.items() if i >= first}
    with pytest.raises(BadExamples, match="skip_bad=True") as caught:
        scan(Dirty(faults, error=error))
    assert caught.value.ids == list(faults)


def test_a_dataset_that_reads_nothing_raises_its_own_error() -> None:
    with pytest.raises(OSError, match="damaged"):
        scan(Dirty(dict.fromkeys(range(N), "cannot"), error=OSError))


@pytest.mark.parametrize("kind", ["default", "collate", "loader"])
def test_all_others_are_scanned(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"collate": lambda examples: default_collate(examples)} if kind == "collate" else {}
    faults = {i: fault for i, fault in FAULTS.items() if kind != "collate" or "shape" not in fault}
    data: Any = Dirty(faults)
    good = [i for i in range(N) if i not in faults]
    checkpoints = [make_net().state_dict()] * 2
    expected = scan([data[i] for i in good], checkpoints=checkpoints)
    source = DataLoader(data, batch_size=2, num_workers=1) if kind == "loader" else data
    found = scan(source, skip_bad=True, checkpoints=checkpoints, out=tmp_path / "out", **options)
    assert found.skipped == faults and found.summary["not_finite"] == []
    for name in ("loss", "norm", "norm/weight", "given_probability"):
        column = found.column(name)
        assert column[good] == pytest.approx(expected.column(name), rel=1e-5), name
        assert np.isnan(column[list(faults)]).all(), name
    assert found.column("label")[good].tolist() == expected.column("label").tolist()
    assert found.summary["labels"] == expected.summary["labels"]
    assert found.summary["noise_scale"] == pytest.approx(expected.summary["noise_scale"], rel=0.01)
    assert sorted(found.ranked().ids.tolist()) == good and len(found.ranked(k=3)) == 3
    assert not set(found.outliers(5).ids.tolist()) & set(faults)
    if kind == "default":
        assert found.report(data=data).exists()


@pytest.mark.parametrize("quantities", [["loss", "norm", "alignment"], ["loss", "norm", "noise_scale"]])
def test_skipped_examples_are_not_in_the_mean(quantities: list[str]) -> None:
    data = Dirty()
    good = [i for i in range(N) if i not in FAULTS]
    options: dict[str, Any] = {"project": None, "quantities": quantities}
    expected, found = scan([data[i] for i in good], **options), scan(data, skip_bad=True, **options)
    for name in ("alignment",) if "alignment" in quantities else ():
        assert found.column(name)[good] == pytest.approx(expected.column(name), rel=1e-4)
    if "noise_scale" in quantities:
        assert found.summary["noise_scale"] == pytest.approx(expected.summary["noise_scale"], rel=1e-4)


def test_texts_that_are_sorted_by_length() -> None:
    texts = [("word " * (1 + i % 4), i % 3) for i in range(N)]

    def collate(examples: list[Any]) -> Any:
        return torch.tensor([[float(len(text))] * 6 for text, _ in examples]), torch.tensor([y for _, y in examples])

    class Texts(Dirty):
        def __getitem__(self, i: int) -> Any:
            if i in self.faults:
                raise UnreadableExample("damaged")
            return texts[i]

    found = scan(Texts({0: "cannot", 6: "cannot"}), collate=collate, skip_bad=True)
    expected = scan(texts, collate=collate)
    good = [i for i in range(N) if i not in (0, 6)]
    assert set(found.skipped) == {0, 6}
    assert found.column("loss")[good] == pytest.approx(expected.column("loss")[good], rel=1e-5)


def test_nothing_to_scan_is_refused() -> None:
    with pytest.raises(ScanError, match="Not one of the examples"):
        scan(Dirty(dict.fromkeys(range(N), "cannot")), skip_bad=True)


# ---- scans that were started before ----


def test_a_scan_that_has_measured_nothing_takes_other_data(tmp_path: Path) -> None:
    with pytest.raises(BadExamples):
        scan(Dirty({2: "label"}), out=tmp_path / "out")
    assert (tmp_path / "out" / "scan.json").exists()
    assert len(scan(Dirty({}, size=N - 1), out=tmp_path / "out")) == N - 1
    with pytest.raises(ScanError, match="number of examples changed"):
        scan(Dirty({}, size=N - 2), out=tmp_path / "out")


def test_a_scan_that_has_met_a_bad_example_goes_on_without_it(tmp_path: Path) -> None:
    faults = {i: fault for i, fault in FAULTS.items() if i in (9, 11, 13, 17)}
    data, ids = Dirty(faults, size=80), [f"k{i}" for i in range(80)]  # so that only every second example is digested
    with pytest.raises(BadExamples):
        scan(data, out=tmp_path / "out", ids=ids)
    before = (tmp_path / "out" / "0" / "00000.npz").stat().st_mtime_ns
    found = scan(data, out=tmp_path / "out", ids=ids, skip_bad=True)
    assert (tmp_path / "out" / "0" / "00000.npz").stat().st_mtime_ns == before
    expected = scan(data, ids=ids, skip_bad=True)
    assert found.skipped == expected.skipped == faults
    np.testing.assert_array_equal(found.column("loss"), expected.column("loss"))
    with pytest.raises(ScanError, match="skip_bad"):
        scan(data, out=tmp_path / "out", ids=ids)


@pytest.mark.parametrize("project", [8, None])
def test_a_rescan_skips_what_its_base_skipped(project: int | None, tmp_path: Path) -> None:
    data, mended = Dirty(), Dirty({i: fault for i, fault in FAULTS.items() if i not in (0, 13)})
    base = scan(data, out=tmp_path / "base", skip_bad=True, project=project)
    again = rescan(base, make_net(), nn.CrossEntropyLoss(), mended, before=data, out=tmp_path / "again")
    expected = scan(mended, skip_bad=True, project=project)
    assert again.skipped == expected.skipped == mended.faults
    np.testing.assert_allclose(again.column("loss"), expected.column("loss"), rtol=1e-5)
    assert again.summary["noise_scale"] == pytest.approx(expected.summary["noise_scale"], rel=1e-3)
