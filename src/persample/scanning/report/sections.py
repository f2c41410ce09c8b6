"""The sections of a report beside its charts: table of suspects, confusions of classes, details."""

from __future__ import annotations

import math
from collections import Counter
from textwrap import shorten
from typing import Any

import numpy as np

from persample._internal.text import format_count, format_list
from persample.scanning.examples import find_worst_output, format_probability, say_opinion
from persample.scanning.report.page import Page
from persample.scanning.report.reasons import Reasons
from persample.scanning.report.similar import find_similar
from persample.scanning.report.wording import format_number, get_meaning, get_title

_TABLE_COLUMNS = ("loss", "mean_loss", "norm", "self_influence", "estimated_alignment", "alignment")
_MAX_CLASSES_IN_CONFUSION, _MAX_PAIRS = 12, 12
_COMPARED = ("loss", "confident", "el2n", "normalised_self_influence", "whitened_self_influence")  # rankings
_MIN_AGREED = 0.8  # of the first examples, of all rankings
_MIN_SHARED = 0.5  # of the first examples; below, rankings disagree
_MAX_REASON = 300  # characters
_MASKS = (
    "The given mask, the mask that the model predicts, and the pixels where they differ, over the image. Class 0 has "
    "no colour. Pixels that the loss ignores do not count."
)


def list_columns(page: Page) -> list[dict[str, str]]:
    """The measured columns of the table, including the one that suspects are ranked by."""
    names = [name for name in _TABLE_COLUMNS if name in page.columns]
    names += [page.by] if page.by and page.by not in names else []
    return [{"name": name, "title": get_title(name), "meaning": get_meaning(name)} for name in names]


def make_rows(page: Page) -> list[dict[str, Any]]:
    """The rows of the table of suspects."""
    opinions = {i: say_opinion(page.descriptions[i]) for i in page.listed}
    reasons = Reasons(page.columns, page.by, page.scores, opinions) if page.by else None
    names = [column["name"] for column in list_columns(page)]
    values = {name: page.columns.get(name, page.scores) for name in names}
    similar = find_similar(page.scan, page.listed)
    return [
        {
            "rank": rank,
            "id": i,
            "name": page.descriptions[i].get("name"),
            "label": page.get_class(i),
            "model": _format_prediction(page.descriptions[i]),
            "suggested": page.descriptions[i].get("suggested"),
            "values": [(_format_sort_key(values[n][i]), format_number(values[n][i])) for n in names],
            "why": reasons.find(i) if reasons else [],
            "note": page.notes.get(i, ""),
            "preview": page.previews.get(i),
            "is_suspect": rank <= page.cut,
            "similar": [_describe_similar(page, *one) for one in similar.get(i, [])],
        }
        for rank, i in enumerate(page.listed, 1)
    ]


def _describe_similar(page: Page, i: int, cosine: float, is_duplicate: bool) -> dict[str, Any]:
    """An example with a similar gradient: id, class, cosine, preview."""
    return {
        "id": i,
        "label": label["name"] if (label := page.get_class(i)) else "",
        "cosine": f"{cosine:.2f}",
        "is_duplicate": is_duplicate,
        "preview": page.previews.get(i),
        "is_listed": i in page.descriptions,
    }


def count_confusions(page: Page) -> dict[str, Any] | None:
    """How often the model says each class for each given class, and the most frequent differences."""
    if page.labels is None or "predicted" not in page.scan.columns:
        return None
    predicted = page.scan.column("predicted")
    is_known = (predicted >= 0) & (page.labels >= 0)
    given, said = page.labels[is_known], predicted[is_known]
    classes = np.union1d(given, said)
    if len(classes) < 2:
        return None
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (np.searchsorted(classes, given), np.searchsorted(classes, said)), 1)
    names = [page.get_class_name(int(label)) for label in classes]
    totals = counts.sum(1)
    pairs = [
        {
            "given": names[i],
            "said": names[j],
            "count": int(counts[i, j]),
            "share": f"{counts[i, j] / totals[i]:.0%}",
        }
        for i, j in zip(*np.nonzero(counts), strict=True)
        if i != j
    ]
    pairs.sort(key=lambda pair: -pair["count"])
    table = [
        (name, [(int(n), f"{100 * n / max(1, total):.0f}", i == j) for j, n in enumerate(row)])
        for i, (name, row, total) in enumerate(zip(names, counts, totals, strict=True))
    ]
    return {
        "names": names,
        "rows": table if len(names) <= _MAX_CLASSES_IN_CONFUSION else [],
        "pairs": pairs[:_MAX_PAIRS],
        "differences": int(counts.sum() - np.trace(counts)),
    }


def say_estimate(page: Page) -> str:
    """A sentence on how many labels are estimated to be wrong, or how many examples stand out."""
    found = page.scan.estimate_wrong_labels()
    if not found:
        count = format_count(page.cut, "example")
        return f"{count} {'lies' if page.cut == 1 else 'lie'} far above all others." if page.by else ""
    noun = "label is" if found.count == 1 else "labels are"
    text = f"About {found.count:,} {noun} estimated to be wrong ({found.low:,} to {found.high:,})."
    if found.count == 0:
        text = f"No label is estimated to be wrong (at most {found.high:,})."
    return f"{text} {found.warning}".strip()


def compare_rankings(page: Page) -> list[str]:
    """Sentences on rankings that share less than half of their first examples with this one, or on their agreement."""
    if page.by != page.scan.default_ranking or page.by is None or not np.isfinite(page.scan.column(page.by)).any():
        return []
    k, by = max(1, page.cut, len(page.scan) // 100), get_title(page.by).lower()
    shares = {name: share for name, share in page.scan.compare_rankings(k).items() if name in _COMPARED}
    if shares and min(shares.values()) >= _MIN_AGREED:
        least, others = f"{min(shares.values()):.0%}", format_list([get_title(name).lower() for name in shares])
        text = f"Rankings agree: at least {least} of the first {k:,} examples by {by} are also first by {others}."
        return [f"{text} For a task as easy as this one, no ranking is better than the loss."]
    return [
        f"Rankings disagree: of the first {k} examples by {by}, only {round(share * k)} are among the first {k} by "
        f"{get_title(name).lower()}. Look at both."
        for name, share in shares.items()
        if share < _MIN_SHARED
    ]


def say_noted(page: Page) -> str:
    """A sentence on how many of the examples with notes are suspects; empty without notes."""
    if not page.notes:
        return ""
    count = len(set(page.listed) & set(page.notes))
    return f"Examples with a note among them: {count:,} of {len(page.notes):,}."


def describe_marks(page: Page) -> dict[str, Any] | None:
    """The kinds of marks in the listed texts, and why a kind is missing in some; None without kinds."""
    listed = [page.previews[i] for i in page.listed if i in page.previews]
    kinds = list(dict.fromkeys(kind for preview in listed for kind in preview.kinds if kind))
    reasons = Counter(preview.reason for preview in listed if preview.reason)
    if not kinds and not reasons:
        return None
    described = [{"name": kind, "title": get_title(kind), "meaning": get_meaning(kind)} for kind in kinds]
    reason = shorten(reasons.most_common(1)[0][0], _MAX_REASON, placeholder=" …") if reasons else ""
    return {"kinds": described, "reason": reason, "without": reasons.total()}


def make_cards(page: Page, noise: dict[str, Any] | None) -> list[dict[str, str]]:
    """The figures of the details."""
    quantiles, cards = page.scan.summary["columns"], []
    if loss := quantiles.get("loss"):
        text = f"The median is {format_number(loss['median'])}; 99 % are below {format_number(loss['99%'])}."
        cards.append({"name": "Mean loss", "value": format_number(loss["mean"]), "text": text})
    if norm := quantiles.get("norm"):
        text = f"99 % are below {format_number(norm['99%'])}"
        text += f", {format_number(norm['99%'] / norm['median'])} times the median." if norm["median"] else "."
        cards.append({"name": "Median gradient norm", "value": format_number(norm["median"]), "text": text})
    if noise:
        text = f"{noise['advice']} {noise['meaning']}"
        cards.append({"name": "Noise scale", "value": noise["scale"], "text": text})
    if len(page.classes) > 1:
        counts = [one["count"] for one in page.classes]
        least = "" if min(counts) == max(counts) else f"{min(counts):,} to "
        text = f"Each has {least}{format_count(max(counts), 'example')}."
        cards.append({"name": "Classes", "value": f"{len(counts):,}", "text": text})
    if count := _count_not_finite(page):
        ids = page.scan.summary["not_finite"]
        shown = format_list(ids[:8]) + (f" and {count - 8:,} more" if count > 8 else "")
        noun = "example" if count == 1 else "examples"
        text = f"A measured value is not finite for {noun} {shown}."
        cards.append({"name": "Not finite", "value": f"{count:,}", "text": text, "kind": "warning"})
    return cards


def _count_not_finite(page: Page) -> int:
    """The number of examples with a value that is not finite."""
    is_finite = [np.isfinite(np.delete(column, list(page.scan.skipped))) for column in page.columns.values()]
    return int((~np.all(is_finite, axis=0)).sum()) if is_finite else 0


def list_meanings(page: Page, marks: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Title and meaning of each column."""
    meanings = [(get_title(name), get_meaning(name)) for name in page.columns if not name.startswith("norm/")]
    if any(name.startswith("norm/") for name in page.columns):
        text = "The gradient norm of each module. The squares of these norms add up to the square of the whole norm."
        meanings.append(("Layers", text))
    if any(preview.kind == "panels" for preview in page.previews.values()):
        meanings.append(("Masks", _MASKS))
    kinds = marks["kinds"] if marks else []
    meanings += [(f"Tokens by {kind['title'].lower()}", kind["meaning"]) for kind in kinds]
    return meanings


def _format_prediction(example: dict[str, Any]) -> str:
    """The prediction of the model, with its probability."""
    if example.get("predicted") is not None:
        return f"{example['predicted']} ({format_probability(example['probability'])})"
    if "prediction" in example:
        where, prediction, target = find_worst_output(example)
        return f"{where}{format_number(prediction)} (target {format_number(target)})"
    return ""


def _format_sort_key(value: Any) -> str:
    return repr(float(value)) if math.isfinite(value) else ""
