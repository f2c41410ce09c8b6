"""Short runs of the examples."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus, transformers and Lightning

# Examples that are arguments of the command line; tests/cli runs them.
COMMAND_LINE = {"check_model", "scan_digits"}


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(name).name, ROOT / "examples" / f"{name}.py")
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


def run_private_augmentations(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "EPOCHS", 1)
    assert 0 < example.train(2) < 1


def run_two_losses(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "STEPS", 3)
    for balanced in (False, True):
        accuracy, error = example.train("name", balanced)
        assert 0 <= accuracy < 1 and error > 0


def run_importance_sampling(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "EPOCHS", 1)
    monkeypatch.setattr(example, "SEEDS", 1)
    example.main()


def run_side_by_side(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "side_by_side", example)  # Opacus copies a model of the example by pickle
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():  # Opacus sets flags of cudnn
        assert example.main([]) == 0
    with pytest.raises(SystemExit):
        example.main(["sideways"])
    monkeypatch.setitem(example.ROWS, "flat", lambda kind: (torch.zeros(1), float(kind is example.PrivacyEngine)))
    assert example.main(["flat"]) == 1


def run_prune_digits(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "STEPS", 20)
    monkeypatch.setattr(example, "SEEDS", 1)
    example.main()


def run_select_digits(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "STEPS", 3)
    monkeypatch.setattr(example, "SEEDS", 1)
    example.main()


# How the example is run, and what it prints.
EXAMPLES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "digits_norms": (run_digits_norms, r"samples checked against a loop with plain autograd: equal"),
    "importance_sampling": (run_importance_sampling, r"uniform +\d\.\d{3}\n +by gradient norm +\d\.\d{3}"),
    "private_augmentations": (run_private_augmentations, r"2 augmentations +accuracy +\d+\.\d%   epsilon [34]\.\d\d"),
    "prune_digits": (run_prune_digits, r"1200 examples, random[\s\S]*300 examples, largest EL2N +\d+\.\d%"),
    "select_digits": (run_select_digits, r"held-out data alone +\d[\s\S]*select +\d+\.\d% ± 0\.0%"),
    "private_digits": (run_private, r"no privacy[\s\S]*epsilon \d+\.\d\d at delta"),
    "private_text": (run_private_text, r"no privacy[\s\S]*epsilon \d+\.\d\d at delta"),
    "two_losses": (run_two_losses, r"weight of the digits 0\.50[\s\S]*samples in conflict +\d+%"),
    "private_trainer": (run_private_trainer, r"accuracy \d+\.\d% at epsilon \d\.\d\d"),
    "side_by_side": (run_side_by_side, r"adaptive +epsilon \d\.\d+ and \d\.\d+, weights differ by [\s\S]*DIFFERENT"),
    "private_lightning": (run_private_lightning, r"accuracy \d+\.\d% at epsilon \d\.\d\d"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = EXAMPLES[name]
    run(load_example(name), monkeypatch)
    assert re.search(output, capsys.readouterr().out)


def make_vectors(seed: int, count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    return torch.randn(count, size, generator=generator, dtype=torch.float64) * scales


@pytest.mark.parametrize("seed", range(10))
def test_min_norm_weights_of_two_vectors(seed: int) -> None:
    a, b = vectors = make_vectors(seed, 2, 3)
    share = float(((b - a) @ b / (b - a).square().sum()).clamp(0, 1))  # the closed form
    found = load_example("two_losses").find_min_norm_weights(vectors @ vectors.T)
    torch.testing.assert_close(found, torch.tensor([share, 1 - share], dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_min_norm_weights_are_optimal(count: int, size: int) -> None:
    """No vector makes the combination shorter: its inner product with each is at least its squared length."""
    for seed in range(5):
        vectors = make_vectors(seed, count, size)
        weights = load_example("two_losses").find_min_norm_weights(vectors @ vectors.T)
        combined = weights @ vectors
        assert bool((weights >= 0).all()) and float(weights.sum()) == pytest.approx(1)
        assert bool((vectors @ combined >= combined.square().sum() - 1e-9).all())


def test_every_example_is_tested() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | COMMAND_LINE
