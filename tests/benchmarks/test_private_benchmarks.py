"""The search for samples above the bound, and the benchmark of a large model, with few tries and no large model."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks import bound, large, private
from benchmarks.workloads import select_workloads
from tests.support.bound import Attempt


def test_search_reports_the_worst_attempt_of_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, float] = {}

    def measure(attempt: Attempt) -> float:
        change = 1 + attempt.others * 1e-5 + attempt.seed * 1e-12
        measured[attempt.dtype] = max(change, measured.get(attempt.dtype, 0.0))
        return change

    monkeypatch.setattr(bound, "measure_change", measure)
    results = bound.search(40, seed=0)
    assert results["tries"] >= 40 and not results["above the bound"]
    assert {dtype: found["change"] for dtype, found in results["worst"].items()} == measured


def test_search_reports_every_attempt_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(attempt: Attempt) -> float:
        return float("nan") if attempt.others else 0.5

    monkeypatch.setattr(bound, "measure_change", measure)
    results = bound.search(20, seed=0)
    assert results["above the bound"] and all(found["others"] for found in results["above the bound"])


def test_ratios_of_a_large_model_are_formed_within_a_round() -> None:
    plain, norms = large.Measured([1.0, 2.0], [100, 100]), large.Measured([3.0, 4.0], [150, 150])
    results = large.summarise({"plain": plain, "norms": norms})
    assert results["norms"]["time"] == 2.5
    assert results["norms"]["memory"] == 1.5
    assert "time" not in results["plain"]


def test_private_steps_are_timed_with_batches_of_changing_size() -> None:
    (workload,) = select_workloads("mlp")
    batches = [*islice(private.draw_batches(workload), 5)]
    sizes = [len(x) for x, labels in batches if len(x) == len(labels)]
    assert len({*sizes}) > 1 and 200 < sum(sizes) / 5 < 310


def test_chosen_steps_of_a_large_model_bring_what_they_are_compared_with() -> None:
    assert large.choose_names("adapters, norms") == {"adapters, norms", "adapters, plain"}
    assert {"first private step", "private", "training"} <= large.choose_names("first")
    assert large.choose_names("") == {*large.COMPARED, *large.COMPARED.values()}


def test_the_first_private_step_of_a_large_model_is_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(large, "run_step", lambda name, step, measured: measured.seconds.append(step()))
    steps = {name: lambda name=name: made.append(name) or float(len(made)) for name in ("training", "private")}
    found = large.measure_steps(steps, rounds=2)
    assert found["first private step"].seconds == [2.0] and found["private"].seconds == [4.0, 6.0]
