"""Scans to and from object storage, by fsspec: the files of a scan on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn

import persample
from persample.cli import main
from persample.scanning import Scan, ScanError
from persample.scanning.decisions import Decision, Decisions
from persample.scanning.measure import ALL_QUANTITIES
from tests.support.processes import torchrun
from tests.support.scans import QUICK, build, read_files

ADDRESS = "memory://bucket/scan"


@pytest.fixture(autouse=True)
def storage() -> Iterator[Any]:
    """Object storage in memory, which is empty before the test and after it."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def read_storage(system: Any, folder: str = "/bucket/scan") -> dict[str, bytes]:
    """The contents of all files by name."""
    return {name.removeprefix(f"{folder}/"): system.cat(name) for name in system.find(folder)}


def test_same_bytes_as_on_the_disk(storage: Any, tmp_path: Path) -> None:
    model, data, loss_fn, reduction = build("images")
    options = {**QUICK, "loss_reduction": reduction, "quantities": ALL_QUANTITIES}
    persample.scan(model, loss_fn, data, out=tmp_path / "scan", **options)
    found = persample.scan(model, loss_fn, data, out=ADDRESS, **options)
    assert read_storage(storage) == read_files(tmp_path / "scan")
    assert found.table().equals(Scan(tmp_path / "scan").table())
    other = persample.scan(model, loss_fn, data, out=ADDRESS, resume=False, **{**QUICK, "project": None})
    assert other.settings["project"] is None and not any(name.endswith(".npy") for name in read_storage(storage))


def test_only_what_is_read_is_fetched(storage: Any) -> None:
    model, data, loss_fn, _ = build("images")
    weights = [model.state_dict(), {name: 2 * part for name, part in model.state_dict().items()}]
    persample.scan(model, loss_fn, data, out=ADDRESS, checkpoints=weights, **QUICK)
    found = Scan(ADDRESS)
    assert {path.name for path in found.directory.rglob("*.np?")} == set()
    assert len(found.ranked("norm", 3).ids) == 3
    assert {path.parent.name for path in found.directory.rglob("*.npz")} == {"1"}
    assert found.neighbours(2, k=3).ids.shape == (3,)
    assert not list(found.directory.glob("0/*.npy"))


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Examples whose batches cannot be made from example 20 on, until `fails` is False."""

    fails = True

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(i)), i % 2

    def collate(self, rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """A batch."""
        if self.fails and float(rows[0][0][0]) == 20:
            raise KeyboardInterrupt
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])


def test_continued(storage: Any, tmp_path: Path) -> None:
    net, data = nn.Linear(4, 2), Rows()
    options: dict[str, Any] = {**QUICK, "collate": data.collate}
    with pytest.raises(KeyboardInterrupt):
        persample.scan(net, nn.CrossEntropyLoss(), data, out=ADDRESS, **options)
    stored = read_storage(storage)
    assert "0/00001.npz" in stored and "0/00002.npz" not in stored
    with pytest.raises(ScanError, match=f"The scan in {ADDRESS} is not finished"):
        Scan(ADDRESS)
    data.fails = False
    persample.scan(net, nn.CrossEntropyLoss(), data, out=ADDRESS, **options)
    persample.scan(net, nn.CrossEntropyLoss(), data, out=tmp_path / "scan", **options)
    assert read_storage(storage) == read_files(tmp_path / "scan")
    storage.pipe_file("/bucket/other/notes.txt", b"mine")
    with pytest.raises(ScanError, match="memory://bucket/other exists and contains no scan"):
        persample.scan(net, nn.CrossEntropyLoss(), data, out="memory://bucket/other", **options)


def test_report_and_decisions(storage: Any) -> None:
    model, data, loss_fn, _ = build("images")
    found = persample.scan(model, loss_fn, data, out=ADDRESS, **QUICK)
    found.report(data=data)
    assert storage.cat("/bucket/scan/report.html").startswith(b"<!doctype html>")
    assert storage.exists("/bucket/scan/plots/loss.png")
    for i, word in ((3, "keep"), (5, "remove")):
        Decisions(Scan(ADDRESS).store).add(i, Decision(word))
    assert Decisions(Scan(ADDRESS).store).read() == {3: Decision("keep"), 5: Decision("remove")}


SCRIPT = """
import torch
def to_scan():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2), (torch.randn(40, 4), torch.arange(40) % 2), torch.nn.CrossEntropyLoss()
"""
SMALL = ["--batch-size", "4", "--shard-size", "8", "--project", "8", "--quiet"]


def test_commands(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stored_task.py").write_text(SCRIPT)
    assert main(["scan", "stored_task.py:to_scan", "--out", ADDRESS, *SMALL, "--report", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files["report"] == f"{ADDRESS}/report.html" and files["table"] == f"{ADDRESS}/table.parquet"
    assert {"report.html", "command.json"} <= read_storage(storage).keys()
    assert main(["query", ADDRESS, "top", "-k", "3"]) == 0
    assert main(["report", ADDRESS, "--out", "page.html"]) == 0 and Path("page.html").exists()
    assert main(["query", "nowhere://bucket/scan", "top"]) == 2
    assert "nowhere://bucket/scan cannot be opened: Protocol not known" in capsys.readouterr().err


def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has a folder of its own; they meet in the storage."""
    (tmp_path / "stored_task.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    command = ["scan", f"{tmp_path}/stored_task.py:to_scan", *SMALL, "--quantities", "loss,norm,alignment", "--out"]
    output = torchrun("persample", *command, f"file://{tmp_path}/two")
    assert output.count("first by loss:") == 1, output
    assert main([*command, f"{tmp_path}/one"]) == 0
    one, two = Scan(tmp_path / "one"), Scan(f"file://{tmp_path}/two")
    assert torch.allclose(*(torch.from_numpy(found.column("alignment")) for found in (one, two)))
    assert one.store.read_rows(0, 3).tobytes() == two.store.read_rows(0, 3).tobytes()
