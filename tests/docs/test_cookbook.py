"""The scripts of the cookbook are short, are listed in the docs, and find what was planted in their data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_examples import load_example
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus and transformers

SCRIPTS = sorted((ROOT / "examples/cookbook").glob("*.py"))
COMMAND_LINE = {"audit_training"}  # tests/cli runs it

# What a script prints, and the range of the number in it.
FINDINGS: dict[str, tuple[str, float, float]] = {
    "wrong_labels": (r"of the first 30, (\d+) are wrong", 24, 30),
    "clean_preferences": (r"longest gradients, (\d+) are swapped", 28, 40),
    "behind_answer": (r"is \.\.\. city3\n +(\S+)  the capital of land3 is city3\n", 0, 1e9),
    "user_influence": (r"^user +(\d+): value +-", 7, 7),
    "batch_size": (r"after 10 epochs the noise scale is (\d+)", 50, 2000),
    "clip_by_group": (r"accuracy on the training data (\d+\.\d)%", 80, 100),
    "rollouts": (r"filter True +reward +(-?\d+\.\d+)", -0.4, 0),
    "private_bitfit": (r"after training (\d+\.\d)%", 75, 100),
    "private_dpo": (r"gained in (\d+\.\d)% of the pairs", 85, 100),
    "private_sft": (r"after training (\d+\.\d+);", 0, 0.5),
    "private_lora": (r"epsilon (\d+\.\d+)", 6, 8),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_script_finds_what_was_planted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_example(f"cookbook/{name}")
    script.main()
    pattern, low, high = FINDINGS[name]
    found = re.search(pattern, capsys.readouterr().out, re.M)
    assert found is not None and low <= float(found[1]) <= high


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_is_short_and_listed(script: Path) -> None:
    assert script.read_text().count("\n") <= 60
    assert f"| `{script.name}` |" in (ROOT / "docs/cookbook.md").read_text()


def test_every_script_is_tested() -> None:
    assert {script.stem for script in SCRIPTS} == FINDINGS.keys() | COMMAND_LINE
