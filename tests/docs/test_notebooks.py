"""The notebooks of the examples run, and are stored with their outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tools.run_notebooks import NOTEBOOKS, run_notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = run_notebook(path, str(tmp_path))
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last.execution_count and last.outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_has_the_outputs_of_one_run(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 2  # imports print nothing


def test_there_are_two_notebooks() -> None:
    assert len(NOTEBOOKS) == 2
