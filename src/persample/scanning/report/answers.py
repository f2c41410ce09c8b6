"""The first screen of a report: what is wrong with the data, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from persample._internal.text import format_count
from persample.scanning.estimates import NoEstimate
from persample.scanning.issues import Issue
from persample.scanning.report.page import Page

# Title and meaning of the issues that have a card of their own if they were looked for, also without any found.
_ALWAYS = {
    "near_duplicate": ("Duplicates", "examples that are copies or near copies of others, in {groups}."),
    "outlier": ("Outliers", "examples unlike all others, by the direction of their gradient."),
}


def list_answers(page: Page, confusion: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The cards of the first screen: name, value, text and, if there is a section about it, its id."""
    return [_answer_labels(page), *_answer_issues(page), *_answer_classes(confusion)]


def _answer_labels(page: Page) -> dict[str, str]:
    found, size = page.scan.estimate_wrong_labels(), len(page.scan) - len(page.scan.skipped)
    if isinstance(found, NoEstimate):
        text = f"of {format_count(size, 'example')} lie far above all others. No number of wrong labels: {found.reason}"
        return _make_card("Examples that stand out", page.cut, text if page.by else found.reason, "triage")
    text = f"{found.low:,} to {found.high:,} of {format_count(size, 'label')} (95 %). {found.warning}"
    name = "Labels that look wrong"
    return _make_card(name, found.count, text.strip(), "triage", "about " if found.count else "")


def _answer_issues(page: Page) -> Iterator[dict[str, str]]:
    for name, (title, text) in _ALWAYS.items():
        if (issue := page.issues.get(name)) is not None:
            groups = format_count(len(issue.info.get("groups", ())), "group")
            text = text.format(groups=groups) if issue.count else "No example was found."
            yield _make_card(title, issue.count, text, "issues")
    broken = page.scan.skipped
    text = "could not be read or scanned, and were skipped." if broken else "All examples were read and scanned."
    yield _make_card("Broken examples", len(broken), text, "issues")


def _answer_classes(confusion: Mapping[str, Any] | None) -> Iterator[dict[str, str]]:
    if confusion is None:
        return
    pairs = [f"{pair['given']} → {pair['said']}" for pair in confusion["pairs"]]
    counts = [f"{pair['count']:,}" for pair in confusion["pairs"]]
    more = "; ".join(map(": ".join, zip(pairs[1:4], counts[1:4], strict=True)))
    text = f"{counts[0]} of these labels, most of all pairs. {more}".strip() if pairs else "The model agrees with all."
    kind = "found" if pairs else ""
    value = pairs[0] if pairs else "0"
    yield {"name": "Confused classes", "value": value, "text": text, "section": "confusion", "kind": kind}


def _make_card(name: str, count: int, text: str, section: str = "", prefix: str = "") -> dict[str, str]:
    section = section if count else ""
    kind = "found" if count else ""
    return {"name": name, "value": f"{prefix}{count:,}", "text": text, "section": section, "kind": kind}


def list_issues(page: Page) -> list[dict[str, Any]]:
    """The issues that were found, most examples first: title, number, score, worst examples with names."""
    found = sorted((issue for issue in page.issues.values() if issue.count), key=lambda issue: -issue.count)
    return [_describe_issue(page, issue) for issue in found]


def _describe_issue(page: Page, issue: Issue) -> dict[str, Any]:
    groups = issue.info.get("groups")
    shown = [" = ".join(map(str, group[:6])) for group in groups[:8]] if groups else _name_worst(page, issue)
    title, text = issue.name.replace("_", " ").capitalize(), issue.info.get("text", "")
    return {"title": title, "count": issue.count, "score": f"{issue.score:.2f}", "worst": shown, "text": text}


def _name_worst(page: Page, issue: Issue) -> list[str]:
    worst = issue.worst[:8]
    reasons = issue.info.get("reasons", {})
    known = zip(worst, page.scan.describe(worst), strict=True)
    return [" ".join(filter(None, [str(i), example.get("name"), reasons.get(i)])) for i, example in known]


def list_steps(page: Page, origin: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What to do next, with the command to copy. `origin` has the arguments of the command of the scan."""
    where, origin = shlex.quote(str(page.scan.store.address)), origin or {}
    steps = [
        ("Decide about the suspects below, or in a page that keeps the decisions:", f"persample review {where}"),
        ("Or fill in a table:", f"persample export {where} --suspects fixes.csv"),
    ]
    if origin.get("images"):
        folder = shlex.quote(origin["images"].rstrip("/"))
        fixed = shlex.quote(f"{origin['images'].rstrip('/')}-fixed")
        steps.append(("Copy the data with the fixes:", f"persample apply fixes.csv --images {folder} --out {fixed}"))
    elif table := origin.get("text") or origin.get("table"):
        stem, dot, suffix = table.rpartition(".")
        column = origin.get("target_column") or origin.get("label")
        label = f" --label {shlex.quote(column)}" if column else ""
        out = shlex.quote(f"{stem}-fixed{dot}{suffix}")
        command = f"persample apply fixes.csv --text {shlex.quote(table)}{label} --out {out}"
        steps.append(("Copy the data with the fixes:", command))
    return steps if page.suspects else []
