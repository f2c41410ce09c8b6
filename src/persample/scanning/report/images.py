"""Arrays and images as pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from persample.scanning.store import Array

_MIN_IMAGE_SIDE = 4  # smaller arrays are shown as numbers
_MAX_IMAGE_RATIO = 8  # of the longer side to the shorter side


def to_array(value: Any) -> Array | None:
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


def to_pixels(array: Array) -> Array | None:
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


def convert_mode(image: Image.Image) -> Image.Image:
    """The image in grey or RGB, with a white background where it is transparent."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = Image.fromarray((255 * _scale_to_unit(np.asarray(image))).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "P"):
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")
