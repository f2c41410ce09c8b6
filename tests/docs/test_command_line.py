"""The page of the command line describes every command, and the help of every command has an example."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from persample.cli import commands
from persample.cli.commands import COMMANDS, INTERRUPTED, load_command, main
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/reference/cli.md").read_text()
ALL = "all"


def read_rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading, by row."""
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table]


def test_table_lists_the_commands_in_their_order() -> None:
    assert [row[0].strip("`").split()[1] for row in read_rows("command")] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert re.search(rf"^    \$ persample {name}\b", text, re.MULTILINE)
    assert "--json" in text and "--debug" in text and "\nexit codes:\n  0 " in text


def test_table_lists_the_exit_codes_of_every_command() -> None:
    listed = {int(code): set(re.findall(r"`([\w-]+)`", names)) or names for code, _, names in read_rows("code")}
    general = {0, 2, INTERRUPTED, commands.BROKEN_PIPE}
    assert {code for code, names in listed.items() if names == ALL} == general
    found: dict[int, set[str]] = {}
    for name in COMMANDS:
        for code in set(load_command(name).exit_codes) - general:
            found.setdefault(code, set()).add(name)
    assert {code: names for code, names in listed.items() if code not in general} == found


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_general_options_do_not_wait_for_torch(option: str) -> None:
    code = f"""
import sys
from persample.cli import main
try:
    main(["{option}"])
finally:
    assert not {{"torch", "numpy"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(("usage: persample", "persample ")), done.stderr
