"""Fixes: suspects to a file, a corrected copy of the data, a scan of what changed, and the comparison of both scans."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import persample
from persample.cli import main
from persample.scanning import Scan, ScanError, rescan
from persample.scanning.comparison import compare_scans
from persample.scanning.fixes import Fix, apply_to_folder, apply_to_table, read_fixes, write_suspects
from persample.scanning.rescan import LEFT_OUT
from tests.support.scans import QUICK, build

N = 23


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_folder(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ---- export ----


def test_suspects_in_a_file(tmp_path: Path) -> None:
    model, data, loss_fn, _ = build("images")
    names = ["=cmd()", *(f"photo {i}" for i in range(1, N))]
    found = persample.scan(model, loss_fn, data, ids=names, classes=["a", "b", "c"], **QUICK)
    assert write_suspects(found, tmp_path / "fixes.csv", k=N, accept=True) == N
    rows = read_rows(tmp_path / "fixes.csv")
    assert [int(row["id"]) for row in rows] == found.ranked().ids.tolist()
    assert {"name", "given", "suggested", "loss", "new_label"} <= set(rows[0])
    first = next(row for row in rows if row["id"] == "0")
    assert first["name"] == "'=cmd()"
    assert all(row["new_label"] == row["suggested"] for row in rows)
    fixes = read_fixes(tmp_path / "fixes.csv")
    assert {fix.id for fix in fixes} == set(np.flatnonzero(found.column("suggested") >= 0))
    assert write_suspects(found, tmp_path / "empty.csv") == found.count_suspects()
    assert read_fixes(tmp_path / "empty.csv") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has no columns id and new_label"),
        ("id,new_label\nx,a\n", "Line 2 of .* has the id 'x'"),
        ("id,new_label\n3,a\n3,b\n", "several rows with the same id"),
    ],
)
def test_broken_fixes(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "fixes.csv").write_text(text)
    with pytest.raises(ScanError, match=message):
        read_fixes(tmp_path / "fixes.csv")


def test_names_are_read_without_the_apostrophe(tmp_path: Path) -> None:
    (tmp_path / "fixes.csv").write_text("id,name,given,new_label\n1,'=a,x,y\n2,'tis,x, remove \n3,b,x,x\n4,c,x,\n")
    assert read_fixes(tmp_path / "fixes.csv") == [Fix(1, "=a", "x", "y"), Fix(2, "'tis", "x", "remove")]


# ---- apply ----


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cats/1.png", "cats/2.png", "dogs/1.png", "dogs/deep/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "photos/readme.txt").write_text("about")
    return tmp_path / "photos"


def test_folder_is_copied_with_fixes(photos: Path, tmp_path: Path) -> None:
    before = read_folder(photos)
    fixes = [
        Fix(0, "cats/1.png", "cats", "dogs"),
        Fix(1, "cats/2.png", "cats", "REMOVE"),
        Fix(3, "dogs/deep/3.png", "dogs", "cats"),
    ]
    apply_to_folder(fixes, photos, tmp_path / "new/fixed")
    assert read_folder(photos) == before  # the data itself stays as it is
    assert read_folder(tmp_path / "new/fixed") == {
        "dogs/1.png": b"dogs/1.png",
        "dogs/cats-1.png": b"cats/1.png",  # the name was taken
        "cats/deep/3.png": b"dogs/deep/3.png",
        "readme.txt": b"about",
    }
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["fixed"]


def test_swapped_images_get_new_names(photos: Path, tmp_path: Path) -> None:
    """A name that the original folder has never names another image in the copy."""
    fixes = [Fix(0, "cats/1.png", "cats", "dogs"), Fix(2, "dogs/1.png", "dogs", "cats")]
    apply_to_folder(fixes, photos, tmp_path / "fixed")
    copy = read_folder(tmp_path / "fixed")
    assert copy["dogs/cats-1.png"] == b"cats/1.png" and copy["cats/dogs-1.png"] == b"dogs/1.png"
    assert not {"cats/1.png", "dogs/1.png"} & set(copy)


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        (Fix(0, "cats/9.png", "cats", "dogs"), "has no file 'cats/9.png'"),
        (Fix(0, "../secret", "cats", "dogs"), "has no file '../secret'"),
        (Fix(0, "", "cats", "dogs"), "has no file ''"),
        (Fix(0, "cats/1.png", "dogs", "cats"), "has the class 'cats' in .*, but 'dogs' in the fixes"),
        (Fix(0, "cats/1.png", "cats", "dgos"), "new label 'dgos', which is none of the folders .* cats, dogs"),
    ],
)
def test_wrong_fixes_of_a_folder(photos: Path, tmp_path: Path, fix: Fix, message: str) -> None:
    with pytest.raises(ScanError, match=message):
        apply_to_folder([fix], photos, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


@pytest.mark.parametrize("out", ["photos", "photos/fixed", ".", "taken"])
def test_nothing_is_overwritten(photos: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "taken").mkdir()
    before = read_folder(tmp_path)
    with pytest.raises(ScanError, match=r"exists already|overlaps"):
        apply_to_folder([], photos, tmp_path / out)
    assert read_folder(tmp_path) == before


ROWS = [("007", 'a "quoted", text', "good"), ("008", "two\nlines", "bad"), ("009", "=1+1", "good")]


def write_rows(path: Path, rows: Any) -> None:
    records = [dict(zip(("key", "text", "label"), row, strict=True)) for row in rows]
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["key", "text", "label"])
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        parquet.write_table(pa.Table.from_pylist(records), path)


def read_records(path: Path) -> list[tuple[Any, ...]]:
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return [tuple(row) for row in csv.reader(file)][1:]
    if path.suffix == ".jsonl":
        return [tuple(json.loads(line).values()) for line in path.read_text().splitlines()]
    return [tuple(row.values()) for row in parquet.read_table(path).to_pylist()]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_table_is_copied_with_fixes(tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / f"texts{suffix}", tmp_path / f"fixed{suffix}"
    write_rows(source, ROWS)
    before = source.read_bytes()
    apply_to_table([Fix(0, "", "good", "bad"), Fix(1, "", "bad", "remove")], source, out)
    assert read_records(out) == [(*ROWS[0][:2], "bad"), ROWS[2]] and source.read_bytes() == before
    numbers = tmp_path / f"numbers{suffix}"
    write_rows(numbers, [("a", "text", 0), ("b", "text", 1)])
    apply_to_table([Fix(1, "", "1", "0")], numbers, tmp_path / f"other{suffix}")
    assert [str(row[2]) for row in read_records(tmp_path / f"other{suffix}")] == ["0", "0"]
    if suffix != ".csv":
        assert read_records(tmp_path / f"other{suffix}")[1][2] == 0
    for fix, message in (
        (Fix(7, "", "good", "bad"), "has 3 rows, but the fixes have example 7"),
        (Fix(0, "", "bad", "good"), "has the label 'good', but 'bad' in the fixes"),
        (Fix(0, "", "good", "godo"), "new label 'godo', which is none of the labels"),
    ):
        with pytest.raises(ScanError, match=message):
            apply_to_table([fix], source, tmp_path / f"third{suffix}")
    with pytest.raises(ScanError, match="exists already"):
        apply_to_table([], source, out)
    with pytest.raises(ScanError, match="must end in"):
        apply_to_table([], source, tmp_path / "fixed.txt")


# ---- rescan and comparison ----


@pytest.mark.parametrize("project", [16, None])
@pytest.mark.parametrize("several", [False, True])
def test_rescan_equals_a_scan_of_everything(tmp_path: Path, several: bool, project: int | None) -> None:
    """One example is removed, one occurs twice now, one of two equal ones is gone, and two have new labels."""
    model, (x, y), loss_fn, _ = build("images")
    x[5], y[5] = x[6], y[6]
    states = [{name: scale * value for name, value in model.state_dict().items()} for scale in (1.0, 0.5)]
    options: dict[str, Any] = {"checkpoints": states} if several else {}
    size = {**QUICK, "project": project}
    base = persample.scan(model, loss_fn, (x, y), out=tmp_path / "base", **options, **size)
    kept = [i for i in range(N) if i not in (5, 11)]  # which moves the others
    kept.append(4)
    labels = y[kept].clone()
    labels[[2, 15]] = (labels[[2, 15]] + 1) % 3
    data = (x[kept], labels)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = rescan(base, model, loss_fn, data, before=(x, y), out=tmp_path / "new", progress=False, **options)
    few, calls[:] = len(calls), []
    quantities = [name for name in base.settings["quantities"] if name not in LEFT_OUT]
    whole = persample.scan(model, loss_fn, data, quantities=quantities, **options, **size)
    assert few < len(calls) and found.summary["measured_again"] == 2
    assert list(found.summary["left_out"]) == ([] if project else ["alignment"])
    for name in ("mean_gradient_norm", "noise_scale", "suggested_batch_size"):
        assert found.summary[name] == pytest.approx(whole.summary[name], rel=1e-9)
    assert found.columns == whole.columns
    for name in whole.columns:
        np.testing.assert_allclose(found.column(name), whole.column(name), rtol=1e-6, err_msg=name)
    if project:
        assert found.neighbours(3).ids.tolist() == whole.neighbours(3).ids.tolist()
    assert Scan(tmp_path / "new").estimate_wrong_labels() == whole.estimate_wrong_labels()


@pytest.mark.parametrize("project", [16, None])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rescan_of_examples_that_are_not_finite(tmp_path: Path, project: int | None) -> None:
    """One is measured again to be compared, one is corrected, and one is new."""
    model, (x, y), loss_fn, _ = build("images")
    x[[3, 5]] = torch.nan
    options: dict[str, Any] = {**QUICK, "project": project, "nonfinite": "keep"}
    base = persample.scan(model, loss_fn, (x, y), out=tmp_path / "base", **options)
    corrected = x.clone()
    corrected[5], corrected[7] = 0.5, torch.nan
    found = rescan(base, model, loss_fn, (corrected, y), before=(x, y), out=tmp_path / "new", progress=False)
    whole = persample.scan(model, loss_fn, (corrected, y), **options)
    assert found.summary["not_finite"] == whole.summary["not_finite"] == [3, 7]
    assert found.summary["noise_scale"] == pytest.approx(whole.summary["noise_scale"], rel=1e-6)


def test_rescan_of_a_scan_without_the_mean_of_its_last_checkpoint(tmp_path: Path) -> None:
    """Earlier versions wrote means beside projections. Such a scan, continued, has them for some checkpoints only."""
    model, data, loss_fn, _ = build("images")
    states = [{name: scale * value for name, value in model.state_dict().items()} for scale in (1.0, 0.5)]
    base = persample.scan(model, loss_fn, data, out=tmp_path / "base", checkpoints=states, **QUICK)
    base.store.write_arrays("mean-0.npz", {name: p.detach().numpy() for name, p in model.named_parameters()})
    out = tmp_path / "new"
    found = rescan(base, model, loss_fn, data, before=data, out=out, checkpoints=states, progress=False)
    assert found.summary["noise_scale"] == base.summary["noise_scale"]


def test_rescan_refuses_other_models_and_data(tmp_path: Path) -> None:
    model, (x, y), loss_fn, _ = build("images")
    base = persample.scan(model, loss_fn, (x, y), out=tmp_path / "base", **QUICK)
    for before, message in (((x, 1 - y), "is not the data of the scan"),):
        with pytest.raises(ScanError, match=message):
            rescan(base, model, loss_fn, (x, y), before=before, out=tmp_path / "new")
    with pytest.raises(ScanError, match="exists"):
        rescan(base, model, loss_fn, (x, y), before=(x, y), out=tmp_path / "base")
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    with pytest.raises(ScanError, match="differs from that of the earlier scan: 'checkpoints'"):
        rescan(base, model, loss_fn, (x, y), before=(x, y), out=tmp_path / "new", progress=False)


def test_scans_are_compared(tmp_path: Path) -> None:
    model, (x, y), loss_fn, _ = build("images")
    old = persample.scan(model, loss_fn, (x, y), **QUICK)
    labels = y.clone()
    labels[4] = (labels[4] + 1) % 3
    new = persample.scan(model, loss_fn, (x, labels), **QUICK)
    found = compare_scans(old, new)
    assert found.relabelled == [(4, 4)] and len(found.pairs) == N and found.only_before == found.only_after == []
    before, after = ({*scan.suspects().ids.tolist()} for scan in (old, new))
    assert {i for i, _ in found.resolved} == before - after and {j for _, j in found.new} == after - before
    shorter = persample.scan(model, loss_fn, (x[:9], y[:9]), **QUICK)
    with pytest.raises(ScanError, match="23 and 9 examples"):
        compare_scans(old, shorter)


def test_moved_files_are_matched_by_their_names(tmp_path: Path) -> None:
    model, (x, y), loss_fn, _ = build("images")
    names = ["cats/1.png", "cats/2.png", "cats/3.png", "dogs/1.png", "dogs/2.png"]
    moved = ["dogs/cats-1.png", "cats/2.png", "dogs/3.png", "cats/dogs-1.png", "dogs/2.png"]
    old = persample.scan(model, loss_fn, (x[:5], y[:5]), ids=names, **QUICK)
    new = persample.scan(model, loss_fn, (x[:5], y[:5]), ids=moved, **QUICK)
    assert compare_scans(old, new).pairs == [(i, i) for i in range(5)]


TASKS = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
"""


def test_from_suspects_to_fixes_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fix_tasks.py").write_text(TASKS)
    generator = np.random.default_rng(0)
    for i in range(12):
        path = Path("photos", "cats" if i < 6 else "dogs", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
    options = ["--image-size", "8", "--channels", "1", "--batch-size", "2", "--quiet", "--project", "8"]
    assert main(["scan", "fix_tasks:net", "--images", "photos", "--out", "first", *options]) == 0
    assert main(["export", "first", "--suspects", "fixes.csv", "-k", "3"]) == 0
    rows = read_rows(Path("fixes.csv"))
    moved = rows[0]["name"]
    target = "dogs" if rows[0]["given"] == "cats" else "cats"
    text = Path("fixes.csv").read_text().splitlines()
    text[1] += target  # the last column of the first suspect
    Path("fixes.csv").write_text("\n".join(text) + "\n")
    capsys.readouterr()
    assert main(["apply", "fixes.csv", "--images", "photos", "--out", "fixed"]) == 0
    assert capsys.readouterr().out == "1 new label, 0 removed: fixed\n"
    assert Path("photos", moved).exists() and Path("fixed", target, Path(moved).name).exists()
    assert main(["scan", "fix_tasks:net", "--images", "fixed", "--base", "first", "--out", "second", *options]) == 0
    assert "12 examples, 1 of them measured again" in capsys.readouterr().out
    assert main(["compare", "first", "second"]) == 0
    printed = capsys.readouterr().out
    assert "12 examples in both, 0 only before, 0 only after" in printed and "relabelled: 1" in printed
    assert f"{target}/{Path(moved).name}  {Path(moved).parts[0]} -> {target}" in printed
    assert main(["compare", "first", "second", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples in both"] == 12
    assert main(["apply", "fixes.csv", "--images", "photos", "--text", "x.csv", "--out", "o"]) == 2
    assert main(["apply", "fixes.csv", "--images", "photos", "--out", "photos"]) == 2
    assert len(Scan("second")) == 12
