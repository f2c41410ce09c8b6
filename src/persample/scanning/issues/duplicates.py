"""Near duplicates: examples with the same gradient, picture (also if it was saved again), words or features."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from persample.scanning.issues.base import Issue, flag
from persample.scanning.issues.contents import Contents

# Cosine of small grey images. Different images of few pixels, such as 8 x 8 digits, may have one of 0.985.
_MIN_COSINE, _MIN_COSINE_OF_TINY, _TINY = 0.985, 0.995, 32 * 32
_BLOCK = 1024

# Vectors are near duplicates if their distance is below this part of the usual distance to the nearest other vector.
# With fewer entries, many vectors are that close by chance. The work is bounded.
_MAX_RATIO, _LEAST_ENTRIES, _MAX_WORK = 0.13, 3, 2 * 10**10


def merge_duplicates(size: int, by_gradient: Issue | None, contents: Contents | None) -> Iterator[Issue]:
    """One issue from all kinds of duplicates that were looked for."""
    pairs = [(group[0], other) for group in (by_gradient.info["groups"] if by_gradient else ()) for other in group[1:]]
    if contents is not None:
        pairs += [*_find_equal_pictures(contents), *_find_equal_texts(contents), *_find_close_vectors(contents)]
    if contents is not None or by_gradient is not None:
        groups = _join(pairs)
        yield flag("near_duplicate", size, [i for group in groups for i in group], groups=groups)


def _find_equal_pictures(contents: Contents) -> Iterator[tuple[int, int]]:
    """Pairs of images that look the same at a small size. Images of one colour count for nothing."""
    ids = [i for i, picture in contents.pictures.items() if picture.any()]
    if len(ids) < 2:
        return
    is_tiny = np.nanmedian(contents.properties["area"]) < _TINY
    least = _MIN_COSINE_OF_TINY if is_tiny else _MIN_COSINE
    small = torch.from_numpy(np.stack([contents.pictures[i] for i in ids]))
    for start in range(0, len(ids), _BLOCK):
        products = small[start : start + _BLOCK] @ small[start:].T
        for one, other in (products >= least).nonzero().tolist():
            if one < other:
                yield ids[start + one], ids[start + other]


def _find_equal_texts(contents: Contents) -> Iterator[tuple[int, int]]:
    """Pairs of texts with the same words in the same order, whatever their case and punctuation."""
    first: dict[str, int] = {}
    for i, text in contents.texts.items():
        words = " ".join(re.findall(r"\w+", text.casefold()))
        if words and (lead := first.setdefault(words, i)) != i:
            yield lead, i


def _find_close_vectors(contents: Contents) -> Iterator[tuple[int, int]]:
    """Pairs of vectors that are much closer than neighbours usually are. Tokens are compared place by place."""
    ids, found = list(contents.vectors), list(contents.vectors.values())
    if len({vector.shape for vector in found}) != 1 or len(found[0]) < _LEAST_ENTRIES:
        return
    vectors = torch.from_numpy(np.nan_to_num(np.stack(found).astype(np.float32)))
    if len(ids) ** 2 * vectors.shape[1] > _MAX_WORK:
        return
    is_tokens = found[0].dtype.kind != "f"
    vectors = vectors if is_tokens else vectors / vectors.std(0).clamp(min=1e-12)

    def measure(places: torch.Tensor) -> torch.Tensor:
        exact = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(vectors[places], vectors, p=0.0 if is_tokens else 2.0, compute_mode=exact)
        return distances.scatter(1, places[:, None], torch.inf)  # to itself

    nearest = torch.cat([measure(part).min(1).values for part in torch.arange(len(ids)).split(_BLOCK)])
    limit = _MAX_RATIO * float(nearest.median())
    for part in (nearest <= limit).nonzero().flatten().split(_BLOCK):
        for one, other in (measure(part) <= limit).nonzero().tolist():
            yield ids[int(part[one])], ids[other]


def _join(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Groups of examples that pairs connect, largest first."""
    parents: dict[int, int] = {}

    def find(i: int) -> int:
        while parents.setdefault(i, i) != i:
            parents[i] = i = parents[parents[i]]
        return i

    for one, other in pairs:
        low, high = sorted((find(one), find(other)))
        parents[high] = low
    groups: dict[int, list[int]] = {}
    for i in sorted(parents):
        groups.setdefault(find(i), []).append(i)
    return sorted(groups.values(), key=len, reverse=True)
