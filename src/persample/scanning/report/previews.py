"""What the report shows of an example: a thumbnail, a piece of text, or a line of numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from persample.scanning.store import Array

SIDE = 96  # of a thumbnail, at most
WORDS = 300  # characters of a text, at most
_NUMBERS = 6  # shown of anything else
_TINY = 48  # an image up to this side is enlarged by the browser, pixel by pixel
_SHORTEST = 4  # the side of what can be taken for an image
_LONGEST_RATIO = 8
_TEXTS = ("text", "sentence", "content", "question", "prompt", "review", "document", "title")
_LABELS = ("label", "labels", "target", "targets", "y")  # nothing to look at
_IMAGES = ("image", "img", "pixel_values", "picture", "x", "input", "inputs")


@dataclass(frozen=True)
class Preview:
    """What is shown of an example: a data URI, or words; `tiny` images are enlarged without smoothing."""

    kind: Literal["image", "text", "numbers"]
    content: str
    tiny: bool = False


def guessed(example: Any) -> Any:
    """The part of an example that a person would look at: the inputs of a pair, the text or the image of a dict.

    >>> guessed(("a film to forget", 0)), guessed({"label": 1, "idx": 7, "sentence": "splendid"})
    ('a film to forget', 'splendid')
    """
    if isinstance(example, Mapping):
        texts = [name for name in example if isinstance(example[name], str)]
        named = [name for name in _TEXTS if name in texts] or [name for name in texts if name not in _LABELS]
        named += [name for name in _IMAGES if name in example] + [name for name in example if name not in _LABELS]
        return guessed(example[named[0]]) if named else None
    if isinstance(example, (tuple, list)) and example and not isinstance(example[0], (int, float)):
        return guessed(example[0])
    return example


def preview_of(value: Any, side: int = SIDE, words: int = WORDS) -> Preview | None:
    """How a value is shown: images as thumbnails of at most `side` pixels, texts cut at so many characters.

    >>> preview_of("well " * 100, words=12)
    Preview(kind='text', content='well well we…', tiny=False)
    >>> preview_of([0.125, 3, 4.5]).content, preview_of(np.arange(64.0)).content
    ('0.125, 3, 4.5', '0, 1, 2, 3, 4, 5, … (64 numbers)')
    """
    if value is None:
        return None
    if isinstance(value, Image.Image):
        return _thumbnail(_plain(value), side)
    if isinstance(value, str):
        return Preview("text", _cut(value, words))
    array = _as_array(value)
    if array is None:
        return Preview("text", _cut(str(value), words))
    if (pixels := _as_pixels(array)) is not None:
        return _thumbnail(_plain(Image.fromarray(pixels)), side)
    return Preview("numbers", _in_a_line(array))


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most].rstrip() + "…"


def _in_a_line(array: Array) -> str:
    shown = ", ".join(f"{value:.3g}" if array.dtype.kind == "f" else str(value) for value in array.flat[:_NUMBERS])
    return shown if array.size <= _NUMBERS else f"{shown}, … ({array.size:,} numbers)"


def _as_array(value: Any) -> Array | None:
    """The numbers of a value, or None where it is something else."""
    if isinstance(value, Tensor):
        if value.is_complex():
            return None
        value = value.detach().cpu().to_dense() if value.is_sparse else value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # of parts of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


# ---- images ----


def _as_pixels(array: Array) -> Array | None:
    """An array as `(H, W)` or `(H, W, C)` in uint8, or None where it cannot be an image."""
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and min(array.shape[1:]) >= _SHORTEST:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (3, 4))):
        return None
    short, long = sorted(array.shape[:2])
    if short < _SHORTEST or long > _LONGEST_RATIO * short:
        return None
    return array if array.dtype == np.uint8 else (255 * _in_unit(array)).round().astype(np.uint8)


def _in_unit(array: Array) -> Array:
    """Brightness between 0 and 1: as it is in [0, 1], shifted in [-1, 1], stretched to its own range elsewhere."""
    values = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    least, most = float(values.min()), float(values.max())
    if least >= 0 and most <= 1:
        return values
    if least >= -1 and most <= 1:
        return (values + 1) / 2
    least = min(least, 0.0)
    return (values - least) / (most - least)


def _plain(image: Image.Image) -> Image.Image:
    """The image in grey or in colours, what is transparent in it on white."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = Image.fromarray((255 * _in_unit(np.asarray(image))).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "P"):
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")


def _thumbnail(image: Image.Image, side: int) -> Preview:
    image = image.copy()
    tiny = max(image.size) <= _TINY
    image.thumbnail((side, side))
    lossless = _encoded(image, "PNG", optimize=True)
    if max(image.size) > 16 and len(small := _encoded(image, "JPEG", quality=82)) < len(lossless):
        return Preview("image", f"data:image/jpeg;base64,{small}", tiny)
    return Preview("image", f"data:image/png;base64,{lossless}", tiny)


def _encoded(image: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
