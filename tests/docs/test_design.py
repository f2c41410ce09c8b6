"""The map of the project and its pages name packages and modules that exist, and the map stays short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

PATH = ROOT / "docs/design.md"
PAGE = PATH.read_text()
MOST_MODULES = 66  # on the path of a warm step; may only become smaller
SOURCE = ROOT / "src/persample"


def read_picture(heading: str) -> str:
    """The first block of code under a heading."""
    return PAGE.split(f"## {heading}")[1].split("```")[1]


def test_picture_shows_the_packages_from_top_to_bottom() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    lines = read_picture("The packages").splitlines()
    places = []
    for layer in layers:
        names = [name.strip().removeprefix("persample.") for name in layer.split("|")]
        (place,) = {i for i, line in enumerate(lines) if set(names) <= set(line.split())}
        places.append(place)
    assert places == sorted(places)


def test_path_is_the_one_of_a_warm_step() -> None:
    """In a process of its own, which no other test has warmed up."""
    command = [sys.executable, str(ROOT / "tools/record_path.py")]
    path = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert path in PAGE, "run: python tools/record_path.py --write"
    assert len(re.findall(r"\.py ", path)) - 1 <= MOST_MODULES, "a warm step runs through more modules than before"


STATE = {"WeakKeyDictionary", "WeakSet", "ContextVar", "Lock", "RLock", "Memo", "deque", "set", "dict", "list"}
CORE = "forward backward recording layouts rules terms gradients distributed compiled _internal _torch batches".split()


def find_state() -> Iterator[tuple[str, str]]:
    """The variables of modules of the core that hold something that can change: module and name."""
    for file in [*(file for package in CORE for file in (SOURCE / package).rglob("*.py")), *SOURCE.glob("*.py")]:
        body = ast.parse(file.read_text()).body
        local = {
            node.name for node in body if isinstance(node, ast.ClassDef)
            and "threading.local" in map(ast.unparse, node.bases)
        }  # fmt: skip
        for node in body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            made = {
                call.func.id for call in ast.walk(node.value) if isinstance(call, ast.Call) and hasattr(call.func, "id")
            }
            is_empty = isinstance(node.value, (ast.Dict, ast.List)) and not ast.unparse(node.value)[1:-1]
            (target,) = node.targets if isinstance(node, ast.Assign) else [node.target]
            if is_empty or (made & (STATE | local) and not isinstance(node.value, (ast.Tuple, ast.Set))):
                yield str(file.relative_to(SOURCE)), ast.unparse(target)


def test_state_that_outlives_a_recording_is_listed() -> None:
    table = PAGE.split("## State that outlives a recording")[1].split("\n\n")[1]
    listed = {
        (module, name)
        for module, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", table)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == set(find_state())


def test_map_is_short() -> None:
    assert len(PAGE.split()) <= 3000


@pytest.mark.parametrize("page", [PATH, *sorted((ROOT / "docs/internals").glob("*.md"))], ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    for name in set(re.findall(r"\b[\w]+(?:/[\w]+)*/[\w]+\.py\b", page.read_text())):
        assert (SOURCE / name).is_file() or (ROOT / name).is_file(), name
