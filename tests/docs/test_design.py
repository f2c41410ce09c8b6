"""The map of the project and its pages name packages and modules that exist, and the map stays short."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

PATH = ROOT / "docs/design.md"
PAGE = PATH.read_text()
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


def test_path_counts_its_modules() -> None:
    (count,) = re.findall(r"These (\d+) modules", PAGE)
    modules = re.findall(r"[\w/]+\.py\b", read_picture("The path of `record` and `clip`"))
    assert int(count) == len(modules) == len(set(modules))


def test_map_is_short() -> None:
    assert len(PAGE.split()) <= 3000


@pytest.mark.parametrize("page", [PATH, *sorted((ROOT / "docs/internals").glob("*.md"))], ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    for name in set(re.findall(r"\b[\w]+(?:/[\w]+)*/[\w]+\.py\b", page.read_text())):
        assert (SOURCE / name).is_file() or (ROOT / name).is_file(), name
