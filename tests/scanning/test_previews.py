"""Previews that fit the task: masks over images, and texts with the worst tokens marked."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import persample
from persample.scanning import ScanError
from persample.scanning.datasets import text_losses
from persample.scanning.marked_tokens import TokenMarker
from persample.scanning.report.masks import find_masked_image
from persample.scanning.report.page import Page
from persample.scanning.report.predicted_masks import MaskReader, find_mask_reader
from persample.scanning.report.previews import Deferred, MarkedText, find_content, make_preview
from persample.scanning.source import Source
from tests.support.scans import QUICK

WORDS = ["[UNK]", "the", "cat", "sat", "on", "a", "mat", "and", "slept"]


def make_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="[UNK]")


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(len(WORDS), 8), nn.Linear(8, len(WORDS))

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return self.head(self.words(input_ids))


def test_mask_is_drawn_over_the_image() -> None:
    image, mask = torch.full((3, 8, 8), 0.5), torch.zeros(8, 8, dtype=torch.long)
    mask[2:4, 5] = 1
    mask[7, 7] = -100  # ignored
    preview = make_preview(find_content((image, mask)))
    assert preview is not None and preview.kind == "image"
    pixels = decode(preview).astype(int)
    changed = (abs(pixels - 128) > 8).any(2)
    assert changed.tolist() == (mask > 0).tolist()
    assert isinstance(find_content((image, torch.tensor(3))), Tensor)  # a class is no mask
    assert isinstance(find_content((image, mask[:4])), Tensor)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"image": torch.zeros(3, 8, 8), "mask": torch.ones(8, 8).long()}, True),
        ({"pixel_values": torch.zeros(3, 8, 8), "labels": torch.ones(1, 8, 8)}, True),
        ((torch.zeros(8, 8), torch.eye(8)), True),
        ((torch.zeros(8, 8), torch.eye(8) / 2), False),  # no classes
        ({"image": torch.zeros(3, 8, 8), "label": torch.tensor(1)}, False),
    ],
)
def test_masks_are_found(example: Any, expected: bool) -> None:
    assert (find_masked_image(example) is not None) == expected


class Pixels(nn.Module):
    """Scores of each pixel from its colour."""

    def __init__(self, classes: int, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.last = nn.Conv2d(3, classes, 1), last

    def forward(self, x: Tensor) -> Any:
        return {"out": self.last(self.scores(x))}


def make_masks(classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(max(2, classes), (12, 8, 8), generator=generator)
    return 4 * torch.randn(12, 3, 8, 8, generator=generator), masks


def segment(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0])["out"], batch[1], ignore_index=-1, reduction="none").mean((1, 2))


def segment_one_class(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])["out"][:, 0] - batch[1]).square().mean((1, 2))


@pytest.mark.parametrize(
    ("classes", "loss_fn", "last"),
    [(3, segment, nn.Identity()), (1, segment_one_class, nn.Identity()), (1, segment_one_class, nn.Sigmoid())],
)
def test_predicted_mask_is_shown_beside_the_given_one(
    classes: int, loss_fn: Any, last: nn.Module, tmp_path: Path
) -> None:
    model, (x, masks) = Pixels(classes, last), make_masks(classes)
    masks[:, 0, 0] = -1 if classes > 1 else 0  # ignored
    states = [model.state_dict(), {name: -value for name, value in model.state_dict().items()}]
    found = persample.scan(model, loss_fn, (x, masks), checkpoints=states, **QUICK)
    source = Source((x, masks))
    with contextlib.ExitStack() as stack:
        reader, reason = find_mask_reader(found, source, stack)
        assert reader is not None and not reason
        shown = Page(found, None, None, {}, source, reader)
        previews = shown.previews
    scores = -model.scores(x).detach()  # of the last checkpoint
    predicted = scores.argmax(1) if classes > 1 else (scores[:, 0] > 0).long()
    for i, preview in previews.items():
        if i not in shown.suspects:
            assert preview.kind == "image"
            continue
        assert [title for title, _ in preview.panels] == ["given", "model", "differ"]
        differs = (predicted[i] != masks[i]) & (masks[i] >= 0)
        pink = (decode(preview.panels[2][1]) == (255, 0, 180)).all(2)
        assert pink.tolist() == differs.tolist()
        assert preview.content.startswith(f"{differs.sum() / (masks[i] >= 0).sum():.0%}".replace("%", " %"))
    page = found.report(tmp_path / "r.html", data=(x, masks), plots=False).read_text()
    assert page.count(', differ"') == len(shown.suspects) and "Pixels that the loss ignores" in page


def test_masks_are_shown_without_a_prediction_if_there_is_none(tmp_path: Path) -> None:
    model, data = Pixels(3, nn.Identity()), make_masks(3)
    found = persample.scan(model, segment, data, out=tmp_path, **QUICK)
    assert ", differ" not in persample.Scan(tmp_path).report(data=data, plots=False).read_text()
    failing = MaskReader(nn.Conv2d(1, 1, 1), segment, Source(data).collate, [])((data[0][0], data[1][0]))
    assert make_preview(failing).kind == "image"  # type: ignore[union-attr]
    few = MaskReader(Pixels(2, nn.Identity()), segment, Source(data).collate, [])((data[0][0], data[1][0]))
    assert make_preview(few).kind == "image"  # type: ignore[union-attr]  # more classes are given than scored
    nn.init.zeros_(model.scores.bias)
    page = found.report(data=data, plots=False).read_text()
    assert "are not shown. The weights of the model differ" in page and "<img" in page


def decode(preview: Any) -> Any:
    data = base64.b64decode(preview.content.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


TEXT = "the cat sat on a mat and slept"
PAIR = {"prompt": "the cat sat on ", "completion": "a mat and slept"}


def get_words(text: str, marks: Any) -> set[str]:
    return {text[start:end] for start, end in marks}


def compute_parts(model: nn.Module, ids: Tensor, first: int) -> Tensor:
    """The norm of each position's part of the gradient, by copies of all parameters for each position.

    The loss is the mean over the tokens from `first` on. The model must compute each position from its own token.
    """
    copies = [{name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()} for _ in ids]
    logits = torch.cat([torch.func.functional_call(model, c, (i[None],)) for c, i in zip(copies, ids, strict=True)])
    F.cross_entropy(logits[first - 1 : -1], ids[first:]).backward()
    grads = [[torch.zeros_like(p) if p.grad is None else p.grad for p in c.values()] for c in copies]
    return torch.stack([torch.cat([g.flatten() for g in part]).norm() for part in grads])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("example", [{"text": TEXT}, PAIR])
def test_tokens_are_marked_by_gradient_and_by_loss(example: dict[str, str], side: str) -> None:
    model, tokenizer = Language(), make_tokenizer()
    tokenizer.padding_side = side
    ids = torch.tensor([WORDS.index(word) for word in TEXT.split()])
    first = 4 if "prompt" in example else 1
    losses = F.cross_entropy(model(ids)[first - 1 : -1], ids[first:], reduction="none")
    parts = compute_parts(model, ids, first)
    found = TokenMarker(model, tokenizer).measure(example)
    assert [found.text[start:end] for start, end in found.places] == TEXT.split() and found.reason == ""
    torch.testing.assert_close(found.values["token_gradient"], parts)
    torch.testing.assert_close(found.values["token_loss"][first:], losses)
    assert found.values["token_loss"][:first].isnan().all()
    marked = make_marked(TokenMarker(model, tokenizer, count=2)(example))
    words = TEXT.split()
    assert get_words(marked.text, marked.marks["token_gradient"]) == {words[i] for i in parts.topk(2).indices}
    assert get_words(marked.text, marked.marks["token_loss"]) == {words[i + first] for i in losses.topk(2).indices}
    assert model.training and all(p.grad is None for p in model.parameters())  # as before


def make_marked(value: Any) -> MarkedText:
    assert isinstance(value, Deferred)
    return value.complete()


def test_tokens_of_classifiers_are_marked_by_gradient() -> None:
    marked = make_marked(TokenMarker(Pooled(), make_tokenizer(), count=3)({"sentence": TEXT, "label": 1}))
    assert list(marked.marks) == ["token_gradient"] and len(marked.marks["token_gradient"]) == 3


class Bag(Language):
    """Tokens are counted, so that no part of the gradient belongs to one of them."""

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        counts = F.one_hot(input_ids, len(WORDS)).sum(1).float()
        return self.head(counts @ self.words.weight)


def fail(model: nn.Module, batch: Any) -> Tensor:
    raise RuntimeError("no such loss")


@pytest.mark.parametrize(
    ("model", "loss_fn", "example", "kinds", "reason"),
    [
        (Language, fail, {"text": TEXT}, ["token_loss"], "RuntimeError: no such loss"),
        (Bag, text_losses, {"text": TEXT, "label": 1}, [], "belongs to one token"),
        (Language, text_losses, {"text": ""}, [], "no token"),
        (Language, text_losses, {"text": TEXT, "label": "good"}, [], "Error: "),  # no number
    ],
)
def test_reason_is_given_for_missing_marks(
    model: Any, loss_fn: Any, example: dict[str, Any], kinds: list[str], reason: str
) -> None:
    marked = make_marked(TokenMarker(model(), make_tokenizer(), loss_fn=loss_fn)(example))
    assert list(marked.marks) == kinds and reason in marked.reason


def test_only_texts_are_marked() -> None:
    show = TokenMarker(Language(), make_tokenizer())
    assert show((torch.ones(3), 1)) is None
    slow = SimpleNamespace(pad_token="[PAD]", is_fast=False)
    with pytest.raises(ScanError, match="where its tokens are"):
        TokenMarker(Language(), slow)


class Pooled(Language):
    """A classifier of texts."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return super().forward(input_ids).mean(1)


@pytest.mark.parametrize("place", [0, 150, 900])
def test_long_texts_are_cut_around_the_first_mark(place: int) -> None:
    text = "x" * place + "\nbad " + "y" * 1000
    preview = make_preview(MarkedText(text, [(place + 1, place + 4), (place + 600, place + 700)]), length=100)
    assert preview is not None and len(preview.content) <= 102
    assert [piece for piece, kinds in preview.pieces if kinds] == ["bad"]
    assert "".join(piece for piece, _ in preview.pieces) == preview.content


def test_marks_in_the_page_are_escaped(tmp_path: Path) -> None:
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    found = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), **QUICK)
    path = found.report(
        tmp_path / "r.html", data=(x, y), show=lambda e: MarkedText("a <b>bold</b> word", [(2, 9)]), plots=False
    )
    assert "a <mark>&lt;b&gt;bold</mark>&lt;/b&gt; word" in path.read_text()


def test_labels_that_the_model_contradicts_are_named(tmp_path: Path) -> None:
    x, y = torch.randn(12, 3), torch.randint(2, (12, 4)).float()
    found = persample.scan(nn.Linear(3, 4), nn.BCEWithLogitsLoss(), (x, y), classes=["a", "b", "c", "d"], **QUICK)
    page = found.report(tmp_path / "r.html", plots=False).read_text()
    assert "model adds it" in page or "model removes it" in page


def test_command_line_marks_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from persample.cli import main

    monkeypatch.chdir(tmp_path)
    make_tokenizer().backend_tokenizer.save("tokenizer.json")
    Path("preview_tasks.py").write_text(
        "from tests.scanning.test_previews import Language\n\ndef net():\n    return Language()\n\n"
        "def other():\n    model = Language()\n    model.head.bias.data.add_(1)\n    return model\n"
    )
    Path("texts.csv").write_text("text\nthe cat sat on a mat\na mat and the cat slept\n")
    files = ["--text", "texts.csv", "--tokenizer", "tokenizer.json", "--out", "out", "--quiet", "--report"]
    assert main(["scan", "preview_tasks:net", *files]) == 0
    page = Path("out/report.html").read_text()
    assert 'data-marks="token_gradient"' in page and '<mark class="token_gradient' in page
    assert main(["report", "out", "--out", "plain.html"]) == 0
    assert "<mark" not in Path("plain.html").read_text() and "tokens are not marked" in capsys.readouterr().err
    assert main(["report", "out", "--out", "marked.html", "--module", "preview_tasks:net"]) == 0
    assert get_marks(Path("marked.html").read_text()) == get_marks(page)
    assert main(["report", "out", "--out", "other.html", "--module", "preview_tasks:other"]) == 0
    assert (
        "<mark" not in Path("other.html").read_text() and "The weights of the model differ" in capsys.readouterr().err
    )
    assert main(["query", "out", "tokens", "1", "--module", "preview_tasks:net", "-k", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["token"] for row in rows] == order_words("a mat and the cat slept")[:3] and rows[0]["gradient"] > 0
    assert main(["query", "out", "tokens", "7", "--module", "preview_tasks:net"]) == 2
    assert main(["query", "out", "tokens", "1"]) == 2
    errors = capsys.readouterr().err
    assert "There is no example 7" in errors and "add --module" in errors


def get_marks(page: str) -> list[str]:
    return re.findall(r"<mark.*?</mark>", page)


def order_words(text: str) -> list[str]:
    """The words of a text, largest part of the gradient first."""
    values = TokenMarker(Language(), make_tokenizer()).measure({"text": text}).values["token_gradient"]
    return [text.split()[i] for i in values.argsort(descending=True)]
