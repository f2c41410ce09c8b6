"""From dirty data to corrected data by the command line alone: images, a table, texts, a language model."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from persample.cli import main
from persample.scanning import FeatureTable, ImageFolder, Scan, TextCollator, TextTable
from persample.scanning.decisions import Decision, Decisions
from persample.scanning.fixes import read_fixes

MODELS = """
import torch
from torch import nn
from torch.utils.data import DataLoader

def fit(model, batches, loss, steps=60):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    return model

def photos():
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[0.0, 0.0, 4.0], [4.0, 0.0, 0.0]]))
    return model

def houses(table):
    torch.manual_seed(0)
    model = nn.Linear(len(table.feature_names), len(table.classes))
    return fit(model, DataLoader(table, batch_size=50), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))

def prices(table):
    return nn.Linear(len(table.feature_names), 1)

class Reader(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(128, 8), nn.Linear(8, outputs)
    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids)
        if self.head.out_features == 128:
            return self.head(hidden)
        return self.head((hidden * attention_mask[..., None]).sum(1))

def reviews():
    model = Reader(2)
    with torch.no_grad():
        model.words.weight.zero_()
        model.words.weight[ord("+"), 0] = model.words.weight[ord("-"), 1] = 6
        model.head.weight.copy_(torch.eye(2, 8).flip(0))
    return model

def language_model():
    return Reader(128)

def tokenizer():
    return lambda texts: {"input_ids": [list(text.encode()) for text in texts]}  # of different lengths

def hugging_face_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
"""


@pytest.fixture(autouse=True)
def models() -> None:
    Path("models.py").write_text(MODELS)


def run(*arguments: str, code: int = 0) -> None:
    assert main(list(arguments)) == code, arguments


def scan(target: str, out: str, *arguments: str, code: int = 0) -> Scan:
    run("scan", f"models.py:{target}", "--out", out, "--project", "16", "--quiet", *arguments, code=code)
    return Scan(out)


def write_photos(folder: Path) -> None:
    """Blue and red pictures; two in the wrong folder, one that is no image."""
    generator = np.random.default_rng(0)
    for i in range(40):
        pixels = generator.integers(0, 60, (12, 12, 3), dtype=np.uint8)
        pixels[..., 2 if i % 2 else 0] += 150
        label = ("red", "blue")[i % 2 if i not in (4, 7) else 1 - i % 2]
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / label / f"{i}.png")
    (folder / "red" / "99.png").write_bytes(b"no image")


def test_images(capsys: pytest.CaptureFixture[str]) -> None:
    write_photos(Path("photos"))
    files = ["--images", "photos", "--image-size", "12", "--skip-bad"]
    found = scan("photos", "scan", *files, "--report", code=1)
    assert "99.png" in capsys.readouterr().out and len(found.skipped) == 1
    page = Path("scan/report.html").read_text()
    assert "persample apply fixes.csv --images photos --out photos-fixed" in page
    names = {example["name"]: i for i, example in enumerate(found.describe(range(41)))}
    wrong = {"blue/4.png", "red/7.png"}
    assert {found.describe([i])[0]["name"] for i in found.suspects().ids.tolist()} == wrong
    for name in wrong:
        Decisions("scan").add(names[name], Decision("accept", found.describe([names[name]])[0]["suggested"]))
    Decisions("scan").add(names["red/99.png"], Decision("remove"))
    run("export", "scan", "--reviewed", "--suspects", "fixes.csv")
    run("apply", "fixes.csv", "--images", "photos", "--out", "photos-fixed")
    assert {path.name for path in Path("photos-fixed/red").iterdir()} == {f"{i}.png" for i in range(0, 40, 2)}
    again = scan("photos", "scan-fixed", "--images", "photos-fixed", "--image-size", "12")
    assert again.count_suspects() == 0


def write_houses(rows: int = 200) -> list[int]:
    """A table with numbers, categories, dates and missing values; some labels are wrong."""
    generator = np.random.default_rng(0)
    wrong = [3, 50, 120, 199]
    with open("houses.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "rooms", "garden", "built", "sold"])
        for i in range(rows):
            rooms, garden = int(generator.integers(1, 9)), ("yes", "no")[generator.integers(2)]
            is_sold = (rooms > 4) != (i in wrong)
            day = datetime.date(1990, 1, 1) + datetime.timedelta(int(generator.integers(0, 9000)))
            writer.writerow([f"house {i}", rooms if i % 10 else "", garden if i % 7 else "", day, str(is_sold)])
    return [i for i in wrong if i % 10]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = write_houses()
    found = scan("houses", "scan", "--table", "houses.csv", "--target", "sold")
    printed = "features: rooms, built year, built month, built day_of_week, rooms is missing, garden="
    assert printed in capsys.readouterr().out
    assert set(wrong) <= set(found.ranked(k=12).ids.tolist())
    assert found.describe([3])[0]["name"] == "house 3" and (found.directory / "pipeline.joblib").is_file()
    run("report", "scan")
    run("export", "scan", "--suspects", "fixes.csv", "--accept", "-k", "12")
    run("apply", "fixes.csv", "--table", "houses.csv", "--target", "sold", "--out", "fixed.csv")
    with open("fixed.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(rows[i]["sold"] != str(i in (3, 50, 120, 199) and int(rows[i]["rooms"]) <= 4) for i in wrong)


def test_table_with_numbers_as_targets_and_frames() -> None:
    import pandas as pd

    frame = pd.DataFrame({"size": [1.0, None, 3.0] * 10, "kind": ["a", "b", None] * 10, "price": np.arange(30.0)})
    frame.to_parquet("prices.parquet")
    found = scan("prices", "scan", "--table", "prices.parquet", "--target", "price")
    assert found.settings["loss"] == "MSELoss" and "prediction" in found.columns
    data = FeatureTable(frame, target="price")
    assert torch.equal(data.rows, FeatureTable("prices.parquet", target="price").rows)
    assert data.feature_names == ["size", "size is missing", "kind=", "kind=a", "kind=b"]
    data.save_pipeline("mine.joblib")
    import joblib

    other = FeatureTable(frame[:10], target="price", pipeline=joblib.load("mine.joblib"))
    assert torch.equal(other.rows, data.rows[:10])
    texts = TextTable(pd.DataFrame({"text": ["x", "y"], "label": ["no", "yes"]}))
    assert texts[1] == {"text": "y", "label": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "houses.csv"], "--table needs --target"),
        (["--table", "houses.csv", "--target", "price"], "has no column 'price'. It has id, rooms"),
        (["--table", "houses.csv", "--target", "sold", "--images", "."], "cannot be combined"),
        (["--table", "none.csv", "--target", "sold"], "There is no file none.csv"),
    ],
)
def test_wrong_tables(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_houses(20)
    run("scan", "models.py:houses", "--out", "scan", *arguments, code=2)
    assert message in capsys.readouterr().err


def test_frame_without_a_target_is_refused() -> None:
    import pandas as pd

    import persample

    frame = pd.DataFrame({"a": [1.0, 2.0]})
    with pytest.raises(persample.scanning.ScanError, match=r"FeatureTable\(frame, target="):
        persample.scan(torch.nn.Linear(1, 1), torch.nn.MSELoss(), frame)


def test_texts(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [5, 12]
    rows = [{"text": f"film {i} {'+' if i % 2 else '-'}", "label": ("bad", "good")[i % 2]} for i in range(30)]
    for i in wrong:
        rows[i]["label"] = ("good", "bad")[i % 2]
    Path("reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["--text", "reviews.jsonl", "--tokenizer", "models.py:tokenizer"]
    found = scan("reviews", "scan", *files)
    assert sorted(found.suspects().ids.tolist()) == wrong
    assert "film 5 +" in capsys.readouterr().out  # a text is shown where an image has its name
    run("query", "scan", "top")
    assert "film 5 +" in capsys.readouterr().out
    run("export", "scan", "--suspects", "fixes.csv", "--accept")
    run("apply", "fixes.csv", "--text", "reviews.jsonl", "--out", "fixed.jsonl")
    fixed = [json.loads(line)["label"] for line in Path("fixed.jsonl").read_text().splitlines()]
    assert fixed == [("bad", "good")[i % 2] for i in range(30)]


def test_language_model() -> None:
    rows = [{"text": "abcabcabc" if i else "zqzqzqzq"} for i in range(12)]
    Path("texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = scan("language_model", "scan", "--text", "texts.jsonl", "--tokenizer", "models.py:tokenizer", "--report")
    assert "loss" in found.columns and not found.estimate_wrong_labels()
    Decisions("scan").add(0, Decision("remove"))
    run("export", "scan", "--reviewed", "--suspects", "fixes.csv")
    assert read_fixes("fixes.csv")[0].removes


def test_function_that_returns_a_tokenizer_of_hugging_face() -> None:
    rows = [{"text": "a b " * (i % 3 + 1), "label": i % 2} for i in range(8)]
    Path("texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scan("reviews", "scan", "--text", "texts.jsonl", "--tokenizer", "models.py:hugging_face_tokenizer")
    from models import hugging_face_tokenizer  # type: ignore[import-not-found]

    batch = TextCollator(lambda texts: hugging_face_tokenizer()(texts))([rows[0], rows[1]])
    assert batch["tokens"]["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


# ---- images as the model was trained ----

PROCESSORS = {
    "preprocessor_config.json": {
        "size": {"shortest_edge": 8}, "do_center_crop": True, "crop_size": {"height": 6, "width": 6},
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "resample": 2,
    },
    "config.json": {
        "pretrained_cfg": {
            "input_size": [3, 6, 6], "crop_pct": 0.75, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1],
            "interpolation": "bilinear",
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_transform_of_a_saved_processor(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_photos(Path("photos"))
    Path("photos/red/99.png").unlink()
    Path("processor").mkdir()
    Path("processor", name).write_text(json.dumps(PROCESSORS[name]))
    found = scan("photos", "scan", "--images", "photos", "--processor", "processor")
    assert (
        "images: resize 8 (shorter side); crop 6 x 6; mean 0.5, 0.4, 0.3; std 0.2, 0.2, 0.1" in capsys.readouterr().out
    )
    picture = Image.open("photos/blue/1.png").resize((8, 8), Image.Resampling.BILINEAR).crop((1, 1, 7, 7))
    expected = (np.asarray(picture) / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.2, 0.1]
    from persample.cli.task import load_data_files, read_origin

    data = load_data_files(read_origin(found))
    image = data[data.names.index("blue/1.png")][0]
    np.testing.assert_allclose(image.permute(1, 2, 0), expected, rtol=1e-5)
    run("report", "scan")  # the files are those that were scanned


def test_transform_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_photos(Path("photos"))
    Path("photos/red/99.png").unlink()
    numbers = ["--resize", "10,8", "--crop", "6", "--mean", "0.5", "--std", "0.25"]
    scan("photos", "scan", "--images", "photos", *numbers)
    assert "resize 10 x 8; crop 6 x 6; mean 0.5; std 0.25" in capsys.readouterr().out
    assert ImageFolder("photos", 5)[0][0].shape == (3, 5, 5)
    for wrong in (["--mean", "0.5,0.5"], ["--std", "0"], ["--processor", "photos"]):
        run("scan", "models.py:photos", "--out", "other", "--images", "photos", *wrong, code=2)
