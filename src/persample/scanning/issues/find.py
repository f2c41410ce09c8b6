"""Find the issues of all families."""

from __future__ import annotations

from persample.scanning.issues import gradients
from persample.scanning.issues.base import Issue, flag
from persample.scanning.results import Scan
from persample.scanning.source import Source

_OF_SCANS = (gradients.find_label_issues, gradients.find_gradient_issues, gradients.find_data_value)


def find_issues(scan: Scan, source: Source | None = None) -> dict[str, Issue]:
    """The issues of the scanned data by name."""
    found = [issue for find in _OF_SCANS for issue in find(scan)]
    if scan.skipped:
        found.append(flag("broken", len(scan), scan.skipped, reasons=scan.skipped))
    return {issue.name: issue for issue in found}
