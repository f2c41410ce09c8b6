"""Previews that fit the task: masks over images, and texts with the worst tokens marked."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import persample
from persample.scanning import ScanError
from persample.scanning.marked_tokens import mark_worst_tokens
from persample.scanning.report.previews import MarkedText, find_content, make_preview
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
    data = base64.b64decode(preview.content.partition(",")[2])
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    changed = (abs(pixels - 128) > 8).any(2)
    assert changed.tolist() == (mask > 0).tolist()
    assert isinstance(find_content((image, torch.tensor(3))), Tensor)  # a class is no mask
    assert isinstance(find_content((image, mask[:4])), Tensor)


def test_worst_tokens_are_marked() -> None:
    model, tokenizer, text = Language(), make_tokenizer(), "the cat sat on a mat and slept"
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    losses = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
    expected = {text.split()[i + 1] for i in losses.topk(2).indices.tolist()}
    found = mark_worst_tokens(model, tokenizer, count=2)({"text": text})
    assert found is not None and {found.text[start:end] for start, end in found.marks} == expected
    assert model.training  # as before
    pair = {"prompt": "the cat sat on ", "completion": "a mat and slept"}
    marked = mark_worst_tokens(model, tokenizer, count=8)(pair)
    assert marked is not None and {marked.text[a:b] for a, b in marked.marks} == {"a", "mat", "and", "slept"}
    assert mark_worst_tokens(model, tokenizer)((torch.ones(3), 1)) is None
    with pytest.raises(ScanError, match="no scores for each token"):
        mark_worst_tokens(Pooled(), tokenizer)({"text": text})


class Pooled(Language):
    """A classifier of texts."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return super().forward(input_ids).mean(1)


@pytest.mark.parametrize("place", [0, 150, 900])
def test_long_texts_are_cut_around_the_first_mark(place: int) -> None:
    text = "x" * place + "\nbad " + "y" * 1000
    preview = make_preview(MarkedText(text, [(place + 1, place + 4), (place + 600, place + 700)]), length=100)
    assert preview is not None and len(preview.content) <= 102
    assert [piece for piece, is_marked in preview.pieces if is_marked] == ["bad"]
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


def test_command_line_marks_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from persample.cli import main

    monkeypatch.chdir(tmp_path)
    make_tokenizer().backend_tokenizer.save("tokenizer.json")
    Path("preview_tasks.py").write_text(
        "from tests.scanning.test_previews import Language\n\ndef net():\n    return Language()\n"
    )
    Path("texts.csv").write_text("text\nthe cat sat on a mat\na mat and the cat slept\n")
    files = ["--text", "texts.csv", "--tokenizer", "tokenizer.json", "--out", "out", "--quiet", "--report"]
    assert main(["scan", "preview_tasks:net", *files]) == 0
    assert "<mark>" in Path("out/report.html").read_text()
