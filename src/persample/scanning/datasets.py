"""Datasets from files: a folder of images, or a table with a text column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from PIL import Image
from pyarrow import csv, json, parquet
from torch import Tensor, nn
from torch.utils.data import Dataset

from persample.losses import call_model
from persample.scanning.errors import ScanError
from persample.scanning.labels import choose_classes, read_labels

Tokenizer = Callable[[list[str]], Mapping[str, Any]]

_READERS = {".csv": csv.read_csv, ".parquet": parquet.read_table, ".jsonl": json.read_json, ".json": json.read_json}
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images in `root/CLASS/...` as pairs `(image, class)`.

    Images are tensors `(channels, size, size)` with values from 0 to 1. Classes are numbered in the order of `classes`,
    by default in alphabetical order. Hidden folders and folders without images are no classes; `skipped` names them.
    `names` are the paths of the files in `root`.
    """

    def __init__(self, root: str | Path, size: int, channels: int = 3, classes: Sequence[str] | None = None) -> None:
        self.root, self._size, self._mode = Path(root), (size, size), {1: "L", 3: "RGB"}[channels]
        if not self.root.is_dir():
            raise ScanError(f"There is no folder {root}.")
        folders = sorted(path for path in self.root.iterdir() if path.is_dir())
        files = {path.name: _find_images(path) for path in folders if not _is_hidden(path.name)}
        self.skipped = [path.name for path in folders if not files.get(path.name)]
        if not any(files.values()):
            raise ScanError(f"{root} has no images. Put the images of each class in a folder {root}/CLASS.")
        self.classes = choose_classes([name for name, found in files.items() if found], classes, f"The folder {root}")
        numbers = {name: i for i, name in enumerate(self.classes)}
        self.files = [(path, numbers[name]) for name, found in files.items() for path in found]
        self.names = [path.relative_to(self.root).as_posix() for path, _ in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        path, label = self.files[i]
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert(self._mode).resize(self._size), dtype=np.float32) / 255
        except Exception as error:
            raise ScanError(f"Image {i}, {path}, cannot be read: {error}") from error
        picture = torch.from_numpy(pixels)
        return (picture[None] if picture.dim() == 2 else picture.permute(2, 0, 1)), label


class TextTable(Dataset[dict[str, Any]]):
    """The rows of a CSV, Parquet or JSONL file as `{"text": ..., "label": ...}`.

    `text` and `label` are the columns to read; without `label`, a column "label" is used if there is one. Labels are
    integers from 0, or names, which are numbered in the order of `classes`, by default in alphabetical order. `names`
    are the entries of the column `ids`, by default of a column "id" if there is one.
    """

    def __init__(
        self,
        path: str | Path,
        text: str = "text",
        label: str | None = None,
        ids: str | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        table = _read_table(Path(path))
        for name in (text, *(name for name in (label, ids) if name is not None)):
            if name not in table.column_names:
                raise ScanError(f"{path} has no column '{name}'. It has {', '.join(table.column_names)}.")
        label, ids = label or "label", ids or "id"
        texts = table[text]
        if not pa.types.is_string(texts.type) and not pa.types.is_large_string(texts.type):
            raise ScanError(f"The column '{text}' of {path} has type {texts.type}; it must contain text.")
        self._texts = texts
        self.classes: list[str] | None = None
        self._labels: list[int] | None = None
        self.names = [str(name) for name in table[ids].to_pylist()] if ids in table.column_names else None
        if label in table.column_names:
            where = f"The column '{label}' of {path}"
            self._labels, self.classes = read_labels(table[label].to_pylist(), classes, where)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        example: dict[str, Any] = {"text": self._texts[i].as_py() or ""}
        return example if self._labels is None else {**example, "label": self._labels[i]}


class TextCollator:
    """Collates rows of a `TextTable` to a batch `{"tokens": {...}, "label": ...}`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tokens = {key: torch.as_tensor(part) for key, part in self._tokenizer([e["text"] for e in examples]).items()}
        if "label" not in examples[0]:
            return {"tokens": tokens}
        return {"tokens": tokens, "label": torch.tensor([example["label"] for example in examples])}


def load_tokenizer(path: str | Path, max_length: int) -> Tokenizer:
    """Load a Hugging Face tokenizer from its folder or its `tokenizer.json`."""
    if not Path(path).exists():
        raise ScanError(f"There is no tokenizer {path}. Pass the folder of a saved tokenizer, or its tokenizer.json.")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ScanError("Loading a tokenizer needs transformers: pip install transformers") from error
    if Path(path).is_file():
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)

    def tokenize(texts: list[str]) -> Mapping[str, Any]:
        # Few lengths, because each new input shape costs time: layouts are found anew.
        return tokenizer(
            texts, padding=True, truncation=True, max_length=max_length, pad_to_multiple_of=32, return_tensors="pt"
        )

    return tokenize


def text_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """`(batch,)`: cross entropy of the class of each text; without classes, mean cross entropy of its next tokens."""
    tokens = dict(batch["tokens"])
    outputs = call_model(model, tokens)
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    if "label" in batch:
        return F.cross_entropy(logits, batch["label"], reduction="none")
    targets = tokens["input_ids"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].mT, targets, reduction="none")
    mask = tokens.get("attention_mask", torch.ones_like(tokens["input_ids"]))
    mask = mask[:, 1:] * mask[:, :-1]  # padding may be on either side
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)


def _is_hidden(name: str) -> bool:
    """Whether a file or folder is no data: `.ipynb_checkpoints`, `.DS_Store`, `__MACOSX`."""
    return name.startswith((".", "__"))


def _find_images(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _IMAGE_SUFFIXES and not any(map(_is_hidden, path.relative_to(folder).parts))
    ]


def _read_table(path: Path) -> pa.Table:
    if not path.is_file():
        raise ScanError(f"There is no file {path}.")
    if path.suffix not in _READERS:
        raise ScanError(f"{path} must be one of {', '.join(_READERS)}.")
    try:
        return _READERS[path.suffix](path)
    except pa.ArrowInvalid as error:
        raise ScanError(f"{path} cannot be read: {error}") from error
