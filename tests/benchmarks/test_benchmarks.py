"""The benchmark itself: it checks the answers of the engines, and forms ratios within a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks import regression, run, timing
from benchmarks.__main__ import RESULTS, main, options_of
from benchmarks.check import examine
from benchmarks.engines import ENGINES, Engine, Plain
from benchmarks.engines.base import RowsEngine
from benchmarks.engines.loop import Loop
from benchmarks.rows import Rows
from benchmarks.targets import TIME
from benchmarks.workloads import WORKLOADS, Workload

PUBLISHED = regression.read_published(RESULTS)


def make_small() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return model, torch.randn(4, 6), torch.randint(3, (4,))


SMALL = Workload("small", make_small, "small")


class Shuffled(Loop):
    """Rows in the wrong order; sums are right."""

    name = "shuffled"

    def dense(self) -> Rows:
        return {name: rows.roll(1, 0) for name, rows in super().dense().items()}


class Doubled(Loop):
    """Wrong in one small parameter."""

    name = "doubled"

    def dense(self) -> Rows:
        rows = super().dense()
        rows["2.bias"] *= 2
        return rows


class Undefined(Loop):
    name = "undefined"

    def norms(self) -> Tensor:
        return super().norms() * torch.nan


class ClippedByWrongNorms(Loop):
    """Norms with an error of one percent, which hardly changes a clipped sum."""

    name = "clipped by wrong norms"

    def norms(self) -> Tensor:
        return super().norms() * (1 + 0.01 * torch.randn(len(self.x)))


class Erring(RowsEngine):
    name = "erring"

    def dense(self) -> Rows:
        raise ZeroDivisionError


class OnlyAdapted(Loop):
    """Supports only an adapted model."""

    name = "only adapted"

    def adapt(self) -> str:
        return "another form"

    def dense(self) -> Rows:
        return super().dense() if self.note else {}


def find_failures(engine: type[Engine]) -> dict[str, str]:
    return examine(SMALL, [engine], engine.offers)[engine.name].failures


@pytest.mark.parametrize("name", ["loop", "torch.func", "ExpandedWeights", "ours", "ours, 2 passes"])
def test_right_engines_are_accepted(name: str) -> None:
    assert set(find_failures(ENGINES[name]).values()) == {""}


@pytest.mark.parametrize("engine", [Shuffled, Doubled])
def test_wrong_engines_are_found(engine: type[Engine]) -> None:
    assert set(find_failures(engine).values()) == {"wrong"}
    assert examine(SMALL, [engine], ["clip"])[engine.name].failures == {"clip": "wrong"}


def test_nan_is_wrong_for_one_quantity_only() -> None:
    found = find_failures(Undefined)
    assert found["norms"] == "wrong" and found["dense"] == ""


def test_wrong_norms_make_clipping_wrong() -> None:
    assert find_failures(ClippedByWrongNorms)["clip"] == "wrong"
    assert examine(SMALL, [ClippedByWrongNorms], ["clip"])["clipped by wrong norms"].failures == {"clip": "wrong"}


def test_engine_that_raises_has_an_error_and_no_time() -> None:
    assert set(find_failures(Erring).values()) == {"error: ZeroDivisionError"}
    times, _ = run.measure(SMALL, [Erring, Loop, Shuffled], ["dense"], [], rounds=2)
    assert times["dense"]["erring"] == {"failure": "error: ZeroDivisionError"}
    assert times["dense"]["shuffled"] == {"failure": "wrong"}
    assert times["dense"]["loop"]["ratio"] > 0 and times["dense"]["loop"]["rounds"] == 2


def test_adapted_model_has_a_note() -> None:
    found = examine(SMALL, [OnlyAdapted], ["dense"])["only adapted"]
    assert found.failures == {"dense": ""} and found.note == "another form"


def test_ratios_are_formed_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes ten times slower for a while changes no ratio."""
    durations: Iterator[float] = iter([9.0, 1.0, 3.0, 10.0, 30.0, 2.0, 6.0])  # a warm-up, then plain, engine, ...
    monkeypatch.setattr(timing, "seconds", lambda engine, quantity: next(durations))
    monkeypatch.setattr(timing, "ENDLESS", 100)
    found = timing.measure(SMALL, "dense", [Loop(SMALL)], rounds=3)
    assert found["loop"].ratio == 3 and found["loop"].quartiles == (3, 3) and found["loop"].rounds == 3


def test_step_starts_without_gradients() -> None:
    plain = Plain(SMALL)
    timing.seconds(plain, "total")
    assert all(p.grad is None for p in plain.model.parameters())


def test_slow_engines_take_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENDLESS", float("inf"))
    assert timing.measure(SMALL, "norms", [Loop(SMALL)], rounds=9, patience=0)["loop"].rounds == timing.FEWEST
    monkeypatch.setattr(timing, "ENDLESS", 0)
    assert timing.measure(SMALL, "norms", [Loop(SMALL)], rounds=9, patience=0)["loop"].rounds == 1


def test_options() -> None:
    options = options_of(["--engines", "ours,ours, 2 passes,loop", "--quantities", "clip,dense"])
    assert options.engines == ["loop", "ours", "ours, 2 passes"] and options.quantities == ["dense", "clip"]
    assert options.output is None, "a restricted run does not replace what is published"
    assert options_of([]).output == RESULTS
    with pytest.raises(SystemExit):
        options_of(["--engines", "ours,theirs"])


def test_every_workload_has_targets_and_a_published_ratio() -> None:
    names = [workload.short for workload in WORKLOADS]
    assert list(TIME) == names and list(PUBLISHED) == names


class Measure:
    """Stands for a measurement; returns one table after the other, with the quantities that are asked for."""

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
    ids=["right", "not confirmed", "confirmed"],
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
    found = {"norms": 2.5 * PUBLISHED[workload.short]["norms"]} if slow else {}
    monkeypatch.setattr(regression, "confirm_slowdowns", lambda workload, published: found)
    assert main(["--check", "--only", workload.name]) == int(slow)
    printed = capsys.readouterr().out
    assert ("too slow" in printed and f"{workload.short}: times of a plain step" in printed) == slow


def test_number_of_threads_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    seen: list[int] = []
    monkeypatch.setattr(regression, "confirm_slowdowns", lambda *_: seen.append(torch.get_num_threads()) or {})
    assert not regression.find_slowdowns(PUBLISHED, WORKLOADS[0].name)
    assert set(seen) == {1} and torch.get_num_threads() == threads
