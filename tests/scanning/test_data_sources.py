"""Names of examples, label numbers, Hugging Face datasets, LoRA models, and errors that name bad examples."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import persample
from persample.scanning import BadExamples, NotFinite, ScanError
from persample.scanning.datasets import TextCollator, text_losses
from persample.scanning.progress import choose_bar, choose_mode, show_progress
from tests.support.scans import QUICK, assert_near

N = 13


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(3, (N,), generator=generator)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class Folder(Dataset[Any]):
    """A dataset like those of torchvision."""

    def __init__(self) -> None:
        self.root, self.classes = "/data", ["a", "b", "c"]
        self.data = make_data()
        self.samples = [(f"/data/{'abc'[y]}/{i}.png", int(y)) for i, y in enumerate(self.data[1])]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.data[0][i], int(self.data[1][i])


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y = make_data()
        return {"x": x[i], "label": y[i], "key": f"key {i}"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Folder())


def dict_losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


# ---- names ----

FILES = [path.removeprefix("/data/") for path, _ in Folder().samples]


@pytest.mark.parametrize(
    ("data", "ids", "expected"),
    [
        (make_data(), [f"é{i}" for i in range(N)], [f"é{i}" for i in range(N)]),
        (make_data(), np.arange(100, 100 + N), [str(100 + i) for i in range(N)]),
        (Folder(), None, FILES),
        (Subset(Folder(), [5, 2, 7]), None, [FILES[i] for i in (5, 2, 7)]),
        (DataLoader(Folder(), batch_size=5, shuffle=True), None, FILES),
        (Stream(), [f"s{i}" for i in range(N)], [f"s{i}" for i in range(N)]),
    ],
)  # fmt: skip
def test_names_of_examples(data: Any, ids: Any, expected: list[str], tmp_path: Path) -> None:
    found = persample.scan(make_net(), nn.CrossEntropyLoss(), data, ids=ids, out=tmp_path, **QUICK)
    assert found.column("name").tolist() == expected == found.table()["name"].to_pylist()
    assert found.describe([1])[0]["name"] == expected[1]


def test_names_by_key() -> None:
    for ids in ("key",):
        found = persample.scan(make_net(), dict_losses, Dicts(), ids=ids, **QUICK)
        assert found.column("name").tolist() == [f"key {i}" for i in range(N)]


@pytest.mark.parametrize(
    ("data", "ids", "message"),
    [
        (make_data(), ["a"], "has 13 examples, but ids has 1 entries"),
        (Dicts(), "hue", "'hue' is not a key of each example"),
        (Stream(), "key", "For a stream, ids must be a sequence"),
        (Stream(), ["a", "b"], "ids has 2 entries, but the data has more"),
    ],
)
def test_wrong_ids(data: Any, ids: Any, message: str) -> None:
    loss_fn = dict_losses if isinstance(data, Dicts) else nn.CrossEntropyLoss()
    with pytest.raises(ScanError, match=message):
        persample.scan(make_net(), loss_fn, data, ids=ids, **QUICK)


def test_scan_is_not_continued_with_other_names(tmp_path: Path) -> None:
    persample.scan(make_net(), nn.CrossEntropyLoss(), make_data(), ids=range(N), out=tmp_path, **QUICK)
    with pytest.raises(ScanError, match="The ids of the examples changed"):
        persample.scan(make_net(), nn.CrossEntropyLoss(), make_data(), ids=range(1, N + 1), out=tmp_path, **QUICK)


def test_classes_that_contradict_the_model_are_refused() -> None:
    net: Any = make_net()
    net.config = SimpleNamespace(label2id={"b": 0, "a": 1, "c": 2})
    with pytest.raises(ScanError, match=r"Class 0 is 'a' in the data, but 'b' in the model's config\.label2id"):
        persample.scan(net, nn.CrossEntropyLoss(), Folder(), **QUICK)
    net.config.label2id = {"a": 0, "b": 1, "c": 2}
    assert persample.scan(net, nn.CrossEntropyLoss(), Folder(), **QUICK).settings["classes"] == ["a", "b", "c"]


# ---- errors ----


def test_all_ids_of_bad_examples_are_in_the_error() -> None:
    x, y = make_data()
    y[[1, 8]] = torch.tensor([3, -5])
    names = [f"photo {i}" for i in range(N)]
    with pytest.raises(BadExamples, match=r"from 0 to 2: 1 \(photo 1, 3\), 8 \(photo 8, -5\)") as caught:
        persample.scan(make_net(), nn.CrossEntropyLoss(), (x, y), ids=names, **QUICK)
    assert caught.value.ids == [1, 8]


def test_ignored_labels_are_not_bad() -> None:
    x, y = make_data()
    y[2], y[9] = -100, 3
    with pytest.raises(BadExamples) as caught:
        persample.scan(make_net(), nn.CrossEntropyLoss(reduction="sum"), (x, y), **QUICK)
    assert caught.value.ids == [9]


def test_all_ids_of_losses_that_are_not_finite() -> None:
    x, y = make_data()
    x[[0, 6, 12]] = torch.nan
    with pytest.raises(NotFinite) as caught:
        persample.scan(make_net(), nn.CrossEntropyLoss(), (x, y), **QUICK)
    assert caught.value.ids == [0, 6, 12]


def test_images_and_masks_of_other_shapes() -> None:
    data = [(torch.randn(1, 6, 6 - (i == 4)), torch.randint(2, (6, 6 - (i == 4)))) for i in range(N)]
    with pytest.raises(BadExamples, match=r"the usual \(1, 6, 6\), \(6, 6\): 4 \(\(1, 6, 5\), \(6, 5\)\)"):
        persample.scan(nn.Conv2d(1, 2, 1), nn.CrossEntropyLoss(), data, **QUICK)
    masks = torch.randint(2, (N, 6, 6))
    masks[7, 2, 3] = 5
    with pytest.raises(BadExamples, match=r"the label is not from 0 to 1: 7 \(5\)"):
        persample.scan(nn.Conv2d(1, 2, 1), nn.CrossEntropyLoss(), (torch.randn(N, 1, 6, 6), masks), **QUICK)


@pytest.mark.parametrize(
    "loss_fn",
    [lambda out, y: F.cross_entropy(out, y), lambda pred, target: (pred - target) ** 2, lambda z, labels: z[labels]],
)
def test_hint_for_functions_of_outputs_and_targets(loss_fn: Any) -> None:
    with pytest.raises(ScanError, match=r"called as loss_fn\(model, batch\), but the arguments of <lambda> are"):
        persample.scan(make_net(), loss_fn, make_data(), **QUICK)


def test_other_errors_stay_as_they_are() -> None:
    def fail(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        persample.scan(make_net(), fail, make_data(), **QUICK)


# ---- Hugging Face ----


def test_hugging_face_dataset_without_torch_format() -> None:
    datasets = pytest.importorskip("datasets")
    x, y = make_data()
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=["a", "b", "c"])}
        | {"key": datasets.Value("string")}
    )
    rows = {"x": x.tolist(), "label": y.tolist(), "key": [f"k{i}" for i in range(N)]}
    data = datasets.Dataset.from_dict(rows, features=features)
    found = persample.scan(make_net(), dict_losses, data, ids="key", **QUICK)
    plain = persample.scan(make_net(), nn.CrossEntropyLoss(), (x, y), **QUICK)
    assert_near(found.column("loss"), torch.from_numpy(plain.column("loss")).double())
    assert found.settings["classes"] == ["a", "b", "c"] and found.column("name").tolist() == rows["key"]
    assert found.column("predicted").tolist() == plain.column("predicted").tolist()
    with pytest.raises(ScanError, match=r"no column 'hue' for ids\. It has x, label, key"):
        persample.scan(make_net(), dict_losses, data, ids="hue", **QUICK)
    with pytest.raises(ScanError, match=r"Hugging Face dataset with the columns x, label, key\. Keep those"):
        persample.scan(make_net(), lambda model, batch: model(**batch).sum(1), data, **QUICK)


class ByteModel(nn.Module):
    def __init__(self, outputs: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.q_proj, self.head = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.head(self.q_proj(self.words(input_ids)).tanh()))


def tokenize(texts: list[str], side: str = "right") -> dict[str, Any]:
    rows = [list(text.encode()) for text in texts]
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    marks = [[1] * len(row) for row in rows]
    if side == "right":
        return {
            "input_ids": [row + pad for row, pad in zip(rows, pads, strict=True)],
            "attention_mask": [mark + pad for mark, pad in zip(marks, pads, strict=True)],
        }
    return {
        "input_ids": [pad + row for row, pad in zip(rows, pads, strict=True)],
        "attention_mask": [pad + mark for mark, pad in zip(marks, pads, strict=True)],
    }


PAIRS = [("2 + 2 =", " 4"), ("the capital of", " France is Paris"), ("so", " it goes"), ("", "alone")]


def compute_expected(model: nn.Module) -> list[float]:
    expected = []
    for prompt, completion in PAIRS:
        tokens = torch.tensor([list((prompt + completion).encode())])
        losses = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        count = len(completion) - (not prompt)  # nothing predicts the first token
        expected.append(losses[-count:].mean().item())
    return expected


@pytest.mark.parametrize("side", ["right", "left"])
def test_only_completions_count(side: str) -> None:
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    model = ByteModel()
    collate = TextCollator(lambda texts: tokenize(texts, side))
    found = persample.scan(model, text_losses, rows, collate=collate, **QUICK)
    assert found.column("loss") == pytest.approx(compute_expected(model), rel=1e-5)
    labels = []
    for prompt, completion in PAIRS:
        text = list((prompt + completion).encode())
        labels.append({"input_ids": text, "labels": [-100] * len(prompt) + text[len(prompt) :]})
    for row, expected in zip(labels, compute_expected(model), strict=True):  # batches as of a trainer
        batch = {name: torch.tensor([part]) for name, part in row.items()}
        assert text_losses(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_text_without_completion_is_named() -> None:
    rows = [{"prompt": "a b", "completion": " c"}, {"prompt": "longer", "completion": ""}]
    with pytest.raises(NotFinite) as caught:
        persample.scan(ByteModel(), text_losses, rows, collate=TextCollator(tokenize), **QUICK)
    assert caught.value.ids == [1]


def test_lora_model_of_peft() -> None:
    peft = pytest.importorskip("peft")
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    torch.manual_seed(0)
    model = peft.get_peft_model(ByteModel(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # starts at zero, which hides the gradient of the other factor
            nn.init.normal_(parameter)
    found = persample.scan(model, text_losses, rows, collate=TextCollator(tokenize), **QUICK)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(found.settings["parameters"]) == set(trainable) and len(trainable) == 2
    for i, row in enumerate(rows):
        batch = TextCollator(tokenize)([row])
        grads = torch.autograd.grad(text_losses(model, batch).sum(), list(trainable.values()))
        expected = torch.cat([grad.flatten() for grad in grads]).norm().item()
        assert found.column("norm")[i] == pytest.approx(expected, rel=1e-4)


# ---- progress ----


def test_modes_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert (choose_mode(True), choose_mode(False), choose_mode(None)) == ("bar", "none", "lines")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert choose_mode(None) == "bar"
    with show_progress("examples", None, 0, "none") as update:
        update(3)
    assert capsys.readouterr().err == ""


def test_notebooks_show_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert choose_mode(None) == "bar"


def test_bar_of_notebooks_without_widgets_is_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tqdm.auto would warn that IProgress is missing."""
    shell = type("ZMQInteractiveShell", (), {})()
    fakes = {"IPython": SimpleNamespace(get_ipython=lambda: shell), "ipykernel.zmqshell": SimpleNamespace()}
    for name, module in {**fakes, "ipywidgets": None}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with show_progress("examples", 5, 0, "bar") as update:
            update(5)
    assert "examples: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ipywidgets", SimpleNamespace(__spec__=True))
    assert choose_bar().__module__ == "tqdm.notebook"
    monkeypatch.delitem(sys.modules, "IPython")
    assert choose_bar().__module__ == "tqdm.std"


def test_the_collator_takes_a_tokenizer_of_hugging_face() -> None:
    """Texts of any lengths are padded, although the tokenizer by itself does not pad, and truncated."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    batch = TextCollator(tokenizer, max_length=6)([{"text": "a a a"}, {"text": "a " * 9}])
    assert batch["tokens"]["attention_mask"].sum(1).tolist() == [3, 6] and batch["tokens"]["input_ids"].shape == (2, 6)
    assert tokenizer.pad_token is None
