"""What watches a recording beside the steps: which events it sees, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from persample import watch
from persample.errors import SamplesMixed
from persample.forward import Detector
from persample.forward.detectors import Detectors
from persample.recording import DeclaredBatches, Guard

pytestmark = pytest.mark.quick

EVENTS = [name for name, method in vars(Detector).items() if callable(method)]


def make_detector(seen: list[str], names: list[str]) -> Detector:
    """A detector that notes these events."""

    def make(name: str) -> Any:
        def note(self: Detector, *args: Any) -> Any:
            seen.append(name)
            return getattr(Detector, name)(self, *args)

        note.__name__ = name
        return note

    return type("Spy", (Detector,), {"wraps_calls": "run_outside" in names, **{name: make(name) for name in names}})()


def train(model: nn.Module, detectors: tuple[Detector, ...], seen: list[str], steps: int) -> list[list[str]]:
    """What was seen in each step."""
    found: list[list[str]] = []
    options = {"guard": Guard(detectors, DeclaredBatches()), "verify": False}
    with watch(model, lambda grads: None, options) as watched:
        for _ in range(steps):
            seen.clear()
            model(torch.randn(5, 3)).square().sum().backward()
            watched.rest()
            found.append([*seen])
    return found


def test_events_come_in_the_order_of_the_interface() -> None:
    seen: list[str] = []
    (found,) = train(nn.Linear(3, 2), (make_detector(seen, EVENTS),), seen, steps=1)
    first = [name for name in EVENTS if name in found]
    assert sorted(first, key=found.index) == first
    assert {*EVENTS} - {*found} == {
        "restore",
        "check_function",
        "note_error",
    }  # nothing was refused, no custom function ran


def test_a_refused_step_is_restored() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))

    seen: list[str] = []
    with pytest.raises(SamplesMixed):
        train(Mixing(3, 2), (make_detector(seen, EVENTS),), seen, steps=1)
    assert seen[-2:] == ["restore", "end"]


def test_the_hot_path_asks_no_detector() -> None:
    seen: list[str] = []
    calls = ["start_call", "prepare", "check_motion", "after", "end_call"]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    *_, last = train(model, (make_detector(seen, calls),), seen, steps=3)
    assert last[: last.index("end_call") + 1] == ["start_call", "end_call"]


def test_a_detector_is_asked_for_its_own_events_alone() -> None:
    events = set(EVENTS) - {"run_outside", "read_attribute", "note_error"}  # of the one that wraps calls
    none, seen = Detectors([Detector()]), list[str]()
    assert not any(getattr(none, name) for name in events)
    assert none.outer is None
    some = Detectors([make_detector(seen, ["after", "run_outside"]), make_detector(seen, ["after"])])
    assert {name: len(getattr(some, name)) for name in events if getattr(some, name)} == {"after": 2}
    assert some.outer is not None
