"""Short runs of the examples."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus, transformers and Lightning

# Examples that are arguments of the command line; tests/cli runs them.
COMMAND_LINE = {"audit_digits", "check_model", "scan_digits"}


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def run_digits_norms(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "EPOCHS", 1)
    assert example.main() == 0


def run_private(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "EPOCHS", 1)
    for private in (False, True):
        assert 0 < example.train("name", private) < 1


def run_private_text(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sentences = example.make_sentences
    monkeypatch.setattr(example, "make_sentences", lambda count, seed: make_sentences(count // 10, seed))
    run_private(example, monkeypatch)


def run_private_trainer(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, reviews = example.TrainingArguments, example.Reviews
    monkeypatch.setattr(
        example, "TrainingArguments", lambda *args, **options: arguments(*args, **{**options, "num_train_epochs": 1})
    )
    monkeypatch.setattr(example, "Reviews", lambda count, seed: reviews(count // 4, seed))
    example.main()


def run_private_lightning(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = example.pl.Trainer
    monkeypatch.setattr(example.pl, "Trainer", lambda **options: trainer(**{**options, "max_epochs": 1}))
    example.main()


def run_side_by_side(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "side_by_side", example)  # Opacus copies a model of the example by pickle
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():  # Opacus sets flags of cudnn
        assert example.main([]) == 0
    with pytest.raises(SystemExit):
        example.main(["sideways"])
    monkeypatch.setitem(example.ROWS, "flat", lambda kind: (torch.zeros(1), float(kind is example.PrivacyEngine)))
    assert example.main(["flat"]) == 1


# How the example is run, and what it prints.
EXAMPLES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "digits_norms": (run_digits_norms, r"samples checked against a loop with plain autograd: equal"),
    "private_digits": (run_private, r"no privacy[\s\S]*epsilon \d+\.\d\d at delta"),
    "private_text": (run_private_text, r"no privacy[\s\S]*epsilon \d+\.\d\d at delta"),
    "private_trainer": (run_private_trainer, r"accuracy \d+\.\d% at epsilon \d\.\d\d"),
    "side_by_side": (run_side_by_side, r"adaptive +epsilon \d\.\d+ and \d\.\d+, weights differ by [\s\S]*DIFFERENT"),
    "private_lightning": (run_private_lightning, r"accuracy \d+\.\d% at epsilon \d\.\d\d"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = EXAMPLES[name]
    run(load_example(name), monkeypatch)
    assert re.search(output, capsys.readouterr().out)


def test_every_example_is_tested() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | COMMAND_LINE
