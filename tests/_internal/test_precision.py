"""Answers are computed in full precision, whatever the settings allow for float32 products."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from persample import _torch, record
from persample._internal.precision import in_full_precision
from persample.gradients import stack as joined
from persample.private import PrivateOptimizer
from persample.terms import Outer, Patches

SETTINGS: dict[str, Callable[[], None]] = {
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "products of oneDNN": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "convolutions of oneDNN": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def restore_settings() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for operation in ("matmul", "conv"):
        _torch.set_precision("mkldnn", operation, "none")


@pytest.mark.parametrize("keep", ["everything", "norms", "clip", "two passes", "private"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_norms_and_sums_ignore_the_settings(setting: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []
    for term in (Outer, Patches):
        for name in ("measure", "sum", "compact"):
            method = getattr(term, name)

            def note(*args: Any, method: Any = method, **options: Any) -> Any:
                seen.append(_torch.find_reduced_precision())
                return method(*args, **options)

            monkeypatch.setattr(term, name, note)
    monkeypatch.setattr(joined, "_MAX_ENTRIES", 0)  # small terms would be computed in float64
    SETTINGS[setting]()
    before = _torch.find_reduced_precision()
    assert before
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(6, 5))
    x = torch.randn(4, 3, 8)
    if keep == "private":
        optimizer = PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=1.0, max_grad_norm=1.0,
            expected_batch_size=4,
        )  # fmt: skip
        model(x).square().flatten(1).sum(1).mean().backward()
        optimizer.step()
        optimizer.release()
    else:
        options: dict[str, Any] = {"keep": keep}
        if keep in ("clip", "two passes"):
            options = {"keep": "clip", "max_norm": 1.0, "passes": 1 + (keep == "two passes")}
        with record(model, **options) as grads:
            model(x).square().sum().backward()
        grads.norms()
        if keep != "norms":
            grads.clip(1.0)
    assert seen and not any(seen)
    assert _torch.find_reduced_precision() == before


def test_calls_of_several_threads() -> None:
    """The last call to end restores the settings that the first one found."""
    torch.set_float32_matmul_precision("medium")
    before = _torch.find_reduced_precision()
    is_inside, may_end = threading.Event(), threading.Event()

    @in_full_precision
    def wait() -> None:
        is_inside.set()
        assert may_end.wait(10)

    other = threading.Thread(target=wait)
    other.start()
    assert is_inside.wait(10)
    assert in_full_precision(_torch.find_reduced_precision)() == []
    assert _torch.find_reduced_precision() == []
    may_end.set()
    other.join()
    assert _torch.find_reduced_precision() == before


def test_settings_are_restored_after_an_error() -> None:
    torch.set_float32_matmul_precision("medium")

    @in_full_precision
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert torch.get_float32_matmul_precision() == "medium"
