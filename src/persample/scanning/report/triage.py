"""The examples to decide about, for the gallery of a page: grouped by given and suggested label."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from persample._internal.text import format_values
from persample.scanning.decisions import Decisions
from persample.scanning.examples import find_worst_output, format_probability
from persample.scanning.report.page import Page
from persample.scanning.report.previews import Preview
from persample.scanning.table import make_key


def make_gallery(page: Page, is_served: bool = False) -> dict[str, Any]:
    """What the script of the page needs: the suspects, most frequent pairs of labels first, and the classes.

    `key` names the scan, so that a browser keeps the decisions about each scan apart. `decisions` are those that are
    stored with the scan.
    """
    items = [_describe(page, i) for i in page.suspects]
    counts = Counter((item["given"], item["new"]) for item in items)
    items.sort(key=lambda item: (not item["new"], -counts[item["given"], item["new"]], item["given"], item["new"]))
    classes = [one["name"] for one in page.classes if one["label"] >= 0]
    known = page.scan.settings["classes"] or []
    key = f"{page.scan.settings['data']}-{len(page.scan)}-{page.scan.settings['loss']}"
    return {
        "key": key,
        "items": items,
        "classes": list(dict.fromkeys([*known, *classes])) if page.classes else [],
        "decisions": pack_decisions(Decisions(page.scan.store)),
        "served": is_served,
        "previews": is_served and page.source is not None,
    }


def _describe(page: Page, i: int) -> dict[str, Any]:
    example = page.descriptions[i]
    given, said = example.get("label") or "", example.get("suggested")
    if said is None and example.get("predicted") != example.get("label"):
        said = example.get("predicted")
    item: dict[str, Any] = {"id": i, "given": given, "new": said or ""}
    if name := example.get("name"):
        item |= {"name": name, "key": make_key(name)}
    item |= {"note": page.notes[i]} if i in page.notes else {}
    if said is not None:
        probability = "suggested_probability" if example.get("suggested") is not None else "probability"
        item["sure"] = format_probability(example.get(probability))
    elif "prediction" in example:
        where, prediction, target = find_worst_output(example)
        item["text"] = f"{where}target {format_values(target)}, model says {format_values(prediction)}"
    return item


def pack_decisions(decisions: Decisions) -> dict[str, Any]:
    """Stored decisions as JSON."""
    return {str(i): asdict(one) for i, one in decisions.read().items()}


def pack_preview(preview: Preview | None) -> dict[str, Any]:
    """A preview as JSON: its kind, and images or a text."""
    if preview is None:
        return {"kind": "nothing"}
    if preview.panels:
        panels = [[title, panel.content] for title, panel in preview.panels]
        return {"kind": "panels", "panels": panels, "content": preview.content}
    return {"kind": preview.kind, "content": preview.content, **({"tiny": True} if preview.tiny else {})}
