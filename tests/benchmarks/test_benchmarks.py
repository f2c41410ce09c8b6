"""The benchmarks: checks of the engines, ratios within a round, options, and the regression check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks import regression, run, timing
from benchmarks.__main__ import main, parse_options
from benchmarks.check import check_engines
from benchmarks.engines import ENGINES, Engine, Plain
from benchmarks.engines.base import RowsEngine
from benchmarks.engines.loop import Loop
from benchmarks.output import RESULTS
from benchmarks.rows import Rows
from benchmarks.targets import TIME
from benchmarks.workloads import WORKLOADS, Workload

PUBLISHED = regression.read_published(RESULTS)


def _make_small() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return model, torch.randn(4, 6), torch.randint(3, (4,))


SMALL = Workload("small", _make_small, "small")


class Shuffled(Loop):
    """Rows of other samples. The sum of the rows is correct."""

    name = "shuffled"

    def dense(self) -> Rows:
        return {name: rows.roll(1, 0) for name, rows in super().dense().items()}


class Doubled(Loop):
    """Wrong rows for one small parameter."""

    name = "doubled"

    def dense(self) -> Rows:
        rows = super().dense()
        rows["2.bias"] *= 2
        return rows


class Undefined(Loop):
    """NaN as norms."""

    name = "undefined"

    def norms(self) -> Tensor:
        return super().norms() * torch.nan


class ClippedByWrongNorms(Loop):
    """Norms with an error of 1 %, which hardly changes the clipped sum."""

    name = "clipped by wrong norms"

    def norms(self) -> Tensor:
        return super().norms() * (1 + 0.01 * torch.randn(len(self.x)))


class Raising(RowsEngine):
    """Raises an error."""

    name = "raising"

    def dense(self) -> Rows:
        raise ZeroDivisionError


class OnlyAdapted(Loop):
    """Supports the adapted model only."""

    name = "only adapted"

    def adapt(self) -> str:
        return "another model"

    def dense(self) -> Rows:
        return super().dense() if self.note else {}


def find_failures(engine: type[Engine]) -> dict[str, str]:
    return check_engines(SMALL, [engine], engine.quantities)[engine.name].failures


@pytest.mark.parametrize("name", ["loop", "torch.func", "ExpandedWeights", "ours", "ours, 2 passes"])
def test_correct_engines_are_accepted(name: str) -> None:
    assert set(find_failures(ENGINES[name]).values()) == {""}


@pytest.mark.parametrize("engine", [Shuffled, Doubled])
def test_wrong_engines_are_found(engine: type[Engine]) -> None:
    assert set(find_failures(engine).values()) == {"wrong"}
    assert check_engines(SMALL, [engine], ["clip"])[engine.name].failures == {"clip": "wrong"}


def test_nan_is_wrong_but_other_quantities_are_correct() -> None:
    failures = find_failures(Undefined)
    assert failures["norms"] == "wrong" and failures["dense"] == ""


def test_wrong_norms_make_the_clipped_sum_wrong() -> None:
    assert find_failures(ClippedByWrongNorms)["clip"] == "wrong"
    assert check_engines(SMALL, [ClippedByWrongNorms], ["clip"])["clipped by wrong norms"].failures == {"clip": "wrong"}


def test_an_engine_that_fails_is_not_timed() -> None:
    assert set(find_failures(Raising).values()) == {"error: ZeroDivisionError"}
    times, _ = run.measure_workload(SMALL, [Raising, Loop, Shuffled], ["dense"], [], rounds=2)
    assert times["dense"]["raising"] == {"failure": "error: ZeroDivisionError"}
    assert times["dense"]["shuffled"] == {"failure": "wrong"}
    assert times["dense"]["loop"]["ratio"] > 0 and times["dense"]["loop"]["rounds"] == 2


def test_an_adapted_model_has_a_note() -> None:
    checked = check_engines(SMALL, [OnlyAdapted], ["dense"])["only adapted"]
    assert checked.failures == {"dense": ""} and checked.note == "another model"


def test_a_ratio_is_formed_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratios do not change if the machine is ten times slower for a while."""
    durations: Iterator[float] = iter(
        [9.0, 1.0, 3.0, 10.0, 30.0, 2.0, 6.0]
    )  # warm-up, then plain, engine, plain, engine, ...
    monkeypatch.setattr(timing, "time_step", lambda engine, quantity: next(durations))
    monkeypatch.setattr(timing, "SLOW_STEP", 100)
    times = timing.measure_times(SMALL, "dense", [Loop(SMALL)], rounds=3)["loop"]
    assert times.ratio == 3 and times.quartiles == (3, 3) and times.rounds == 3


def test_gradients_are_cleared_after_a_step() -> None:
    plain = Plain(SMALL)
    timing.time_step(plain, "total")
    assert all(p.grad is None for p in plain.model.parameters())


def test_slow_engines_run_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SLOW_STEP", float("inf"))
    assert timing.measure_times(SMALL, "norms", [Loop(SMALL)], rounds=9, budget=0)["loop"].rounds == timing.MIN_ROUNDS
    monkeypatch.setattr(timing, "SLOW_STEP", 0)
    assert timing.measure_times(SMALL, "norms", [Loop(SMALL)], rounds=9, budget=0)["loop"].rounds == 1


def test_options() -> None:
    options = parse_options(["--engines", "ours,ours, 2 passes,loop", "--quantities", "clip,dense"])
    assert options.engines == ["loop", "ours", "ours, 2 passes"] and options.quantities == ["dense", "clip"]
    assert options.output is None, "a restricted run does not overwrite the published results"
    assert parse_options([]).output == RESULTS
    with pytest.raises(SystemExit):
        parse_options(["--engines", "ours,theirs"])


def test_every_workload_has_targets_and_a_published_ratio() -> None:
    names = [workload.short for workload in WORKLOADS]
    assert list(TIME) == names and list(PUBLISHED) == names


class Measure:
    """Replaces a measurement: each call returns the next table, restricted to the given quantities."""

    def __init__(self, *tables: dict[str, float]) -> None:
        self.tables = list(tables)
        self.rounds: list[int] = []

    def __call__(self, workload: Workload, quantities: Iterable[str], rounds: int) -> dict[str, float]:
        self.rounds.append(rounds)
        table = self.tables.pop(0)
        return {quantity: table[quantity] for quantity in quantities}


@pytest.mark.parametrize(
    ("tables", "slow"),
    [
        ([{"dense": 1.9, "norms": 5.9}], {}),
        ([{"dense": 2.1, "norms": 5.9}, {"dense": 1.9}], {}),
        ([{"dense": 2.1, "norms": 6.1}, {"dense": 2.2, "norms": 5.0}], {"dense": 2.2}),
    ],
    ids=["fast", "not confirmed", "confirmed"],
)
def test_slowdowns_are_measured_twice(tables: list[dict[str, float]], slow: dict[str, float]) -> None:
    measure = Measure(*tables)
    assert regression.confirm_slowdowns(SMALL, {"dense": 1.0, "norms": 3.0}, measure) == slow
    assert measure.rounds == [regression.ROUNDS, regression.MORE_ROUNDS][: len(tables)] and not measure.tables


@pytest.mark.parametrize("slow", [False, True])
def test_check_fails_if_a_ratio_is_too_large(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = WORKLOADS[0]
    slowdowns = {"norms": 2.5 * PUBLISHED[workload.short]["norms"]} if slow else {}
    monkeypatch.setattr(regression, "confirm_slowdowns", lambda workload, published: slowdowns)
    assert main(["--check", "--only", workload.name]) == int(slow)
    printed = capsys.readouterr().out
    assert ("too slow" in printed and f"{workload.short}: times of a plain step" in printed) == slow


def test_no_thread_setting_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    seen: list[int] = []
    monkeypatch.setattr(regression, "confirm_slowdowns", lambda *_: seen.append(torch.get_num_threads()) or {})
    assert not regression.find_slowdowns(PUBLISHED, WORKLOADS[0].name)
    assert set(seen) == {1} and torch.get_num_threads() == threads
