"""Previews of examples: a thumbnail, a piece of text, or some numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Literal

from PIL import Image

from persample.scanning.report.images import convert_mode, to_array, to_pixels
from persample.scanning.report.masks import MaskedImage, find_masked_image
from persample.scanning.screening import LABEL_KEYS
from persample.scanning.store import Array

MAX_SIDE = 96  # pixels of a thumbnail
MAX_LENGTH = 300  # characters of a text
_MAX_NUMBERS = 6
_TINY_SIDE = 48  # pixels; up to this size the browser enlarges an image without smoothing
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
class Deferred:
    """A preview that takes time: `complete` makes it for the table, and `content` is shown elsewhere."""

    content: Any
    complete: Callable[[], Any]


@dataclass(frozen=True)
class Mark:
    """A marked part of a text. The kind is a name of `wording`, or empty."""

    start: int
    end: int
    kind: str = ""


@dataclass(frozen=True)
class Preview:
    """A preview: a data URI of an image, or a text. `tiny` images are enlarged without smoothing.

    The content of "panels" is a text; `panels` are images with their titles.
    """

    kind: Literal["image", "text", "numbers", "panels"]
    content: str
    tiny: bool = False
    marks: tuple[Mark, ...] = field(default=(), repr=False)
    kinds: tuple[str, ...] = field(default=(), repr=False)  # of marks
    reason: str = field(default="", repr=False)  # why there are no marks of another kind
    panels: tuple[tuple[str, Preview], ...] = field(default=(), repr=False)

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
    if (masked := find_masked_image(example)) is not None:
        return masked
    if isinstance(example, Mapping):
        if "text" not in example and all(isinstance(example.get(key), str) for key in ("prompt", "completion")):
            return example["prompt"] + example["completion"]
        texts = [key for key in example if isinstance(example[key], str)]
        keys = [key for key in _TEXT_KEYS if key in texts] or [key for key in texts if key not in LABEL_KEYS]
        keys += [key for key in _IMAGE_KEYS if key in example] + [key for key in example if key not in LABEL_KEYS]
        return find_content(example[keys[0]]) if keys else None
    if isinstance(example, (tuple, list)) and example and not isinstance(example[0], (int, float)):
        return find_content(example[0])
    return example


def make_preview(value: Any, side: int = MAX_SIDE, length: int = MAX_LENGTH) -> Preview | None:
    """A thumbnail of at most `side` pixels, a text of at most `length` characters, or some numbers.

    >>> import numpy as np
    >>> make_preview("well " * 100, length=12)
    Preview(kind='text', content='well well we…', tiny=False)
    >>> make_preview([0.125, 3, 4.5]).content, make_preview(np.arange(64.0)).content
    ('0.125, 3, 4.5', '0, 1, 2, 3, 4, 5, … (64 numbers)')
    """
    if isinstance(value, Deferred):
        value = value.complete()
    if value is None:
        return None
    if isinstance(value, MaskedImage):
        return _make_panels(value, side)
    if isinstance(value, Image.Image):
        return _make_thumbnail(convert_mode(value), side)
    if isinstance(value, MarkedText):
        return _shorten_marked(value, length)
    if isinstance(value, str):
        return Preview("text", _shorten(value, length))
    array = to_array(value)
    if array is None:
        return Preview("text", _shorten(str(value), length))
    if (pixels := to_pixels(array)) is not None:
        return _make_thumbnail(convert_mode(Image.fromarray(pixels)), side)
    return Preview("numbers", _format_numbers(array))


def _make_panels(value: MaskedImage, side: int) -> Preview:
    """The image with its mask; with a predicted mask, the image with each of both, and with their differences."""
    images = {"given": value.paint(value.given)}
    if value.predicted is None:
        return _make_thumbnail(images["given"], side)
    images |= {"model": value.paint(value.predicted), "differ": value.paint_differences()}
    panels = tuple((title, _make_thumbnail(image, side)) for title, image in images.items())
    return Preview("panels", f"{100 * value.share:.0f} % of the pixels differ", panels=panels)


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
