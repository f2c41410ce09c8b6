"""Install the wheel in dist/ into new environments, and run what the README shows: `python tools/check_package.py`.

The first environment has the core alone: the first block of the README runs, and names of missing extras say which
extra they need. The second has the extras of the README: all its Python blocks and the command line run. torch is
installed first, by its exact version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

MISSING_EXTRAS = """
import persample
assert hasattr(persample, "scan") and "scan" in dir(persample)
for use in ("persample.scan(None, None, None)", "import persample.private"):
    try:
        exec(use)
    except ImportError as error:
        assert "pip install 'persample[" in str(error), error
    else:
        raise AssertionError(f"{use} did not ask for an extra")
"""


def main() -> None:
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in dist/, found {len(wheels)}: run make package")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        core = _make_environment(Path(folder) / "core", str(wheels[0]))
        _run(core, blocks[0], folder)
        _run(core, MISSING_EXTRAS, folder)
        print("core: the first block of the README runs, missing extras are named")
        extras = _make_environment(Path(folder) / "extras", f"{wheels[0]}[scan,private]")
        _run(extras, "\n".join(blocks), folder)
        for arguments in (["monitor", "run.jsonl"], ["query", "scan", "top", "--by", "loss"], ["report", "scan"]):
            subprocess.run([extras.parent / "persample", *arguments], cwd=folder, check=True)
        print("extras: all blocks of the README run")


def _make_environment(folder: Path, requirement: str) -> Path:
    """A new environment with torch and the requirement; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    torch = re.search(r"^torch==.*$", CONSTRAINTS.read_text(), re.M)
    assert torch is not None
    for package in (torch[0], requirement):
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, package], check=True)
    return python


def _run(python: Path, code: str, folder: str) -> None:
    subprocess.run([python, "-W", "ignore", "-c", code], cwd=folder, check=True)


if __name__ == "__main__":
    main()
