"""Scans in folders from somebody else, at the command line: no code runs, no link is followed, no archive expands."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from persample.cli import main
from persample.scanning import Scan
from tests.support.command_line import run_command

TASKS = """
import torch
from torch import nn

class Data(torch.utils.data.TensorDataset):
    classes = ["=cmd|' /C calc'!A0", "+1+1", "-2", "@sum", "plain"]

def scanned():
    torch.manual_seed(0)
    data = Data(torch.randn(20, 6), torch.arange(20) % 5)
    return nn.Linear(6, 5), data, nn.CrossEntropyLoss()

def test():
    return torch.randn(2, 6), torch.tensor([0, 1])

def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))
"""
EVIL = "from pathlib import Path\nPath('ran').touch()\ndef scanned():\n    Path('called').touch()\n"
QUICK = ["--batch-size", "4", "--shard-size", "8", "--project", "8", "--quiet"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    (directory / "tasks.py").write_text(TASKS)
    done = run_command("scan", "tasks:scanned", "--out", "theirs", "--table-format", "csv", *QUICK, cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def theirs(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("tasks", "evil"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    shutil.copy(original / "tasks.py", tmp_path)
    return shutil.copytree(original / "theirs", tmp_path / "theirs")


# ---- code ----


def name_other_function(theirs: Path, **changes: object) -> None:
    path = theirs / "command.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "arguments",
    [["report", "theirs"], ["query", "theirs", "influence", "tasks:test"], ["query", "theirs", "neighbours", "1"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_function_that_a_folder_names_is_not_imported(arguments: list[str], theirs: Path) -> None:
    Path("evil.py").write_text(EVIL)
    name_other_function(theirs, target="evil:scanned", tokenizer="evil:scanned")
    main(arguments)
    assert not Path("ran").exists() and "evil" not in sys.modules


def test_function_that_the_user_names_is_called(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "theirs"]) == 0
    assert "--module 'tasks:scanned' would call the function" in capsys.readouterr().err
    without = Path("theirs/report.html").read_text()
    assert main(["report", "theirs", "--module", "tasks:scanned"]) == 0
    assert len(Path("theirs/report.html").read_text()) > len(without)
    assert main(["query", "theirs", "influence", "tasks:test"]) == 2
    assert "add --module 'tasks:scanned'" in capsys.readouterr().err
    assert main(["query", "theirs", "influence", "tasks:test", "--module", "tasks:scanned"]) == 0


def test_report_does_not_show_files_that_a_folder_only_names(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The author does not know the private images, and so not their digest."""
    Path("private/cats").mkdir(parents=True)
    for i in range(20):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(f"private/cats/{i:02d}.png")
    name_other_function(theirs, images="private", image_size=8)
    assert main(["report", "theirs"]) == 2
    assert "private is not the data of this scan" in capsys.readouterr().err
    assert not Path("theirs/report.html").exists()
    assert main(["report", "theirs", "--no-data"]) == 0


def test_images_of_the_user_are_shown_without_code(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cats", "dogs"):
        Path("photos", name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (50 * i, 0, 0)).save(f"photos/{name}/{i}.png")
    assert main(["scan", "tasks:images", "--images", "photos", "--image-size", "8", "--out", "own", *QUICK]) == 0
    monkeypatch.delitem(sys.modules, "tasks")
    assert main(["report", "own"]) == 0
    assert "data:image" in Path("own/report.html").read_text() and "tasks" not in sys.modules


# ---- links ----


def run_and_read_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def make_precious(name: str) -> dict[str, bytes]:
    """A directory of the user, with files named like those of a scan."""
    Path(name).mkdir()
    for file in ("00000.npz", "00001.npy", "x.unfinished"):
        Path(name, file).write_bytes(b"precious")
        os.utime(Path(name, file), (0, 0))
    return read_all(name)


def read_all(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def test_restart_removes_nothing_behind_a_link(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = make_precious("precious")
    shutil.rmtree(theirs / "0")
    (theirs / "0").symlink_to(Path("precious").resolve())
    scan = ["scan", "tasks:scanned", "--out", "theirs", "--restart", *QUICK]
    assert "theirs/0 is a symbolic link" in run_and_read_error(scan, capsys)
    assert read_all("precious") == before
    assert (theirs / "scan.json").exists(), "the scan was removed in part"


def test_restart_of_a_linked_scan_removes_nothing(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("theirs")
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    scan = ["scan", "tasks:scanned", "--out", "link", "--restart", "--table-format", "csv", *QUICK]
    assert "link is a symbolic link to a scan" in run_and_read_error(scan, capsys)
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before


def test_resumed_scan_writes_nothing_behind_a_link(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / "summary.json").unlink()
    shutil.rmtree(theirs / "0")
    before = make_precious("precious")
    (theirs / "0").symlink_to(Path("precious").resolve())
    for name in before:
        if name.endswith("npz"):
            Path("precious", name).unlink()
    before = read_all("precious")
    scan = ["scan", "tasks:scanned", "--out", "theirs", "--table-format", "csv", *QUICK]
    assert "theirs/0 is a symbolic link" in run_and_read_error(scan, capsys)
    assert read_all("precious") == before


@pytest.mark.parametrize("name", ["scan.json", "summary.json", "0/00001.npz", "0/00001.npy", "0"])
def test_nothing_is_read_through_a_link(name: str, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / name).rename("moved")
    (theirs / name).symlink_to(Path("moved").resolve())
    message = run_and_read_error(["query", "theirs", "neighbours", "1"], capsys)
    assert f"theirs/{name} is a symbolic link" in message and message.count("\n") == 1


def test_report_and_plots_are_not_written_through_a_link(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.html").write_text("precious")
    (theirs / "report.html").symlink_to(Path("notes.html").resolve())
    assert main(["report", "theirs"]) == 0
    assert Path("notes.html").read_text() == "precious" and not (theirs / "report.html").is_symlink()
    shutil.rmtree(theirs / "plots")
    Path("pictures").mkdir()
    (theirs / "plots").symlink_to(Path("pictures").resolve())
    assert "theirs/plots is a symbolic link" in run_and_read_error(["report", "theirs"], capsys)
    assert list(Path("pictures").iterdir()) == []


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_files_of_a_scan_have_the_permissions_of_the_umask(umask: int, theirs: Path) -> None:
    before = os.umask(umask)
    try:
        assert main(["scan", "tasks:scanned", "--out", "own", "--report", *QUICK]) == 0
    finally:
        os.umask(before)
    for path in Path("own").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


# ---- archives ----


def write_bomb(path: Path) -> None:
    """Columns as they are in a scan, and one more of 2.5 GB. The file has 2.5 MB."""
    with np.load(path) as found:
        arrays = dict(found)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (312_500_000,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
        with archive.open("length.npy" if "length" not in arrays else "more.npy", "w", force_zip64=True) as file:
            file.write(header.getvalue())
            block = bytes(10_000_000)
            for _ in range(250):
                file.write(block)


def test_archive_that_expands_is_refused(theirs: Path) -> None:
    write_bomb(theirs / "0" / "00001.npz")
    assert (theirs / "0" / "00001.npz").stat().st_size < 3_000_000
    done = run_command("query", "theirs", "top", "--by", "norm", cwd=theirs.parent)
    assert done.returncode == 2 and "would take 2,500,00" in done.stderr and "00001.npz is damaged" in done.stderr


def test_shape_that_is_larger_than_the_file_is_refused(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = theirs / "0" / "00001.npz"
    before = path.read_bytes()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("norm.npy", header.getvalue())
    message = run_and_read_error(["query", "theirs", "top", "--by", "norm"], capsys)
    assert "declares the shape (1000000000000,)" in message
    path.write_bytes(before)
    (theirs / "0" / "00000.npy").write_bytes(header.getvalue() + bytes(64))
    assert "00000.npy is damaged" in run_and_read_error(["query", "theirs", "neighbours", "1"], capsys)


def test_pickled_arrays_are_refused(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (Path("ran"),)

    columns, path = np.array([Evil()], dtype=object), theirs / "0" / "00001.npz"
    before = path.read_bytes()
    np.savez(path, norm=columns)
    assert "00001.npz is damaged" in run_and_read_error(["query", "theirs", "top", "--by", "norm"], capsys)
    path.write_bytes(before)
    np.save(theirs / "0" / "00000.npy", columns)
    assert "00000.npy is damaged" in run_and_read_error(["query", "theirs", "neighbours", "1"], capsys)
    assert not Path("ran").exists()


# ---- tables ----


def test_texts_in_csv_are_no_formulas(theirs: Path) -> None:
    rows = list(csv.DictReader((theirs / "table.csv").open()))
    assert [row["class"] for row in rows[:5]] == ["'=cmd|' /C calc'!A0", "'+1+1", "-2", "'@sum", "plain"]
    cosines = [row["estimated_alignment"] for row in rows]
    assert all(float(cosine) is not None for cosine in cosines) and any(cosine[0] == "-" for cosine in cosines)
    assert Scan(theirs).table()["class"].to_pylist()[:2] == ["=cmd|' /C calc'!A0", "+1+1"]
