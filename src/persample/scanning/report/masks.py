"""Images with masks of classes: the given mask, and the one that the model predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from persample.scanning.report.charts import PALETTE
from persample.scanning.report.images import convert_mode, to_array, to_pixels
from persample.scanning.screening import LABEL_KEYS
from persample.scanning.store import Array

_MASK_KEYS = ("mask", "masks", "segmentation", *LABEL_KEYS)
_COLOURS = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in PALETTE], dtype=np.float64)
_DIFFERENT = np.array([255.0, 0.0, 180.0])  # colour of pixels that differ


@dataclass(frozen=True)
class MaskedImage:
    """An image with the class of each of its pixels, as given and as predicted. Negative classes are ignored."""

    pixels: Array  # (H, W) or (H, W, C), uint8
    given: Array  # (H, W)
    predicted: Array | None = None  # (H, W)

    def paint(self, classes: Array) -> Image.Image:
        """The image with a colour for each class but 0, which is usually the background."""
        picture = np.asarray(self._rgb(), dtype=np.float64)
        mixed = (picture + _COLOURS[classes.astype(int) % len(_COLOURS)]) / 2
        return _to_image(np.where((classes > 0)[..., None], mixed, picture))

    def paint_differences(self) -> Image.Image:
        """The image in pale grey, with the pixels in colour whose classes differ."""
        grey = np.asarray(self._rgb().convert("L").convert("RGB"), dtype=np.float64)
        return _to_image(np.where(self.differs[..., None], _DIFFERENT, 128 + grey / 2))

    @property
    def differs(self) -> Array:
        """The pixels whose classes differ, without those that are ignored."""
        return (self.given != self.predicted) & (self.given >= 0)

    @property
    def share(self) -> float:
        """The share of the pixels that differ, among those that are not ignored."""
        return float(self.differs.sum() / max(1, (self.given >= 0).sum()))

    def _rgb(self) -> Image.Image:
        return convert_mode(Image.fromarray(self.pixels)).convert("RGB")


def find_masked_image(example: Any) -> MaskedImage | None:
    """The image and the mask of an example; None if it is no pair or dict of an image and a mask of its size."""
    if isinstance(example, Mapping):
        values = [value for value in example.values() if _is_array(value)]
        masks = [example[key] for key in _MASK_KEYS if _is_array(example.get(key))]
        images = [value for value in values if not any(value is mask for mask in masks)]
    elif isinstance(example, (tuple, list)) and len(example) == 2 and all(map(_is_array, example)):
        images, masks = [example[0]], [example[1]]
    else:
        return None
    if not images or not masks:
        return None
    pixels, classes = to_array(images[0]), _to_classes(masks[0])
    pixels = None if pixels is None else to_pixels(pixels)
    if pixels is None or classes is None or pixels.shape[:2] != classes.shape:
        return None
    return MaskedImage(pixels, classes)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim >= 2


def _to_classes(mask: Any) -> Array | None:
    """A mask as integers `(H, W)`; None if its numbers are no classes. Floats must be 0 and 1."""
    classes = to_array(mask)
    if classes is None:
        return None
    classes = classes[0] if classes.ndim == 3 and len(classes) == 1 else classes
    is_class = classes.dtype.kind in "biu" or bool(np.isin(classes, (0, 1)).all())
    return classes.astype(np.int64) if classes.ndim == 2 and is_class else None


def _to_image(pixels: Array) -> Image.Image:
    return Image.fromarray(pixels.round().astype(np.uint8))
