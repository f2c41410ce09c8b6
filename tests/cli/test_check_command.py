"""`persample check`, and the errors that all commands share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from persample.cli import main
from persample.cli.user_code import UsageError
from tests.support.command_line import run_command
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

EXAMPLE = "examples/check_model.py"

MODELS = """
import random
import torch
from torch import nn

X, Y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)

def right():
    print("a line of the user's own")
    return nn.Linear(6, 3), (X, Y), nn.CrossEntropyLoss()

def sums():
    return nn.Linear(6, 3), (X, Y), nn.CrossEntropyLoss(reduction="sum")

def refused():
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), (X, Y), nn.CrossEntropyLoss()

def noisy():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))
    return Noisy(6, 3), (X, Y), nn.CrossEntropyLoss()

def time_first():
    return nn.LSTM(6, 3), torch.randn(5, 8, 6), lambda model, x: model(x)[0].square().mean()

def takes(model, size=3):
    return model

def raises():
    raise ValueError("of\\nseveral lines")

def leaves():
    raise SystemExit("no data")

def nothing():
    pass

def two():
    return nn.Linear(6, 3), (X, Y)

def no_model():
    return "model", (X, Y), nn.CrossEntropyLoss()

def no_loss():
    return nn.Linear(6, 3), (X, Y), None

def bad_shape():
    return nn.Linear(5, 3), (X, Y), nn.CrossEntropyLoss()

def vector():
    return nn.Linear(6, 3), (X, Y), nn.CrossEntropyLoss(reduction="none")

number = 3
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    (tmp_path / "broken.py").write_text("import torch\nimport no_such_module\n")
    (tmp_path / "inner.py").write_text("def f(:\n")
    (tmp_path / "data.txt").write_text("1 2 3\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(4)\n")
    return path


def test_example_of_the_help() -> None:
    done = run_command("check", f"{EXAMPLE}:language_model")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("RIGHT: the gradients of 4 of 64 samples")
    assert "embedding.weight" in done.stdout and "Rows + Outer" in done.stdout


def test_missing_function(models: Path) -> None:
    done = run_command("check", "models:missing", cwd=models.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("persample check: error: models has no function 'missing'; it has right, sums")
    assert done.stderr.count("\n") == 1


def test_exit_codes(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "models:right"]) == 0
    assert capsys.readouterr().out.startswith("a line of the user's own\nRIGHT: ")
    assert main(["check", "models:sums"]) == 0
    assert main(["check", "models:sums", "--loss-reduction", "mean"]) == 3
    assert "Pass loss_reduction='sum'" in capsys.readouterr().out
    assert main(["check", "models:sums", "--loss-reduction", "sum", "--samples", "2"]) == 0
    assert "of 2 of 8 samples" in capsys.readouterr().out
    assert main(["check", "models:refused"]) == 3
    assert "module '1' (BatchNorm1d)" in capsys.readouterr().out
    assert main(["check", "models:noisy"]) == 3
    assert main(["check", "models:time_first", "--batch-dim", "1", "--batch-size", "8", "--tolerance", "1e-6"]) == 0
    assert "of 4 of 8 samples" in capsys.readouterr().out


def test_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{ROOT / EXAMPLE}:classifier"]) == 0
    assert main(["check", f"{ROOT / EXAMPLE}:classifier_that_is_refused"]) == 3
    assert "module '1' (BatchNorm2d)" in capsys.readouterr().out


def test_json(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(models) + ":right", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["ok"] and report["parameters"][0]["rules"] == ["linear"]
    assert printed.err == "a line of the user's own\n"
    assert main(["check", "models:refused", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["refusal"]["type"] == "SamplesMixed"


ERRORS = {
    "models": "expected module:function, such as my_model:to_check, got 'models'",
    "models:": "expected module:function, such as my_model:to_check, got 'models:'",
    "models:right()": "expected module:function",
    ":right": "expected module:function",
    "no_models:right": "there is no module 'no_models' in ",
    "no.models:right": "there is no module 'no' in ",
    "no/models.py:right": "there is no file no/models.py in ",
    "broken:right": "broken cannot be imported: ModuleNotFoundError: No module named 'no_such_module' (",
    "inner.py:f": "inner.py cannot be imported: SyntaxError: ",
    "exits:f": "exits cannot be imported: SystemExit: 4 (",
    "./data:f": "there is no file ./data in ",
    "./data.txt:f": "./data.txt cannot be imported: ImportError: data.txt is not a Python file",
    "models:missing": "models has no function 'missing'; it has right, sums, refused",
    "models:number": "'number' in models is an int, not a function; it has right",
    "models:takes": "models:takes must be callable without arguments, but takes (model, size=3)",
    "models:raises": "models:raises failed: ValueError: of several lines (",
    "models:leaves": "models:leaves failed: SystemExit: no data (",
    "models:nothing": "models:nothing must return (model, batch, loss_fn), but returned None",
    "models:two": "must return (model, batch, loss_fn), but returned a tuple of 2 (Linear, tuple)",
    "models:no_model": "models:no_model must return an nn.Module as the model, but returned a str",
    "models:no_loss": "models:no_loss must return a function as the loss, but returned None",
    "models:bad_shape": "models:bad_shape: the model, the data or the loss failed: RuntimeError: ",
    "models:vector": "models:vector: loss_fn returned a tensor of shape (4,). It must return a tensor with one element",
}


@pytest.mark.parametrize("target", ERRORS)
def test_errors_are_one_line(target: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", target]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("persample check: error: ") and ERRORS[target] in printed.err


def test_error_names_the_line(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = MODELS.splitlines().index('    raise ValueError("of\\nseveral lines")') + 1
    main(["check", "models:raises"])
    assert f"({models}, line {line})" in capsys.readouterr().err


def test_debug_shows_the_traceback(models: Path) -> None:
    with pytest.raises(UsageError) as caught:
        main(["check", "models:raises", "--debug"])
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["chek"], "invalid choice: 'chek'"),
        (["check"], "the following arguments are required: module:function"),
        (["check", "a:b", "--samples", "0"], "argument --samples: expected a positive integer, got '0'"),
        (["check", "a:b", "--samples", "few"], "argument --samples: expected a positive integer, got 'few'"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"persample check {EXAMPLE}:language_model" in text and "exit codes:\n  0    right" in text


def test_file_does_not_replace_an_imported_module(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models.parent / "json.py").write_text(MODELS)
    assert main(["check", "json.py:right", "--json"]) == 0
    assert sys.modules["json"] is json and sys.modules.pop("file_json")
