"""Issues of single inputs: dark, blurred, odd images; empty, truncated texts and texts in another script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from persample.scanning.issues.base import Issue, flag
from persample.scanning.issues.contents import Contents
from persample.scanning.store import Array

_END = tuple(".!?…\"'”’)]};:。！？।")
_MIN_CUT = 20  # characters of a text that was cut
_USUAL_SHARE = 0.9  # of texts that end a sentence, if texts do


@dataclass(frozen=True)
class _Check:
    """An issue of examples whose score, computed from a property, lies below a threshold."""

    of: str  # property
    score: Callable[[Array], Array]
    threshold: float


def _compare_with_median(values: Array) -> Array:
    """The ratio to the median, at most 1."""
    median = float(np.nanmedian(values))
    return np.minimum(1.0, values / median) if median > 0 else np.ones_like(values)


def _compare_sizes(values: Array) -> Array:
    """How far sizes lie from the usual ones: 1 inside three interquartile ranges, else the ratio of the sides."""
    logs = np.log(values)
    first, median, third = np.nanquantile(logs, [0.25, 0.5, 0.75])
    is_usual = (logs >= first - 3 * (third - first) - 1e-9) & (logs <= third + 3 * (third - first) + 1e-9)
    return np.where(is_usual, 1.0, np.exp(-np.abs(logs - median) / 2))


def _find_rare_grey(values: Array) -> Array:
    """0 for images without colour among images with colour."""
    is_grey = values < 1e-3
    return np.where(is_grey & (np.nanmean(is_grey) < 0.2), 0.0, 1.0)


CHECKS = {
    "dark": _Check("brightest", lambda values: values, 0.32),
    "light": _Check("darkest", lambda values: 1 - values, 0.05),
    "blurry": _Check("sharpness", _compare_with_median, 0.1),
    "low_information": _Check("information", lambda values: values, 0.1),
    "odd_size": _Check("area", _compare_sizes, 0.7),
    "odd_aspect_ratio": _Check("aspect_ratio", lambda values: values, 0.35),
    "grayscale": _Check("colour", _find_rare_grey, 0.5),
    "empty": _Check("letters", lambda values: np.minimum(1.0, values), 0.5),
    "other_script": _Check("usual_script", lambda values: values, 0.5),
}


def find_input_issues(contents: Contents) -> Iterator[Issue]:
    """The issues of all checks whose property was measured."""
    for name, check in CHECKS.items():
        if check.of in contents.properties:
            values = contents.properties[check.of]
            with np.errstate(invalid="ignore", divide="ignore"):
                scores = np.where(np.isnan(values), 1.0, check.score(values))
            yield flag(name, contents.size, np.flatnonzero(scores < check.threshold), scores)
    if contents.texts:
        yield flag("truncated", contents.size, _find_truncated(contents.texts))


def _find_truncated(texts: dict[int, str]) -> list[int]:
    """Texts that stop within a sentence: several of the same, largest length, or few among many that do not."""
    longest = max(map(len, texts.values()))
    at_most = [i for i, text in texts.items() if len(text) == longest >= _MIN_CUT and not text.rstrip().endswith(_END)]
    written = {i: text.rstrip() for i, text in texts.items() if len(text.strip()) >= _MIN_CUT}
    open_ends = [i for i, text in written.items() if not text.endswith(_END)]
    is_unusual = len(open_ends) <= (1 - _USUAL_SHARE) * len(written)
    return sorted({*(at_most if len(at_most) > 1 else ()), *(open_ends if is_unusual else ())})
