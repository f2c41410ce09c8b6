"""How images become tensors: as the model was trained, by a few numbers that can be printed and stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from persample.scanning.errors import ScanError

_FILES = ("preprocessor_config.json", "config.json")  # of transformers, and of timm
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop the middle, scale to 0 to 1, subtract `mean` and divide by `std`.

    `resize` is `(width, height)`, or one number for the shorter side; `crop` is `(width, height)`. `filter` is a
    number of `PIL.Image.Resampling`.
    """

    resize: tuple[int, ...] | None = None
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    filter: int = Image.Resampling.BICUBIC

    def __call__(self, image: Image.Image) -> Tensor:
        """`(channels, height, width)`."""
        image = self._crop(self._resize(image))
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
        pixels = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        if self.mean is not None:
            pixels = pixels - torch.tensor(self.mean)[:, None, None]
        return pixels if self.std is None else pixels / torch.tensor(self.std)[:, None, None]

    @property
    def size(self) -> tuple[int, ...] | None:
        """Width and height of the tensors; None if they depend on the image."""
        return self.crop or (self.resize if self.resize and len(self.resize) == 2 else None)

    def _resize(self, image: Image.Image) -> Image.Image:
        if self.resize is None:
            return image
        size = self.resize
        if len(size) == 1:
            scale = size[0] / min(image.size)
            size = tuple(max(size[0], round(side * scale)) for side in image.size)
        return image.resize((size[0], size[1]), Image.Resampling(self.filter))

    def _crop(self, image: Image.Image) -> Image.Image:
        if self.crop is None:
            return image
        left, top = ((side - wanted) // 2 for side, wanted in zip(image.size, self.crop, strict=True))
        return image.crop((left, top, left + self.crop[0], top + self.crop[1]))

    def __str__(self) -> str:
        parts = {
            "resize": self.resize and " x ".join(map(str, self.resize)) + (" (shorter side)" * (len(self.resize) == 1)),
            "crop": self.crop and " x ".join(map(str, self.crop)),
            "mean": self.mean and ", ".join(f"{value:g}" for value in self.mean),
            "std": self.std and ", ".join(f"{value:g}" for value in self.std),
        }
        return "; ".join(f"{name} {text}" for name, text in parts.items() if text) or "none"

    def check(self, channels: int) -> None:
        """Refuse numbers that do not fit the channels of the images."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, channels):
                raise ScanError(f"The images have {channels} channels, but {name} has {len(values)} numbers.")
        if self.std is not None and min(self.std) <= 0:
            raise ScanError(f"std must be positive, got {min(self.std)}.")


def read_processor(path: str | Path) -> ImageTransform:
    """The transform of a saved image processor of transformers, or of a model of timm, from its JSON file.

    `path` is the file or its folder. No code of it is run.
    """
    files = [Path(path) / name for name in _FILES] if Path(path).is_dir() else [Path(path)]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ScanError(f"{path} has no {' or '.join(_FILES)}. Pass a saved image processor, or its file.")
    try:
        values = json.loads(found.read_text("utf-8"))
    except ValueError as error:
        raise ScanError(f"{found} is no JSON file: {error}") from error
    config = values.get("pretrained_cfg", values) if isinstance(values, Mapping) else {}
    if "input_size" in config:
        return _read_timm(config)
    if not {"size", "crop_size", "image_mean"} & set(config):
        raise ScanError(f"{found} describes no image processor: it has no size, crop_size or image_mean.")
    return _read_transformers(config)


def _read_transformers(config: Mapping[str, Any]) -> ImageTransform:
    normalises = config.get("do_normalize", True)
    return ImageTransform(
        resize=_read_size(config.get("size")) if config.get("do_resize", True) else None,
        crop=_read_pair(config.get("crop_size")) if config.get("do_center_crop") else None,
        mean=_read_numbers(config.get("image_mean")) if normalises else None,
        std=_read_numbers(config.get("image_std")) if normalises else None,
        filter=int(config.get("resample", Image.Resampling.BICUBIC)),
    )


def _read_timm(config: Mapping[str, Any]) -> ImageTransform:
    _, height, width = config["input_size"]
    share = float(config.get("crop_pct") or 1.0)
    return ImageTransform(
        resize=(int(min(height, width) / share),),
        crop=(width, height),
        mean=_read_numbers(config.get("mean")),
        std=_read_numbers(config.get("std")),
        filter=_FILTERS.get(str(config.get("interpolation")), Image.Resampling.BICUBIC),
    )


def _read_size(size: Any) -> tuple[int, ...] | None:
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return (int(size["shortest_edge"]),)
    return (int(size),) if isinstance(size, int) else _read_pair(size)


def _read_pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        return (int(size["width"]), int(size["height"])) if {"width", "height"} <= set(size) else None
    return None if size is None else (int(size), int(size))


def _read_numbers(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))
