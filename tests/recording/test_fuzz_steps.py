"""Sequences of steps of small models that change in between, by `tests.fuzz_steps`; and that it notices errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from persample import PerSampleGradients
from tests.fuzz_fragments import FRAGMENTS
from tests.fuzz_steps import Case, Report, Step, Wrong, make_case

CASES = 120
BLOCK = 10


@pytest.mark.parametrize("first", range(0, CASES, BLOCK))
def test_steps_of_changing_models_equal_the_loop_or_are_refused(first: int) -> None:
    report = Report()
    for seed in range(first, first + BLOCK):
        report.run(seed)
    assert not report.failures, report.failures[0][2]


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_works_in_two_steps(name: str) -> None:
    """Else nothing would be tested by it."""
    case = Case(((0, "linear"), (1, name)), (Step(batch=4, length=3), Step(batch=4, length=3)))
    outcomes = [*case.run()]
    assert len(outcomes) == 2
    assert not any(outcome.startswith("impossible") for outcome in outcomes)


def test_a_case_follows_from_its_seed() -> None:
    assert make_case(7) == make_case(7) != make_case(8)


def test_a_failing_case_becomes_a_short_script(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = PerSampleGradients.dense

    def double(self: Any, *args: Any, **options: Any) -> dict[str, Tensor]:
        return {name: 2 * row if name.startswith("n_") else row for name, row in dense(self, *args, **options).items()}

    monkeypatch.setattr(PerSampleGradients, "dense", double)
    fragments = ((0, "linear"), (1, "function"), (2, "layer norm"), (3, "linear"))
    change = ((1, "m.f_1 = torch.sin"), (2, "m.n_2.eps = 0.5"))
    case = Case(fragments, (Step(), Step(changes=change, batch=4), Step(seed=1)))
    found = case.shrink()
    assert found.fragments == ((0, "linear"), (2, "layer norm"))
    assert len(found.steps) == 1
    with pytest.raises(Wrong, match="rows: of n_2"):
        exec(found.write_script("a cause"), {})
    assert torch.get_default_dtype() == torch.float32
