"""The files of a release agree with each other, and nothing keeps a newer torch or Python away."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from persample._version import __version__
from tests.support.paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = (ROOT / "recipe/meta.yaml").read_text()


def test_versions_agree() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert re.findall(r'set version = "(.*)"', RECIPE) == [__version__]


def test_torch_and_python_have_no_upper_bound() -> None:
    (dependency,) = PROJECT["dependencies"]
    lowest = re.fullmatch(r"torch>=(\d+\.\d+)", dependency)
    assert lowest and f"- pytorch >={lowest[1]}\n" in RECIPE
    python = PROJECT["requires-python"]
    assert re.fullmatch(r">=3\.\d+", python) and RECIPE.count(f"- python {python}\n") == 2


def test_the_recipe_has_the_bounds_of_the_extra() -> None:
    wanted = {requirement.replace(">=", " >=") for requirement in PROJECT["optional-dependencies"]["scan"]}
    found = re.split(r"run_constrained:|\ntest:", RECIPE)[1].replace("matplotlib-base", "matplotlib")
    assert set(re.findall(r"- (.+)", found)) == wanted


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_may_only_read_unless_they_say_so(path: Any) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and set(job.get("permissions", {})) <= {"id-token"}


def test_the_recipe_for_the_demo_needs_no_tools_for_tests() -> None:
    """`make demo` installs one extra, and `make test` adds the others."""
    make = (ROOT / "Makefile").read_text()
    assert "demo: $(DEMO_STAMP)\n" in make and "-e '.[demo]'" in make
    demo = PROJECT["optional-dependencies"]["demo"]
    assert {re.split(r"[>=]", name)[0] for name in demo} == {"persample[scan]", "scikit-learn"}
