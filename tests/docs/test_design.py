"""docs/design.md names the packages and modules that exist."""

from __future__ import annotations

import re
import tomllib

from tests.support.paths import ROOT

PAGE = (ROOT / "docs/design.md").read_text()
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


def test_modules_that_the_page_names_exist() -> None:
    for name in set(re.findall(r"\b[\w]+(?:/[\w]+)*/[\w]+\.py\b", PAGE)):
        assert (SOURCE / name).is_file() or (ROOT / name).is_file(), name
