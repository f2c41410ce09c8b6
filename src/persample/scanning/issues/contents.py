"""What can be measured of the inputs themselves, in one pass over the data: properties of images and texts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from persample.scanning.report.images import convert_mode, to_array
from persample.scanning.report.previews import find_content
from persample.scanning.screening import Unreadable
from persample.scanning.source import Source
from persample.scanning.store import Array

_AT_ONCE = 32  # examples, which may be large
_SIDE = 256  # pixels of the images that are measured
_FLAT = 1e-3  # variance of an image in which little can be seen
_HASH_SIDE = 16  # pixels of the images that are compared


@dataclass
class Contents:
    """Properties of all examples, NaN where an example has none; and small images, texts or vectors to compare."""

    size: int
    properties: dict[str, Array] = field(default_factory=dict)
    pictures: dict[int, Array] = field(default_factory=dict)  # (256,) each, with mean 0 and length 1
    texts: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, Array] = field(default_factory=dict)  # features, or tokens

    def put(self, i: int, values: dict[str, float]) -> None:
        """Store properties of an example."""
        for name, value in values.items():
            self.properties.setdefault(name, np.full(self.size, np.nan))[i] = value


def measure_contents(source: Source, size: int) -> Contents:
    """Read all examples and measure them."""
    contents = Contents(size)
    for i, value in _read(source, size):
        if isinstance(value, str):
            contents.texts[i] = value
            contents.put(i, _measure_text(value))
        elif (image := _to_image(value)) is not None:
            pixels = np.asarray(_shrink(image), dtype=np.float64)
            contents.put(i, _measure_image(image, pixels))
            contents.pictures[i] = _normalise(image)
        elif (array := to_array(value)) is not None and array.ndim == 1:
            contents.vectors[i] = array
    if contents.texts:
        _add_scripts(contents)
    return contents


def _read(source: Source, size: int) -> Iterator[tuple[int, Any]]:
    for start in range(0, size, _AT_ONCE):
        for i, example in source.read_originals(range(start, min(size, start + _AT_ONCE))).items():
            if not isinstance(example, Unreadable):
                yield i, find_content(example)


# ---- images ----


def _to_image(value: Any) -> Image.Image | None:
    """A value as an image, without a change of its brightness; None if it is none."""
    if isinstance(value, Image.Image):
        return convert_mode(value)
    array = to_array(getattr(value, "pixels", value))  # of an image with a mask
    if array is None or array.ndim not in (2, 3):
        return None
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and (array.shape[-1] not in (1, 3, 4) or min(array.shape[:2]) < 4):
        return None
    if array.dtype != np.uint8:
        array = np.nan_to_num(array.astype(np.float64))
        low = 0.0 if array.min() >= 0 else -1.0 if array.min() >= -1 else -3.0  # 0 to 1, -1 to 1, or standardised
        array = (255 * np.clip((array - low) / (1.0 - low if low > -3 else 6.0), 0, 1)).astype(np.uint8)
    return convert_mode(Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array))


def _shrink(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.thumbnail((_SIDE, _SIDE))
    return image


def _measure_image(image: Image.Image, pixels: Array) -> dict[str, float]:
    grey = pixels.mean(2) / 255 if pixels.ndim == 3 else pixels / 255
    dark, bright = np.quantile(grey, [0.05, 0.99]).tolist()
    inner = grey[1:-1, 1:-1]
    laplacian = 4 * inner - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    counts = np.bincount((grey * 31).astype(int).ravel(), minlength=32) / grey.size
    entropy = -float((counts[counts > 0] * np.log(counts[counts > 0])).sum()) / np.log(32)
    width, height = image.size
    colour = float(np.ptp(pixels, axis=2).mean() / 255) if pixels.ndim == 3 else 0.0
    return {
        "brightness": float(grey.mean()),
        "darkest": dark,
        "brightest": bright,
        "sharpness": float(laplacian.var() / (grey.var() + _FLAT)) if laplacian.size else 0.0,
        "information": entropy,
        "area": float(width * height),
        "aspect_ratio": min(width, height) / max(width, height),
        "colour": colour,
    }


def _normalise(image: Image.Image) -> Array:
    """A small grey image as a vector of mean 0 and length 1; zeros if the image has one colour."""
    small = np.asarray(image.convert("L").resize((_HASH_SIDE, _HASH_SIDE), Image.Resampling.BOX), dtype=np.float32)
    small = small.ravel() - small.mean()
    length = float(np.linalg.norm(small))
    return small / length if length > 1 else np.zeros_like(small)


# ---- texts ----


def _measure_text(text: str) -> dict[str, float]:
    return {"length": float(len(text)), "letters": float(sum(map(str.isalnum, text)))}


@cache
def _find_script(letter: str) -> str:
    """The script of a letter, such as LATIN or CYRILLIC."""
    return unicodedata.name(letter, "OTHER").partition(" ")[0]


def _add_scripts(contents: Contents) -> None:
    """The share of the letters of each text that belong to the most frequent script of all."""
    counts = {i: Counter(_find_script(c) for c in text if c.isalpha()) for i, text in contents.texts.items()}
    total: Counter[str] = Counter()
    for found in counts.values():
        total.update(found)
    usual = max(total, key=lambda script: total[script], default="")
    for i, found in counts.items():
        if letters := found.total():
            contents.put(i, {"usual_script": found[usual] / letters})
