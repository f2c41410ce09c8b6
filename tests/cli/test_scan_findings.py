"""What users of the command line ran into: labels that shift, examples without names, errors that name nobody."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from persample.cli import main
from persample.scanning import Scan, progress
from tests.support.command_line import run_command

TASKS = """
import torch
from torch import nn
from types import SimpleNamespace

class Net(nn.Module):
    def __init__(self, outputs=2, label2id=None, id2label=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
        if label2id:
            self.config = SimpleNamespace(label2id=label2id, id2label=id2label)
    def forward(self, x):
        return self.net(x)

def plain():
    return Net()

def reversed_labels():
    return Net(label2id={"dogs": 0, "cats": 1}, id2label={0: "dogs", 1: "cats"})

def other_labels():
    return Net(label2id={"birds": 0, "cats": 1})

def contradiction():
    return Net(label2id={"cats": 0, "dogs": 1}, id2label={0: "dogs", 1: "cats"})

def default_labels():
    return Net(label2id={"LABEL_0": 0, "LABEL_1": 1})

class Words(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(300, 8), nn.Linear(8, outputs)
    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids)
        return self.head((hidden * attention_mask[..., None]).sum(1) if self.head.out_features < 300 else hidden)

def words():
    return Words()

def language_model():
    return Words(300)

def tokenizer():
    def tokenize(texts):
        rows = [list(text.encode())[:40] for text in texts]
        longest = max(map(len, rows))
        return {
            "input_ids": [row + [0] * (longest - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
        }
    return tokenize

def make_data(count=30):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 64, generator=generator), torch.randint(2, (count,), generator=generator)

def bad_labels():
    x, y = make_data()
    y[3], y[17], y[29] = 2, -1, 9
    return Net(), (x, y), nn.CrossEntropyLoss()

def nan_inputs():
    x, y = make_data()
    x[4], x[21], x[28] = float("nan"), float("inf"), float("nan")
    return Net(), (x, y), nn.CrossEntropyLoss()

def odd_shapes():
    x, y = make_data()
    data = [(row if i not in (6, 22) else row[:60], label) for i, (row, label) in enumerate(zip(x, y))]
    return Net(), data, nn.CrossEntropyLoss()

def outputs_and_targets():
    return Net(), make_data(), lambda out, y: nn.functional.cross_entropy(out, y)
"""

QUICK = ["--batch-size", "4", "--shard-size", "8", "--project", "none", "--quiet"]
IMAGES = ["--images", "photos", "--image-size", "8", "--channels", "1"]
TEXT = ["--tokenizer", "tasks:tokenizer"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the functions of `TASKS`, and photos of cats and dogs."""
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(TASKS)
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(6):
            pixels = generator.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{name[0]}{i}.png")
    return tmp_path


def scan(target: str, *arguments: str, out: str = "out") -> int:
    return main(["scan", f"tasks:{target}", *arguments, "--out", out, *QUICK])


# ---- files ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image-size", "16", "--channels", "1"], "16 x 16 pixels and 1 channel"),
        (["--image-size", "8", "--channels", "3"], "8 x 8 pixels and 3 channels"),
    ],
)
def test_wrong_image_size_is_named_with_the_layer(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scan("plain", "--images", "photos", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and "--image-size" in error and "layer" in error and "(1, " in error


def test_folders_of_files_to_write_are_created(folder: Path) -> None:
    assert scan("plain", *IMAGES) == 0
    assert main(["export", "out", "--suspects", "new/folder/fixes.csv", "-k", "2"]) == 0
    assert Path("new/folder/fixes.csv").is_file()
    assert main(["report", "out", "--out", "other/folder/report.html"]) == 0


def test_report_is_written_although_tokens_cannot_be_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that is a function, named by the scan, is not called."""
    (folder / "texts.csv").write_text("text,label\ngood,1\nbad,0\n")
    assert scan("words", "--text", "texts.csv", *TEXT) == 0
    assert main(["report", "out", "--module", "tasks:words"]) == 0
    assert "tokens are not marked, because the tokenizer" in capsys.readouterr().err


# ---- labels ----


def test_hidden_and_empty_folders_are_no_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = (folder / "photos/cats/c0.png").read_bytes()
    for name in (".ipynb_checkpoints", "__MACOSX", "badgers"):
        (folder / "photos" / name).mkdir()
    (folder / "photos/.ipynb_checkpoints/c0.png").write_bytes(photo)
    (folder / "photos/__MACOSX/._c0.png").write_bytes(b"no picture")
    (folder / "photos/dogs/._d0.png").write_bytes(b"no picture")
    (folder / "photos/dogs/.thumbs").mkdir()
    (folder / "photos/dogs/.thumbs/d0.png").write_bytes(photo)
    assert scan("plain", *IMAGES) == 0
    found = Scan("out")
    assert found.settings["classes"] == ["cats", "dogs"] and found.column("label").tolist() == [0] * 6 + [1] * 6
    printed = capsys.readouterr().out
    assert "classes, in alphabetical order: 0 cats, 1 dogs" in printed
    assert "hidden or have no images: .ipynb_checkpoints, __MACOSX, badgers" in printed


def test_labels_are_numbered_as_in_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scan("reversed_labels", *IMAGES) == 0
    found = Scan("out")
    assert found.column("label").tolist() == [1] * 6 + [0] * 6
    assert found.table()["class"].to_pylist() == ["cats"] * 6 + ["dogs"] * 6
    assert "classes, in the order of the model: 0 dogs, 1 cats" in capsys.readouterr().out
    assert main(["report", "out"]) == 0  # reads the files again, with the same numbers
    assert scan("default_labels", *IMAGES, out="default") == 0
    assert Scan("default").settings["classes"] == ["cats", "dogs"]


def test_classes_can_be_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scan("plain", *IMAGES, "--classes", "dogs,cats") == 0
    assert Scan("out").column("label").tolist() == [1] * 6 + [0] * 6


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("other_labels", [], "has the classes dogs, which the model does not know. Its classes are 0 birds, 1 cats"),
        ("contradiction", [], "contradicts itself: id2label says that class 0 is 'dogs', label2id says 'cats'"),
        ("reversed_labels", ["--classes", "cats,dogs"], "Class 0 is 'cats' in the data, but 'dogs' in the model's"),
    ],
)
def test_contradicting_labels_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str, arguments: list[str], message: str
) -> None:
    assert scan(target, *IMAGES, *arguments) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["good", "", "bad", " ", "good"], "is empty in 2 rows: 1, 3"),
        (["0", "1", "", "0", "1"], "is empty in row 2"),
        (["0.5", "1", "0", "1", "0"], "numbers that are no classes, such as 0.5 in row 0"),
        (["0", "-1", "1", "-7", "0"], "rows 1, 3 have others, such as -1"),
    ],
)
def test_blank_and_odd_labels_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], labels: list[str], message: str
) -> None:
    rows = "\n".join(f"text {i},{label}" for i, label in enumerate(labels))
    (folder / "films.csv").write_text(f"text,label\n{rows}\n")
    assert scan("words", "--text", "films.csv", *TEXT) == 2
    assert message in capsys.readouterr().err


# ---- names ----


def test_files_are_named_in_table_queries_and_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scan("plain", *IMAGES, "--report") == 0
    names = [f"{name}/{name[0]}{i}.png" for name in ("cats", "dogs") for i in range(6)]
    assert parquet.read_table("out/table.parquet")["name"].to_pylist() == names
    printed = capsys.readouterr().out
    assert "first by loss:" in printed and any(name in printed for name in names)
    assert main(["query", "out", "top", "-k", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in answer] == [names[entry["example"]] for entry in answer]
    assert {"predicted", "probability", "suggested"} <= set(answer[0]) and answer[0]["label"] in ("cats", "dogs")
    assert answer[0]["name"] in Path("out/report.html").read_text()


def test_rows_of_a_table_are_named(folder: Path) -> None:
    (folder / "films.csv").write_text("key,text,label\n" + "".join(f"=k{i},text {i},{i % 2}\n" for i in range(5)))
    arguments = ["--text", "films.csv", *TEXT, "--id-column", "key", "--table-format", "csv"]
    assert scan("words", *arguments) == 0
    assert Scan("out").table()["name"].to_pylist() == [f"=k{i}" for i in range(5)]
    assert "'=k0" in Path("out/table.csv").read_text()  # no spreadsheet takes it for a formula
    (folder / "films.csv").write_text("id,text,label\n" + "".join(f"k{i},text {i},{i % 2}\n" for i in range(5)))
    assert scan("words", "--text", "films.csv", *TEXT, out="other") == 0
    assert Scan("other").column("name").tolist() == [f"k{i}" for i in range(5)]


# ---- errors ----


@pytest.mark.parametrize(
    ("target", "messages"),
    [
        ("bad_labels", ["3 examples cannot be scanned; the label is not from 0 to 1: 3 (2), 17 (-1), 29 (9)"]),
        ("nan_inputs", ["The loss of examples 4, 21, 28 is not a finite number", "--nonfinite keep"]),
        ("odd_shapes", ["2 examples cannot be scanned", "the usual (64,)", "6 ((60,)), 22 ((60,))"]),
    ],
)
def test_all_bad_examples_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str, messages: list[str]
) -> None:
    assert scan(target) == 1
    printed = capsys.readouterr().err
    assert all(message in printed for message in messages) and printed.count("\n") == 1, printed


def test_functions_of_outputs_and_targets_get_a_hint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scan("outputs_and_targets") == 2
    printed = capsys.readouterr().err
    assert "called as loss_fn(model, batch), but the arguments of <lambda> are out, y" in printed
    assert "lambda model, batch: f(model(batch[0]), batch[1])" in printed


def test_report_from_another_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scan("plain", *IMAGES) == 0
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")
    assert main(["report", "../out"]) == 0
    assert "data:image" in (folder / "out/report.html").read_text()
    os.chdir(folder)
    done = run_command("report", "../out", "--module", "nowhere:to_scan", cwd=folder / "elsewhere")
    assert done.returncode == 2 and f"the scan was run in {folder}" in done.stderr
    (folder / "photos").rename(folder / "moved")
    capsys.readouterr()
    assert main(["report", "out"]) == 0
    assert "photos is not there any more" in capsys.readouterr().err


# ---- Hugging Face ----


def test_saved_dataset_with_prompts_and_completions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")
    prompts, completions = ["2 + 2 =", "the capital of", "so"], [" 4", " France is Paris", " it goes"]
    saved = datasets.Dataset.from_dict({"prompt": prompts, "completion": completions, "id": ["a", "b", "c"]})
    saved.save_to_disk("saved")
    saved.to_json("saved.jsonl")
    namespace: dict[str, Any] = {}
    exec(TASKS, namespace)
    model, expected = namespace["language_model"](), []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([list((prompt + completion).encode())])
        losses = torch.nn.functional.cross_entropy(
            model(tokens, torch.ones_like(tokens))[0, :-1], tokens[0, 1:], reduction="none"
        )
        expected.append(losses[-len(completion) :].mean().item())
    for path in ("saved", "saved.jsonl"):
        assert scan("language_model", "--text", path, *TEXT, out=f"out-{path}") == 0
        found = Scan(f"out-{path}")
        assert found.column("loss") == pytest.approx(expected, rel=1e-5)
        assert found.column("name").tolist() == ["a", "b", "c"]
    datasets.DatasetDict({"train": saved}).save_to_disk("splits")
    capsys.readouterr()
    assert scan("language_model", "--text", "splits", *TEXT, out="other") == 2
    assert "several splits. Choose one of splits/train" in capsys.readouterr().err


def test_classes_of_a_saved_dataset(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = {"text": [f"text {i}" for i in range(6)], "label": [0, 1, 1, 0, 1, 0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("saved")
    assert scan("words", "--text", "saved", *TEXT) == 0
    assert Scan("out").table()["class"].to_pylist() == ["neg", "pos", "pos", "neg", "pos", "neg"]


# ---- progress ----


def test_lines_without_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    arguments = ["scan", "tasks:plain", *IMAGES, "--out", "out", "--batch-size", "4", "--shard-size", "4"]
    assert main([*arguments, "--project", "none", "--quantities", "loss,norm"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        f"persample: examples: {done} of 12 ({share} %)".replace(" %", "%")
        for done, share in ((4, 33), (8, 67), (12, 100))
    ]


def test_continued_scan_says_from_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["scan", "tasks:plain", *IMAGES, "--out", "out", "--batch-size", "4", "--shard-size", "4"]
    assert main(arguments) == 0
    for name in ("summary.json", "table.parquet", "0/00002.npz"):
        Path("out", name).unlink()
    capsys.readouterr()
    assert main(arguments) == 0
    assert "the scan in out continues: 8 of 12 examples are done" in capsys.readouterr().err
