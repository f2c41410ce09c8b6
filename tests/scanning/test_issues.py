"""Issues of data: each is planted, and found in the conventions of cleanlab's Datalab."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import nn

import persample
from persample.cli import main
from persample.scanning import ImageFolder, Scan

COUNT = 120
CLASSES = ("blue", "red")
PLANTED = {
    "dark": [3],
    "light": [5],
    "blurry": [7],
    "low_information": [9],
    "odd_size": [11],
    "odd_aspect_ratio": [13],
    "grayscale": [15],
}
COPIES = [(20, 21), (30, 31)]  # saved again as JPEG, and at another size


def draw(i: int, generator: np.random.Generator) -> Image.Image:
    """A colourful picture with edges."""
    small = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    small[..., 0 if i % 2 else 2] //= 2
    return Image.fromarray(small).resize((48, 48), Image.Resampling.NEAREST)


def spoil(name: str, image: Image.Image) -> Image.Image:
    pixels = np.asarray(image, dtype=float)
    return {
        "dark": lambda: Image.fromarray((pixels * 0.2).astype(np.uint8)),
        "light": lambda: Image.fromarray((246 + pixels * 0.03).astype(np.uint8)),
        "blurry": lambda: image.filter(ImageFilter.GaussianBlur(8)),
        "low_information": lambda: Image.new("RGB", image.size, (120, 90, 150)),
        "odd_size": lambda: image.resize((400, 400), Image.Resampling.NEAREST),
        "odd_aspect_ratio": lambda: image.resize((150, 30), Image.Resampling.NEAREST),
        "grayscale": lambda: image.convert("L").convert("RGB"),
    }[name]()


def write_photos(root: Path) -> None:
    generator = np.random.default_rng(0)
    images = [draw(i, generator) for i in range(COUNT)]
    for name, places in PLANTED.items():
        for i in places:
            images[i] = spoil(name, images[i])
    for one, other in COPIES:
        file = io.BytesIO()
        images[one].resize((40, 40) if one == 30 else (48, 48)).save(file, "JPEG", quality=60)
        images[other] = Image.open(file)
    for i, image in enumerate(images):
        path = root / CLASSES[i * 2 // COUNT] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_photos(root)
    return root


@pytest.fixture(scope="module")
def found(photos: Path):
    torch.manual_seed(0)
    data = ImageFolder(photos, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    return persample.scan(model, nn.CrossEntropyLoss(), data, project=32, progress=False).find_issues(data)


@pytest.mark.parametrize("name", PLANTED)
def test_spoiled_images_are_found(found, name: str) -> None:
    assert set(PLANTED[name]) <= set(found[name].worst) and found[name].count <= 3


def test_copies_that_were_saved_again_are_found(found) -> None:
    assert [sorted(group) for group in found["near_duplicate"].info["groups"]] == [list(pair) for pair in COPIES]


def test_table_and_summary_have_the_names_of_datalab(found) -> None:
    table, summary = found.table(), {row["issue_type"]: row for row in found.summary()}
    for name, issue in found.items():
        flags, scores = table[f"is_{name}_issue"].to_numpy(), table[f"{name}_score"].to_numpy()
        assert len(flags) == COUNT and ((scores >= 0) & (scores <= 1)).all()
        if "count" not in issue.info:
            assert summary[name]["num_issues"] == flags.sum()
            assert not flags.any() or scores[flags].max() <= scores[~flags].min() + 1e-9
    assert {"label", "outlier", "near_duplicate", "class_imbalance", "non_iid", "data_value"} <= set(summary)


# ---- the data as a whole ----


def scan_pairs(x: torch.Tensor, y: torch.Tensor, model: nn.Module | None = None, **options):
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2))
    return persample.scan(model, nn.CrossEntropyLoss(), (x, y), project=32, progress=False, **options)


def make_points(count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 5 * torch.nn.functional.one_hot(y, 4), y


def make_classifier() -> nn.Module:
    """A model that knows the classes of `make_points`."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2, 4) * 2)
        model.bias.zero_()
    return model


def test_clean_data_have_few_issues() -> None:
    found = scan_pairs(*make_points(), make_classifier()).find_issues()
    for name in ("class_imbalance", "non_iid", "underperforming_group", "near_duplicate"):
        assert found[name].count == 0, name


def test_wrong_labels_outliers_and_harmful_examples() -> None:
    x, y = make_points()
    y[[7, 50]] = 1 - y[[7, 50]]
    x[100] = torch.tensor([0.0, 0.0, 60.0, -60.0])
    found = scan_pairs(x, y, make_classifier()).find_issues()
    assert {7, 50} <= set(found["label"].worst) and found["label"].scores[[7, 50]].max() < 0.1
    assert 7 in found["data_value"].worst[:2]
    assert 100 in found["outlier"].worst[:3]


def test_flags_of_outliers() -> None:
    """Most rows of another distribution are flagged, and few others."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 8, generator=generator) * 0.3, torch.arange(300) % 2
    x += nn.functional.one_hot(y, 8) * 2
    planted = torch.arange(0, 300, 20)
    x[planted] = torch.randn(len(planted), 8, generator=generator) * 2
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    flags = torch.from_numpy(scan_pairs(x, y, net).find_issues()["outlier"].flags)
    assert flags[planted].float().mean() > 0.6 and int(flags.sum()) < 2 * len(planted)


@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_rows_that_are_nearly_equal(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    if kind == "features":
        x = torch.randn(300, 6, generator=generator) * torch.tensor([1e-3, 1, 1, 1, 1, 2])
        x = torch.cat([x, x[[4, 9]] * 1.001])
    else:
        x = torch.randint(50, (302, 24), generator=generator)
        x[[300, 301]] = x[[4, 9]]
        x[300, 3] = 51  # another word
    y = torch.randint(2, (302,), generator=generator)
    found = scan_pairs(x, y, nn.Linear(x.shape[1], 2) if kind == "features" else Words()).find_issues((x, y))
    assert found["near_duplicate"].info["groups"] == [[4, 300], [9, 301]]
    clean = scan_pairs(x[:300], y[:300], nn.Linear(x.shape[1], 2) if kind == "features" else Words())
    assert clean.find_issues((x[:300], y[:300]))["near_duplicate"].count == 0


class Words(nn.Module):
    """The mean of embeddings, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(60, 8), nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).mean(1))


def test_rare_class() -> None:
    x, y = make_points()
    y[:] = 0
    y[:5] = 1
    found = scan_pairs(x, y).find_issues()["class_imbalance"]
    assert found.worst == list(range(5)) and found.scores[0] == pytest.approx(5 / 400)


def test_data_in_an_order() -> None:
    x, y = make_points()
    order = y.argsort(stable=True)
    assert scan_pairs(x[order], y[order]).find_issues()["non_iid"].score < 0.01


def test_group_in_which_the_model_is_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (400,), generator=generator)
    x = torch.rand(400, 1, 8, 8, generator=generator) * 0.3 + 0.3
    x[:, :, :, :4] += 0.3 * y[:, None, None, None]
    x[:80] = x[:80] / 4  # dark
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        side = torch.ones(8, 8)
        side[:, 4:] = -1
        model[1].weight.copy_(torch.stack([-side, side]).reshape(2, 64))
        model[1].bias.copy_(torch.tensor([4.8, -4.8]))
    found = scan_pairs(x, y, model).find_issues((x, y))["underperforming_group"]
    assert "brightness" in found.info["text"] and found.flags[:80].mean() > 0.9


@pytest.mark.parametrize("is_spurious", [True, False])
def test_property_that_gives_the_label_away(is_spurious: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (300,), generator=generator)
    x = torch.rand(300, 3, 8, 8, generator=generator) * 0.5
    x += 0.4 * (y if is_spurious else y[torch.randperm(300, generator=generator)])[:, None, None, None]
    found = scan_pairs(x, y).find_issues((x, y))["spurious_correlation"]
    assert ("brightness predicts the label" in found.info["text"]) == is_spurious
    assert found.info["properties"]["brightness"] == pytest.approx(0 if is_spurious else 1, abs=0.25)


# ---- texts ----


def test_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [f"The film number {i} was quite {'good' if i % 2 else 'bad'}, all in all." for i in range(60)]
    texts[4], texts[8] = "   ", "Фильм был очень хорошим, рекомендую всем."
    texts[12], texts[17] = "The film was so very", texts[16].upper().replace(",", "")
    rows = [{"text": text, "label": "good" if i % 2 else "bad"} for i, text in enumerate(texts)]
    Path("reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = nn.EmbeddingBag(256, 2)\n"
        "    def forward(self, input_ids):\n        return self.net(input_ids)\n"
        "def net():\n    torch.manual_seed(0)\n    return Net()\n"
        "def tokenizer():\n    return lambda texts: {'input_ids': torch.tensor("
        "[list((t.encode() + b' ' * 60)[:60]) for t in texts])}\n"
    )
    files = ["--text", "reviews.jsonl", "--tokenizer", "models.py:tokenizer", "--project", "16", "--quiet"]
    assert main(["scan", "models.py:net", *files, "--out", "scan"]) == 0
    capsys.readouterr()
    for name, worst in {"empty": 4, "other_script": 8, "truncated": 12}.items():
        assert main(["query", "scan", "issues", name, "--json"]) == 0
        assert [row["example"] for row in json.loads(capsys.readouterr().out)] == [worst]
    assert main(["query", "scan", "issues", "near_duplicate", "-k", "60", "--json"]) == 0
    assert {16, 17} <= {row["example"] for row in json.loads(capsys.readouterr().out)}
    assert main(["query", "scan", "issues"]) == 0
    assert "num_issues" in capsys.readouterr().out
    assert main(["query", "scan", "issues", "beauty"]) == 2
    assert len(Scan("scan")) == 60


def test_broken_examples_are_an_issue() -> None:
    x, y = make_points(60)
    x[5] = torch.nan
    found = scan_pairs(x, y, skip_bad=True).find_issues((x, y))["broken"]
    assert found.worst == [5] and "NaN" in found.info["reasons"][5]
