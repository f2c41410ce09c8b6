"""The comparison of attribution methods: its tables in the docs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attribution import read_kept
from benchmarks.attribution_tables import format_auc, format_lds, format_seconds
from benchmarks.output import RESULTS


@pytest.mark.parametrize("format_table", [format_lds, format_seconds, format_auc])
def test_tables_in_the_docs_are_those_of_the_results(format_table: Callable[[Any], str]) -> None:
    tasks = json.loads((RESULTS / "attribution.json").read_text())["tasks"]
    docs = (Path(__file__).parents[2] / "docs" / "internals" / "scan_evidence.md").read_text()
    assert format_table(tasks) in docs, "python -m benchmarks.attribution_tables prints the tables"


def test_a_run_goes_on_behind_the_tasks_that_were_kept(tmp_path: Path) -> None:
    settings = {"machine": {"date": "today"}, "subsets": 12}
    file = tmp_path / "kept.json"
    assert read_kept(None, settings) == {} == read_kept(file, settings)
    file.write_text(
        json.dumps({"machine": {"date": "yesterday"}, "subsets": 12, "tasks": {"images": {"ceiling": 0.7}}})
    )
    assert read_kept(file, settings) == {"images": {"ceiling": 0.7}}
    with pytest.raises(SystemExit, match="other settings"):
        read_kept(file, {**settings, "subsets": 32})
