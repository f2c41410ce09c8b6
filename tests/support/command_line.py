"""The command line, as a user types it."""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def run_command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `persample` with these arguments in a process of its own."""
    return subprocess.run([sys.executable, "-m", "persample", *arguments], cwd=cwd, capture_output=True, text=True)
