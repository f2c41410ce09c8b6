"""Run the notebooks of the examples and save them with their outputs: `python tools/run_notebooks.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def run_notebook(path: Path, folder: str) -> nbformat.NotebookNode:
    """Run all cells in a new kernel, with `folder` as the working directory; an error of a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of the run
        if cell.cell_type == "code":  # warnings contain paths of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    for path in NOTEBOOKS:
        nbformat.write(run_notebook(path, str(path.parent)), path)
        print(f"{path.name} has run")


if __name__ == "__main__":
    sys.exit(main())
