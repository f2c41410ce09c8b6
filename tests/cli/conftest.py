import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def restore_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each test in a new directory, and restore the imports afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("models", "broken", "exits", "inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
