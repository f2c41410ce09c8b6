"""Each everyday loop is right through its front ends, or refused for a reason in mathematics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.everyday.front_ends import check
from tests.everyday.loop import Loop
from tests.everyday.table import LOOPS, PAGE, make_page
from tests.everyday.waiting import WAITING

CASES = [(loop, front_end) for loop in LOOPS for front_end in loop.front_ends]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("loop, front_end", CASES, ids=str)
def test_loop(loop: Loop, front_end: str, tmp_path: Path) -> None:
    if topic := WAITING.get((str(loop), front_end)):
        pytest.skip(f"waits for {topic}")
    check(loop, front_end, tmp_path)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == make_page(), "run: python -m tests.everyday --write"


def test_names_are_unique() -> None:
    names = [str(loop) for loop in LOOPS]
    assert len(names) == len({*names})
