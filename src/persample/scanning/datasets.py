"""Datasets from files: a folder of images, or a table with a text column."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.nn.functional as F
from PIL import Image
from pyarrow import csv, json, parquet
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from persample._internal.text import describe_value, format_count
from persample.losses import call_model
from persample.scanning.errors import ScanError, UnreadableExample
from persample.scanning.labels import choose_classes, read_labels
from persample.scanning.screening import Unreadable, say_why_unreadable
from persample.scanning.transforms import ImageTransform

Tokenizer = Callable[[list[str]], Mapping[str, Any]]

_READERS = {".csv": csv.read_csv, ".parquet": parquet.read_table, ".jsonl": json.read_json, ".json": json.read_json}
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images in `root/CLASS/...` as pairs `(image, class)`.

    Images are tensors `(channels, size, size)` with values from 0 to 1, or what `transform` makes of them.
    Classes are numbered in the order of `classes`,
    by default in alphabetical order. Hidden folders and folders without images are no classes; `skipped` names them.
    `names` are the paths of the files in `root`.
    """

    def __init__(
        self,
        root: str | Path,
        size: int = 64,
        channels: int = 3,
        classes: Sequence[str] | None = None,
        transform: ImageTransform | None = None,
    ) -> None:
        self.root, self._mode = Path(root), {1: "L", 3: "RGB"}[channels]
        self.transform = transform or ImageTransform(resize=(size, size))
        self.transform.check(channels)
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

    @property
    def shape_hint(self) -> str:
        """What the user can choose about the shape of an example."""
        channels = format_count(1 if self._mode == "L" else 3, "channel")
        size = self.transform.size
        read = f"{size[0]} x {size[1]} pixels" if size else str(self.transform)
        return (
            f"The images are read with {read} and {channels}: "
            "pass the size and the number of channels of the model's training (--image-size and --channels)."
        )

    def __len__(self) -> int:
        return len(self.files)

    def read_original(self, i: int) -> Image.Image | Unreadable:
        """The image of a file at its own size; or why it cannot be read."""
        try:
            with Image.open(self.files[i][0]) as image:
                image.load()
                return image
        except Exception as error:
            return Unreadable(say_why_unreadable(error))

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        path, label = self.files[i]
        try:
            with Image.open(path) as image:
                return self.transform(image.convert(self._mode)), label
        except Exception as error:
            raise UnreadableExample(f"Image {i}, {path}, cannot be read: {error}") from error


class TextTable(Dataset[dict[str, Any]]):
    """The rows of a CSV, Parquet or JSONL file, a data frame or a saved dataset, as `{"text": ..., "label": ...}`.

    `text` and `label` are the columns to read; without `label`, a column "label" is used if there is one. Labels are
    integers from 0, or names, which are numbered in the order of `classes`, by default in alphabetical order. `names`
    are the entries of the column `ids`, by default of a column "id" if there is one.

    Rows with the columns `prompt` and `completion` become `{"text": prompt + completion, "prompt": prompt}`. This is
    the default for a table that has columns with these names, and no column `text`.
    """

    def __init__(
        self,
        path: Any,
        text: str = "text",
        label: str | None = None,
        ids: str | None = None,
        classes: Sequence[str] | None = None,
        prompt: str | None = None,
        completion: str | None = None,
    ) -> None:
        table, known = read_table(path, label or "label")
        self._where = path if isinstance(path, (str, Path)) else "the table"
        has_pairs = prompt is not None or completion is not None
        if not has_pairs and text not in table.column_names and {"prompt", "completion"} <= set(table.column_names):
            has_pairs = True
        texts = (prompt or "prompt", completion or "completion") if has_pairs else (text,)
        for name in (*texts, *(name for name in (label, ids) if name is not None)):
            if name not in table.column_names:
                raise ScanError(f"{path} has no column '{name}'. It has {', '.join(table.column_names)}.")
        self._texts = [self._check_text(table, name) for name in texts]
        label, ids = label or "label", ids or "id"
        self.classes: list[str] | None = None
        self._labels: list[int] | None = None
        self.names = [str(name) for name in table[ids].to_pylist()] if ids in table.column_names else None
        if label in table.column_names and not has_pairs:
            where = f"The column '{label}' of {path}"
            self._labels, self.classes = read_labels(table[label].to_pylist(), classes or known, where)

    @property
    def has_labels(self) -> bool:
        """Whether the texts have classes. Otherwise the loss is that of their tokens."""
        return self._labels is not None

    def _check_text(self, table: pa.Table, name: str) -> Any:
        kind = table[name].type
        if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
            raise ScanError(f"The column '{name}' of {self._where} has type {kind}; it must contain text.")
        return table[name]

    def __len__(self) -> int:
        return len(self._texts[0])

    def __getitem__(self, i: int) -> dict[str, Any]:
        texts = [column[i].as_py() or "" for column in self._texts]
        example: dict[str, Any] = {"text": "".join(texts)}
        if len(texts) == 2:
            example["prompt"] = texts[0]
        return example if self._labels is None else {**example, "label": self._labels[i]}


class TextCollator:
    """Collates rows of a `TextTable`, or other dicts with a text, to a batch `{"tokens": {...}, "label": ...}`.

    Rows with a `prompt`, and a `completion` or a `text` that begins with the prompt, get a `completion_mask`: 1 for the
    tokens behind those that the tokenizer gives for the prompt alone.

    Args:
        tokenizer: a function of a list of texts, or a tokenizer of Hugging Face.
        max_length: the maximum number of tokens of a text, for a tokenizer of Hugging Face.
    """

    def __init__(self, tokenizer: Any, max_length: int = 128) -> None:
        self._tokenizer = wrap_tokenizer(tokenizer, max_length)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        texts = [e["text"] if "text" in e else e["prompt"] + e["completion"] for e in examples]
        batch: dict[str, Any] = {"tokens": self._tokenize(texts)}
        if "prompt" in examples[0]:
            prompts = self._tokenize([example["prompt"] for example in examples])
            batch["completion_mask"] = _mark_completions(batch["tokens"], prompts)
        if "label" in examples[0]:
            batch["label"] = torch.tensor([example["label"] for example in examples])
        return batch

    def _tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        return _pad(self._tokenizer(texts))


def _pad(tokens: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tokens as tensors. Lists of different lengths get zeros at their ends, and a mask of the real tokens.

    >>> _pad({"input_ids": [[5, 6], [7]]})
    {'input_ids': tensor([[5, 6],
            [7, 0]]), 'attention_mask': tensor([[1, 1],
            [1, 0]])}
    """
    lists = {key: part for key, part in tokens.items() if isinstance(part, list) and part and _is_ragged(part)}
    found = {key: torch.as_tensor(part) for key, part in tokens.items() if key not in lists}
    for key, part in lists.items():
        found[key] = pad_sequence([torch.as_tensor(row) for row in part], batch_first=True)
    if "input_ids" in lists and "attention_mask" not in tokens:
        ones = [torch.ones(len(row), dtype=torch.long) for row in lists["input_ids"]]
        found["attention_mask"] = pad_sequence(ones, batch_first=True)
    return found


def _is_ragged(part: list[Any]) -> bool:
    return all(hasattr(row, "__len__") for row in part) and len({len(row) for row in part}) > 1


def _mark_completions(tokens: Mapping[str, Tensor], prompts: Mapping[str, Tensor]) -> Tensor:
    """`(batch, length)`: 1 for the tokens of a text behind the longest beginning that it shares with its prompt.

    A token that joins the end of the prompt and the beginning of the completion belongs to the completion, and special
    tokens at the end of the prompt alone do not count.
    """
    marks = torch.zeros_like(tokens["input_ids"])
    for i, (mark, prompt) in enumerate(zip(marks, prompts["input_ids"], strict=True)):
        places = _find_real_tokens(tokens, i)
        own, given = tokens["input_ids"][i][places].tolist(), prompt[_find_real_tokens(prompts, i)].tolist()
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, given, strict=False)))
        mark[places[shared:]] = 1
    return marks


def _find_real_tokens(tokens: Mapping[str, Tensor], i: int) -> Tensor:
    """The places of the tokens of a text that are no padding."""
    mask = tokens.get("attention_mask")
    return torch.arange(tokens["input_ids"].shape[1]) if mask is None else mask[i].nonzero().flatten()


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
    return PretrainedTokenizer(tokenizer, max_length)


def wrap_tokenizer(tokenizer: Any, max_length: int) -> Tokenizer:
    """A function of a list of texts as it is; a tokenizer of Hugging Face as one that pads and truncates."""
    if callable(getattr(tokenizer, "encode_batch", None)) and not callable(tokenizer):  # of the package tokenizers
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    is_pretrained = hasattr(tokenizer, "pad_token") and callable(getattr(tokenizer, "convert_ids_to_tokens", None))
    return PretrainedTokenizer(tokenizer, max_length) if is_pretrained else tokenizer


class PretrainedTokenizer:
    """Tokenizes lists of texts with a tokenizer of Hugging Face."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        if tokenizer.pad_token is None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        self.tokenizer, self.max_length = tokenizer, max_length

    def __call__(self, texts: list[str], **options: Any) -> Mapping[str, Any]:
        # Few lengths, because each new input shape costs time: layouts are found anew.
        return self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            pad_to_multiple_of=math.gcd(32, self.max_length),  # a text that is cut has a multiple, too
            return_tensors="pt",
            **options,
        )

    @property
    def knows_places(self) -> bool:
        """Whether `find_places` can be called: the tokenizer is a fast one."""
        return bool(getattr(self.tokenizer, "is_fast", False))

    def find_places(self, text: str) -> Tensor:
        """`(tokens, 2)`: start and end of each token in a text. Both are equal for padding and special tokens."""
        return self([text], return_offsets_mapping=True)["offset_mapping"].reshape(-1, 2)


def text_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """`(batch,)`: cross entropy of the class of each text; without classes, mean cross entropy of its next tokens.

    The batch is that of a `TextCollator`, or one as models of Hugging Face take it: `input_ids`, `attention_mask` and,
    if any, `label` or `labels`, which are classes, or tokens with -100 for those that do not count. With a
    `completion_mask`, only the tokens of the completion count; a text without any has no finite loss.
    """
    tokens = dict(batch["tokens"]) if "tokens" in batch else _select_tokens(batch)
    outputs = call_model(model, tokens)
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    labels = batch.get("label", batch.get("labels"))
    if labels is not None and labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    targets = tokens["input_ids"] if labels is None else labels
    mask = targets[:, 1:] != -100
    if "attention_mask" in tokens:
        is_real = tokens["attention_mask"].bool()
        mask = mask & is_real[:, 1:] & is_real[:, :-1]  # padding may be on either side
    if "completion_mask" in batch:
        mask = mask & batch["completion_mask"][:, 1:].bool()
    losses = F.cross_entropy(logits[:, :-1].mT, targets[:, 1:].clamp(min=0), reduction="none")
    least = 0 if "completion_mask" in batch else 1
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=least)


def _select_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the model in a batch: its tensors without labels and marks."""
    left_out = ("label", "labels", "completion_mask")
    return {key: value for key, value in batch.items() if isinstance(value, Tensor) and key not in left_out}


def _is_hidden(name: str) -> bool:
    """Whether a file or folder is no data: `.ipynb_checkpoints`, `.DS_Store`, `__MACOSX`."""
    return name.startswith((".", "__"))


def _find_images(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _IMAGE_SUFFIXES and not any(map(_is_hidden, path.relative_to(folder).parts))
    ]


def read_table(data: Any, label: str) -> tuple[pa.Table, list[str] | None]:
    """The table in a file, a saved dataset or a data frame, and the names of the classes of its label, if stored."""
    if not isinstance(data, (str, Path)):
        return _convert_frame(data), None
    path = Path(data)
    if path.is_dir():
        return _read_saved_dataset(path, label)
    if not path.is_file():
        raise ScanError(f"There is no file {path}.")
    if path.suffix not in _READERS:
        raise ScanError(f"{path} must be one of {', '.join(_READERS)}, or the folder of a saved Hugging Face dataset.")
    try:
        return _READERS[path.suffix](path), None
    except pa.ArrowInvalid as error:
        raise ScanError(f"{path} cannot be read: {error}") from error


def _convert_frame(data: Any) -> pa.Table:
    """A data frame of pandas or polars as a table."""
    if isinstance(data, pa.Table):
        return data
    if callable(getattr(data, "to_arrow", None)):  # of polars
        return data.to_arrow()
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return pa.Table.from_pandas(data, preserve_index=False)
    raise ScanError(f"A table must be a file, a data frame or a pyarrow.Table, got {describe_value(data)}.")


def _read_saved_dataset(path: Path, label: str) -> tuple[pa.Table, list[str] | None]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise ScanError(f"{path} has several splits. Choose one of {', '.join(f'{path}/{name}' for name in splits)}.")
    if not (path / "state.json").is_file():
        raise ScanError(f"{path} is a folder, but no dataset that was saved with save_to_disk().")
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ScanError("Reading a saved dataset needs datasets: pip install datasets") from error
    saved = load_from_disk(str(path))
    return saved.with_format("arrow")[:], getattr(saved.features.get(label), "names", None)
