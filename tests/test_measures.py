"""`tools/measures.py` on a small package, and on persample itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ruff")

from tools import measures

pytestmark = pytest.mark.quick

ENGINE = '''
from typing import Any
from persample import record
from persample._internal.tree import visit
from persample.engine.other import own
from persample.rules import register_rule
from persample.rules.linear import linear


def long(x):
    """Lines of a docstring
    are not counted."""
{long}


def short(x):
    """A docstring.
{docstring}
    """
    return x


def branches(x):
{branches}


class Tracker:
    kind: str = "class"

    def __init__(self):
{attributes}


class Audit:
    kind: str = "class"

    def __init__(self, tracker: Any, batch: Any, other: int):
        self.audit: Any = tracker
        tracker.other_object = other
{own}


class Methods:
{methods}


@dataclass(frozen=True)
class Options:
{fields}
'''


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, measures.Measures]:
    source = tmp_path_factory.mktemp("persample")
    (source / "engine").mkdir()
    (source / "engine" / "tracker.py").write_text(
        ENGINE.format(
            long="    x += 1\n" * 40,
            docstring="    More.\n" * 40,
            branches="    if x:\n        x = 1\n" * 12,
            attributes="".join(f"        self.a{i} = {i}\n" for i in range(15)),
            own="".join(f"        self.b{i} = {i}\n" for i in range(13)),
            fields="".join(f"    field{i}: int\n" for i in range(16)),
            methods="".join(f"    def m{i}(self):\n        pass\n" for i in range(26)),
        )
    )
    (source / "engine" / "other.py").write_text("own = 1\n" * 400)
    (source / "losses.py").write_text("from persample.engine.tracker import Tracker\n" + "own = 1\n" * 400)
    return measures.measure_packages(source)


def find_names(found: measures.Measures, fault: str) -> list[str]:
    return [place.split(" ", 1)[-1].split(":")[0] for place in found.places[fault]]


def test_sizes(measured: dict[str, measures.Measures]) -> None:
    assert list(measured) == ["engine", "losses"]
    assert (measured["engine"].files, measured["losses"].files, measured["losses"].lines) == (2, 1, 401)
    assert measured["engine"].functions == 3 + 2 + 26
    assert (measured["engine"] + measured["losses"]).files == 3


def test_faults(measured: dict[str, measures.Measures]) -> None:
    found = measured["engine"]
    assert find_names(found, "long functions") == ["long"]
    assert [place.split("`")[1] for place in found.places["complex functions"]] == ["branches"]
    assert find_names(found, "large classes") == ["Tracker", "Methods"]
    assert find_names(found, "deep imports") == ["persample.rules.linear"]
    assert sorted(find_names(found, "untyped")) == ["audit", "tracker"]
    assert find_names(measured["losses"], "deep imports") == ["persample.engine.tracker"]
    assert measured["losses"].places["long files"] == ["losses.py: 401 lines"]
    assert not found.places["long files"]


def test_the_totals_of_persample_have_limits(capsys: pytest.CaptureFixture[str]) -> None:
    measured = measures.measure_packages(measures.SOURCE)
    totals = measures.count_totals(measured)
    assert totals.keys() == measures.read_limits().keys()
    assert totals["engine lines"] > 1000
    measures.print_table(measured)
    measures.print_places(measured)
    printed = capsys.readouterr().out
    assert "forward " in printed and "all " in printed and "deep imports: " in printed


def test_limits_only_become_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "pyproject.toml"
    settings.write_text(measures.SETTINGS.read_text())
    monkeypatch.setattr(measures, "SETTINGS", settings)
    before = measures.read_limits()
    measures.tighten(before | {"untyped": before["untyped"] + 1, "long files": before["long files"] - 1})
    assert measures.read_limits() == before | {"long files": before["long files"] - 1}
