"""All that is wrong with data, as types of issues with flags and scores. Each family has its own module."""

from __future__ import annotations

from persample.scanning.issues import gradients, whole
from persample.scanning.issues.base import Issue, Issues, flag
from persample.scanning.issues.contents import measure_contents
from persample.scanning.issues.duplicates import merge_duplicates
from persample.scanning.issues.inputs import find_input_issues
from persample.scanning.results import Scan
from persample.scanning.source import Source

__all__ = ["Issue", "Issues", "find_issues"]

_OF_GRADIENTS = (gradients.find_label_issues, gradients.find_gradient_issues, gradients.find_data_value)


def find_issues(scan: Scan, source: Source | None = None) -> Issues:
    """The issues of the scanned data by name. With the data, it is read once for the issues of inputs."""
    size = len(scan)
    contents = None if source is None or source.size is None else measure_contents(source, size)
    found = {issue.name: issue for find in _OF_GRADIENTS for issue in find(scan)}
    for issue in merge_duplicates(size, found.get("near_duplicate"), contents):
        found[issue.name] = issue
    issues = [issue for find in whole.FAMILIES for issue in find(scan, contents)]
    issues += list(find_input_issues(contents)) if contents else []
    if scan.skipped:
        issues.append(flag("broken", size, scan.skipped, reasons=scan.skipped))
    return Issues(found | {issue.name: issue for issue in issues})
