"""How the calls of the test models are followed: `python -m benchmarks.coverage`.

For each model, the calls of torch functions with samples among their arguments are counted:

known    the layout of the result follows from a declaration, or from moving sample ids
tried    the function has no declaration that covers the call, so it was tried on other values
refused  the samples are mixed in the result, or it is not known where they lie; this is an error only if a weight or a
         gradient meets the result
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

import persample
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.workloads import WORKLOADS, Workload, compute_loss
from persample._internal.text import format_table
from persample.errors import PerSampleError, get_op_name
from persample.layouts import MEMO, Call, Lost, Motion, within_units
from persample.testing.oracle import compute_test_loss
from tests.support.cases import CASES

RESULT = RESULTS / "coverage.json"


@dataclass(frozen=True)
class Subject:
    """A model and a function that runs it in a recording: forward, loss and backward."""

    group: str
    name: str
    run: Callable[[], None]


@dataclass
class Counts:
    """The calls of one model, and the functions that were tried or refused."""

    calls: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    error: str = ""

    def add(self, call: Call, motion: Motion) -> None:
        """Count a call with samples."""
        self.calls += 1
        if any(isinstance(where, Lost) for where in motion.results):
            self.refused[get_op_name(call.func)] += 1
        elif motion.is_tried:
            self.tried[get_op_name(call.func)] += 1

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain data."""
        tried, refused = self.tried.total(), self.refused.total()
        counts = {"calls": self.calls, "known": self.calls - tried - refused, "tried": tried, "refused": refused}
        functions = {"tried functions": dict(self.tried), "refused functions": dict(self.refused)}
        return {**counts, **{k: v for k, v in functions.items() if v}, **({"error": self.error} if self.error else {})}


@contextmanager
def count_calls() -> Iterator[Counts]:
    """Count the calls with samples inside the block. Nothing is cached there, so that each call is followed anew."""
    counts = Counts()
    find_motion = within_units.find_motion

    def find_and_count(call: Call, results: Sequence[Tensor]) -> Motion:
        motion = find_motion(call, results)
        counts.add(call, motion)
        return motion

    with (
        mock.patch.object(MEMO, "get", return_value=None),
        mock.patch.object(within_units, "find_motion", find_and_count),
    ):
        yield counts


def measure(subject: Subject) -> Counts:
    """Count the calls of one model. A model that is refused is counted up to the error."""
    with count_calls() as counts:
        try:
            subject.run()
        except PerSampleError as error:
            counts.error = f"{type(error).__name__}: {error}"
    return counts


# ---- the models ----


def list_subjects() -> list[Subject]:
    """The models of the tests, and the workloads of the benchmarks."""
    return [*_list_transformers(), *_list_cases(), *_list_workloads()]


def _run_case(case: Any) -> None:
    module, args, kwargs = case.build()
    with persample.record(module, **case.record_options):
        compute_test_loss(module(*args, **kwargs), case.out_dim).backward()


def _list_transformers() -> list[Subject]:
    from tests.support.hf_models import MODELS, make_cases

    return [Subject("transformers", case.name, partial(_run_case, case)) for case in make_cases(MODELS)]


def _list_cases() -> list[Subject]:
    return [Subject("awkward modules", case.name, partial(_run_case, case)) for case in CASES]


def _list_workloads() -> list[Subject]:
    def run(workload: Workload) -> None:
        model, x, y = workload.build()
        with persample.record(model, loss_reduction="sum"):
            compute_loss(model(x[:4]), y[:4]).backward()

    return [Subject("benchmarks", workload.name, partial(run, workload)) for workload in WORKLOADS]


# ---- the report ----


def make_table(found: dict[tuple[str, str], Counts]) -> str:
    """A line for each model, and one for each group."""
    rows = []
    groups = list(dict.fromkeys(group for group, _ in found))
    for group in groups:
        of_group = {name: counts for (own, name), counts in found.items() if own == group}
        rows += [_make_row(name, [counts]) for name, counts in of_group.items()]
        rows.append(_make_row(f"all {group}", list(of_group.values())))
    rows.append(_make_row("all", list(found.values())))
    header = ["model", "calls", "known", "tried", "refused", "tried functions"]
    return format_table(rows, header, right={1, 2, 3, 4}, rule=True)


def _make_row(name: str, counts: Sequence[Counts]) -> list[str]:
    tried = sum((each.tried for each in counts), Counter[str]())
    refused = sum((each.refused for each in counts), Counter[str]())
    calls = sum(each.calls for each in counts)
    known = calls - tried.total() - refused.total()
    shares = [f"{100 * part / max(1, calls):.1f} %" for part in (known, tried.total(), refused.total())]
    return [name, str(calls), *shares, ", ".join(f"{name} {n}" for name, n in tried.most_common(6))]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the table; with --write, also write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only models with TEXT in their name")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args(arguments)
    subjects = [subject for subject in list_subjects() if options.only in subject.name]
    found = {(subject.group, subject.name): measure(subject) for subject in subjects}
    print(make_table(found))
    if options.write:
        models: dict[str, dict[str, Any]] = {}
        for (group, name), counts in found.items():
            models.setdefault(group, {})[name] = counts.to_dict()
        total = {key: sum(c.to_dict()[key] for c in found.values()) for key in ("calls", "known", "tried", "refused")}
        write_json(RESULT, {"machine": describe_machine(), "all": total, "models": models})


if __name__ == "__main__":
    main()
