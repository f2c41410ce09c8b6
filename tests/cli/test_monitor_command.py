"""`persample monitor` draws a run, and says what is wrong with a file that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import persample
from persample.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "my_run.jsonl"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with persample.monitor(model, every=1, out=path, bounds=[1.0]) as watching:
        for i in range(12):
            watching.ids = [f"<b>{i}.{n}</b>" for n in range(5)]
            model(torch.randn(5, 4)).square().mean().backward()
    return path


def test_the_page_shows_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(run)]) == 0
    page = run.with_suffix(".html")
    assert capsys.readouterr().out == f"page: {page}\n"
    html = page.read_text()
    for text in ("Noise scale", "Gradient norms of single samples", "Share of clipped samples", "Median norm by layer"):
        assert text in html
    assert "<b>" not in html and "&lt;b&gt;" in html and "<script" not in html and "://" not in html


def test_the_answer_is_available_as_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(run), "--json", "--out", str(tmp_path / "a.html"), "--title", "A <run>"]) == 0
    assert json.loads(capsys.readouterr().out)["last"]["samples"] == 5
    assert "A &lt;run&gt;" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "There is no file"),
        ("", "was not written by persample.monitor"),
        ('{"a": 1}\n', "was not written by persample.monitor"),
        ('{"persample": "0.1", "layers": {}}\n', "has no measured step yet"),
        ('{"persample": "0.1"}\nnonsense\n{}\n', "Line 2 of"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["monitor", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_line_that_is_being_written_is_left_out(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(run.read_text() + '{"step": 12, "samp')
    assert main(["monitor", str(path)]) == 0
