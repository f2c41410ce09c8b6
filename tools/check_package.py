"""Install the wheel in dist/ into new environments, and run what the README shows: `python tools/check_package.py`.

The first environment has the core alone: the first block of the README runs, and names of missing extras say which
extra they need. The second has the extras of the README: all its Python blocks and the command line run. torch is
installed first, by its exact version: that of `constraints.txt`, or with `--torch 2.15.0` another one, which must stay.
"""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pinned = re.search(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.M)
    assert pinned is not None
    parser.add_argument(
        "--torch", default=pinned[1], metavar="VERSION", help=f"version of torch (default: {pinned[1]})"
    )
    torch = parser.parse_args().torch
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in dist/, found {len(wheels)}: run make package")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        core = _make_environment(Path(folder) / "core", torch, str(wheels[0]))
        _run(core, blocks[0], folder)
        _run(core, MISSING_EXTRAS, folder)
        print("core: the first block of the README runs, missing extras are named")
        extras = _make_environment(Path(folder) / "extras", torch, f"{wheels[0]}[scan,private]")
        _run(extras, "\n".join(blocks), folder)
        for arguments in (["query", "scan", "top", "--by", "loss"], ["report", "scan"]):
            subprocess.run([extras.parent / "persample", *arguments], cwd=folder, check=True)
        print("extras: all blocks of the README run")


def _make_environment(folder: Path, torch: str, requirement: str) -> Path:
    """A new environment with torch and the requirement; returns its Python. The requirement must not change torch."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text(re.sub(r"^torch==.*\n", "", CONSTRAINTS.read_text(), flags=re.M))
    for package in (f"torch=={torch}", requirement):
        install = [python, "-m", "pip", "install", "-q", "-c", constraints, package]
        subprocess.run(install, check=True)
    _run(
        python, f"import torch; assert torch.__version__.partition('+')[0] == '{torch}', torch.__version__", str(folder)
    )
    return python


def _run(python: Path, code: str, folder: str) -> None:
    subprocess.run([python, "-W", "ignore", "-c", code], cwd=folder, check=True)


if __name__ == "__main__":
    main()
