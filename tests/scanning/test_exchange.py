"""Suspects to annotation tools and corrections back, by the schemas of the tools."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persample
from persample.cli import main
from persample.scanning import Scan, ScanError
from persample.scanning.exchange import EXCHANGE_FORMATS, export_suspects, import_fixes
from persample.scanning.fixes import Fix

COUNT, CLASSES = 24, ["cats", "dogs"]


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Scan:
    """A scan in which the model contradicts the labels of examples 3 and 8."""
    y = torch.arange(COUNT) % 2
    x = nn.functional.one_hot(y, 2) * 8.0
    y[[3, 8]] = 1 - y[[3, 8]]
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    names = [f"{CLASSES[int(label)]}/{i}.png" for i, label in enumerate(y)]
    out = tmp_path_factory.mktemp("exchange") / "scan"
    options: dict[str, Any] = {"out": out, "ids": names, "classes": CLASSES, "project": 8, "progress": False}
    return persample.scan(model, nn.CrossEntropyLoss(), (x, y), **options)


def change_json(path: Path, change: Callable[[list[Any]], None], key: str | None = None) -> None:
    found = json.loads(path.read_text())
    change(found[key] if key else found)
    path.write_text(json.dumps(found))


def annotate_label_studio(path: Path) -> None:
    def annotate(tasks: list[Any]) -> None:
        first = tasks[0]["predictions"][0]
        assert set(tasks[0]) == {"data", "predictions"} and first["score"] > 0.9
        assert first["result"][0]["type"] == "choices" and tasks[0]["data"]["image"].startswith("s3://photos/")
        tasks[0]["annotations"] = [
            {"was_cancelled": True, "result": [{"value": {"choices": ["birds"]}}]},
            {"was_cancelled": False, "result": first["result"]},
        ]
        tasks[1]["annotations"] = []

    change_json(path, annotate)


def annotate_argilla(path: Path) -> None:
    def annotate(records: list[Any]) -> None:
        suggestion = records[0]["suggestions"]["label"]
        assert set(suggestion) == {"value", "score", "agent"} and set(records[0]["fields"]) == {"image"}
        records[0]["responses"] = {"label": [{"value": suggestion["value"], "user_id": "u"}]}
        records[1] |= {"responses": {"label": [{"value": "dogs"}]}, "status": "discarded"}

    change_json(path, annotate)


def annotate_fiftyone(path: Path) -> None:
    def annotate(samples: list[Any]) -> None:
        assert samples[0]["suggestion"]["_cls"] == "Classification"
        samples[0]["ground_truth"]["label"] = samples[0]["suggestion"]["label"]
        samples[1]["tags"].append("remove")

    change_json(path, annotate, "samples")


def annotate_cvat(path: Path) -> None:
    tree = ET.parse(path)
    first, second = tree.getroot().findall("image")
    assert tree.getroot().findtext("version") == "1.1" and first.find("tag/attribute").text  # type: ignore[union-attr]
    second.remove(second.find("tag"))  # type: ignore[arg-type]
    tree.write(path)


def annotate_dataset(path: Path) -> None:
    from datasets import load_from_disk

    rows = load_from_disk(str(path)).to_list()
    rows[0]["new_label"] = rows[0]["suggested"]
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(f"{path}-annotated")
    path.rename(f"{path}-before")
    Path(f"{path}-annotated").rename(path)


ANNOTATE = {
    "label-studio": annotate_label_studio,
    "argilla": annotate_argilla,
    "fiftyone": annotate_fiftyone,
    "cvat": annotate_cvat,
    "dataset": annotate_dataset,
}


@pytest.mark.parametrize("name", EXCHANGE_FORMATS)
def test_round_trip(scan: Scan, tmp_path: Path, name: str) -> None:
    prefix = "s3://photos/" if name == "label-studio" else ""
    assert export_suspects(scan, tmp_path / "out", name, prefix=prefix) == 2
    ANNOTATE[name](tmp_path / "out")
    first, second = scan.suspects().ids.tolist()
    example = scan.describe([first])[0]
    expected = [Fix(first, example["name"], example["label"], example["suggested"])]
    if name == "fiftyone":
        other = scan.describe([second])[0]
        expected.append(Fix(second, other["name"], other["label"], "remove"))
    assert import_fixes(tmp_path / "out", name) == expected


@pytest.mark.parametrize("name", EXCHANGE_FORMATS)
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ScanError, match="There is no file"):
        import_fixes(tmp_path / "none", name)
    if name != "dataset":
        (tmp_path / "other").write_text('[{"a": 1}]')
        with pytest.raises(ScanError, match="is no export of"):
            import_fixes(tmp_path / "other", name)


def test_entities_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.xml").write_text('<!DOCTYPE a [<!ENTITY b "c">]><annotations>&b;</annotations>')
    with pytest.raises(ScanError, match="declares entities"):
        import_fixes(tmp_path / "bomb.xml", "cvat")


def test_commands(scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for example in scan.describe(range(COUNT)):
        path = tmp_path / "photos" / example["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example["name"])
    assert main(["export", str(scan.directory), "--to", "cvat", "--suspects", "tasks.xml"]) == 0
    assert main(["apply", "tasks.xml", "--from", "cvat", "--images", "photos", "--out", "fixed"]) == 0
    moved = {path.relative_to("fixed").as_posix() for path in Path("fixed").rglob("[38].png")}
    assert moved == {"dogs/3.png", "cats/8.png"}
