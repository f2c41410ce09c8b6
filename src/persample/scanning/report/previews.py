"""Previews of examples: a thumbnail, a piece of text, or some numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from persample.scanning.report.charts import PALETTE
from persample.scanning.source import LABEL_KEYS
from persample.scanning.store import Array

MAX_SIDE = 96  # pixels of a thumbnail
MAX_LENGTH = 300  # characters of a text
_MAX_NUMBERS = 6
_TINY_SIDE = 48  # pixels; up to this size the browser enlarges an image without smoothing
_MIN_IMAGE_SIDE = 4  # smaller arrays are shown as numbers
_MAX_IMAGE_RATIO = 8  # of the longer side to the shorter side
_TEXT_KEYS = ("text", "sentence", "content", "question", "prompt", "review", "document", "title")
_IMAGE_KEYS = ("image", "img", "pixel_values", "picture", "x", "input", "inputs")


Places = Sequence[tuple[int, int]]  # start and end of parts of a text


@dataclass(frozen=True)
class MarkedText:
    """A text with marked parts, of one kind or of several: the page shows one kind at a time, the first one first.

    `reason` says why there are no marks of another kind.
    """

    text: str
    marks: Places | Mapping[str, Places]
    reason: str = ""

    @property
    def kinds(self) -> Mapping[str, Places]:
        return self.marks if isinstance(self.marks, Mapping) else {"": self.marks}


@dataclass(frozen=True)
class UnmarkedText:
    """A text whose marks are found only where they are shown."""

    text: str
    mark: Callable[[], MarkedText]


@dataclass(frozen=True)
class Mark:
    """A marked part of a text. The kind is a name of `wording`, or empty."""

    start: int
    end: int
    kind: str = ""


@dataclass(frozen=True)
class Preview:
    """A preview: a data URI of an image, or a text. `tiny` images are enlarged without smoothing."""

    kind: Literal["image", "text", "numbers"]
    content: str
    tiny: bool = False
    marks: tuple[Mark, ...] = field(default=(), repr=False)
    kinds: tuple[str, ...] = field(default=(), repr=False)  # of marks
    reason: str = field(default="", repr=False)  # why there are no marks of another kind

    @property
    def pieces(self) -> list[tuple[str, list[str] | None]]:
        """The text in pieces, each with the kinds of its marks, or None if it is not marked.

        >>> Preview("text", "a cold war", marks=(Mark(2, 6, "x"), Mark(2, 10, "y"))).pieces
        [('a ', None), ('cold', ['x', 'y']), (' war', ['y'])]
        """
        ends = {end for mark in self.marks for end in (mark.start, mark.end)} | {0, len(self.content)}
        pieces = []
        for start, end in pairwise(sorted(ends)):
            kinds = [mark.kind for mark in self.marks if mark.start <= start and end <= mark.end]
            pieces.append((self.content[start:end], list(dict.fromkeys(kinds)) or None))
        return pieces


def find_content(example: Any) -> Any:
    """The part of an example that a person would look at: the inputs of a pair, the text or the image of a dict.

    >>> find_content(("a film to forget", 0)), find_content({"label": 1, "idx": 7, "sentence": "splendid"})
    ('a film to forget', 'splendid')
    """
    if isinstance(example, Mapping):
        if "text" not in example and all(isinstance(example.get(key), str) for key in ("prompt", "completion")):
            return example["prompt"] + example["completion"]
        texts = [key for key in example if isinstance(example[key], str)]
        keys = [key for key in _TEXT_KEYS if key in texts] or [key for key in texts if key not in LABEL_KEYS]
        keys += [key for key in _IMAGE_KEYS if key in example] + [key for key in example if key not in LABEL_KEYS]
        return find_content(example[keys[0]]) if keys else None
    if isinstance(example, (tuple, list)) and len(example) == 2 and (overlay := _overlay_mask(*example)) is not None:
        return overlay
    if isinstance(example, (tuple, list)) and example and not isinstance(example[0], (int, float)):
        return find_content(example[0])
    return example


def make_preview(value: Any, side: int = MAX_SIDE, length: int = MAX_LENGTH) -> Preview | None:
    """A thumbnail of at most `side` pixels, a text of at most `length` characters, or some numbers.

    >>> make_preview("well " * 100, length=12)
    Preview(kind='text', content='well well we…', tiny=False)
    >>> make_preview([0.125, 3, 4.5]).content, make_preview(np.arange(64.0)).content
    ('0.125, 3, 4.5', '0, 1, 2, 3, 4, 5, … (64 numbers)')
    """
    if value is None:
        return None
    if isinstance(value, Image.Image):
        return _make_thumbnail(_convert_mode(value), side)
    if isinstance(value, UnmarkedText):
        value = value.mark()
    if isinstance(value, MarkedText):
        return _shorten_marked(value, length)
    if isinstance(value, str):
        return Preview("text", _shorten(value, length))
    array = _to_array(value)
    if array is None:
        return Preview("text", _shorten(str(value), length))
    if (pixels := _to_pixels(array)) is not None:
        return _make_thumbnail(_convert_mode(Image.fromarray(pixels)), side)
    return Preview("numbers", _format_numbers(array))


def _shorten_marked(value: MarkedText, most: int) -> Preview:
    """A part of the text of at most `most` characters that begins at or before the first mark of the first kind."""
    first = min((start for places in islice(value.kinds.values(), 1) for start, _ in places), default=0)
    begin = max(0, first - most // 5) if first > most // 2 else 0
    text = "".join(" " if character.isspace() else character for character in value.text)[begin : begin + most]
    before, after = "…" if begin else "", "…" if begin + most < len(value.text) else ""
    shift, low, high = len(before) - begin, len(before), len(before) + len(text)
    marks = [
        Mark(max(start + shift, low), min(end + shift, high), kind)
        for kind, places in value.kinds.items()
        for start, end in places
    ]
    kept = tuple(mark for mark in marks if mark.start < mark.end)
    return Preview("text", f"{before}{text}{after}", marks=kept, kinds=tuple(value.kinds), reason=value.reason)


def _shorten(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most].rstrip() + "…"


def _format_numbers(array: Array) -> str:
    shown = ", ".join(f"{value:.3g}" if array.dtype.kind == "f" else str(value) for value in array.flat[:_MAX_NUMBERS])
    return shown if array.size <= _MAX_NUMBERS else f"{shown}, … ({array.size:,} numbers)"


def _to_array(value: Any) -> Array | None:
    """A value as an array of real numbers; None if it is something else."""
    if isinstance(value, Tensor):
        if value.is_complex():
            return None
        value = value.detach().cpu().to_dense() if value.is_sparse else value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


# ---- images ----


def _to_pixels(array: Array) -> Array | None:
    """An array as `(H, W)` or `(H, W, C)` in uint8; None if its shape is not that of an image."""
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and min(array.shape[1:]) >= _MIN_IMAGE_SIDE:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (3, 4))):
        return None
    short, long = sorted(array.shape[:2])
    if short < _MIN_IMAGE_SIDE or long > _MAX_IMAGE_RATIO * short:
        return None
    return array if array.dtype == np.uint8 else (255 * _scale_to_unit(array)).round().astype(np.uint8)


def _overlay_mask(image: Any, mask: Any) -> Image.Image | None:
    """An image with a colour for each class of its mask; None if the pair is no image with a mask of its size."""
    if not (isinstance(image, (Tensor, np.ndarray)) and isinstance(mask, (Tensor, np.ndarray))):
        return None
    pixels, classes = _to_array(image), _to_array(mask)
    pixels = None if pixels is None else _to_pixels(pixels)
    if pixels is None or classes is None or classes.ndim != 2 or classes.dtype.kind not in "biu":
        return None
    if pixels.shape[:2] != classes.shape:
        return None
    colours = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in PALETTE], dtype=np.float64)
    picture = np.asarray(_convert_mode(Image.fromarray(pixels)).convert("RGB"), dtype=np.float64)
    is_marked = classes > 0  # class 0 is usually the background, and negative classes are ignored
    mixed = np.where(is_marked[..., None], (picture + colours[classes.astype(int) % len(colours)]) / 2, picture)
    return Image.fromarray(mixed.round().astype(np.uint8))


def _scale_to_unit(array: Array) -> Array:
    """Brightness in [0, 1]. Values in [0, 1] stay, values in [-1, 1] are shifted, other values are stretched."""
    values = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    least, most = float(values.min()), float(values.max())
    if least >= 0 and most <= 1:
        return values
    if least >= -1 and most <= 1:
        return (values + 1) / 2
    least = min(least, 0.0)
    return (values - least) / (most - least)


def _convert_mode(image: Image.Image) -> Image.Image:
    """The image in grey or RGB, with a white background where it is transparent."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = Image.fromarray((255 * _scale_to_unit(np.asarray(image))).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "P"):
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")


def _make_thumbnail(image: Image.Image, side: int) -> Preview:
    image = image.copy()
    tiny = max(image.size) <= _TINY_SIDE
    image.thumbnail((side, side))
    lossless = _encode(image, "PNG", optimize=True)
    if max(image.size) > 16 and len(small := _encode(image, "JPEG", quality=82)) < len(lossless):
        return Preview("image", f"data:image/jpeg;base64,{small}", tiny)
    return Preview("image", f"data:image/png;base64,{lossless}", tiny)


def _encode(image: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
