"""The library of large products follows from facts of the machine or a setting, and a scan keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import persample
from persample import PerSampleError, _torch
from persample.terms import libraries
from persample.terms.libraries import choose_library, use_library
from persample.terms.products import multiply


@pytest.fixture(autouse=True)
def without_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(libraries.SETTING, raising=False)
    choose_library.cache_clear()
    yield
    choose_library.cache_clear()


def set_machine(monkeypatch: pytest.MonkeyPatch, maker: str, instructions: str, has_onednn: bool = True) -> None:
    monkeypatch.setattr(libraries, "find_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    product = (lambda a, b: a @ b.mT) if has_onednn else None
    monkeypatch.setattr(_torch, "find_onednn_product", lambda: product)


@pytest.mark.parametrize(
    "maker, instructions, has_onednn, library",
    [
        ("AuthenticAMD", "AVX512", True, "onednn"),
        ("AuthenticAMD", "AVX2", True, "torch"),
        ("AuthenticAMD", "AVX512", False, "torch"),
        ("GenuineIntel", "AVX512", True, "torch"),
        ("", "DEFAULT", True, "torch"),
    ],
)
def test_the_library_follows_from_the_machine(
    maker: str, instructions: str, has_onednn: bool, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, maker, instructions, has_onednn)
    assert choose_library().library == library and choose_library().reason


@pytest.mark.parametrize("setting", ["torch", "onednn"])
def test_a_setting_comes_first(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "GenuineIntel" if setting == "onednn" else "AuthenticAMD", "AVX512")
    monkeypatch.setenv(libraries.SETTING, setting)
    assert choose_library() == (setting, f"{libraries.SETTING}={setting}")


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.SETTING, "mkl")
    with pytest.raises(PerSampleError, match="must be 'torch', 'onednn' or 'auto', got 'mkl'"):
        choose_library()


def test_a_library_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "", "DEFAULT", has_onednn=False)
    with pytest.raises(PerSampleError, match="this torch has none"), use_library("onednn"):
        pass


@pytest.mark.parametrize("library", ["torch", "onednn"])
def test_products_are_computed_by_the_library_of_the_block(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    set_machine(monkeypatch, "", "DEFAULT")
    monkeypatch.setattr(_torch, "find_onednn_product", lambda: lambda a, b: (used.append(1), a @ b.mT)[1])
    a, b = torch.randn(200, 200), torch.randn(200, 200)
    with use_library(library):  # type: ignore[arg-type]
        torch.testing.assert_close(multiply(a, b), a @ b)
    assert bool(used) == (library == "onednn")


def test_a_scan_goes_on_with_the_library_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    set_machine(monkeypatch, "AuthenticAMD", "AVX512")
    used: list[str | None] = []
    data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            used.append(libraries._given.get())
            if len(used) == stop:
                raise KeyboardInterrupt
            return super().forward(x)

    model, stop = Noting(3, 2), 5
    options = {"out": tmp_path / "scan", "batch_size": 2, "shard_size": 2, "verify": False}
    with pytest.raises(KeyboardInterrupt):
        persample.scan(model, nn.CrossEntropyLoss(), data, **options)
    assert used[-1] == "onednn"
    set_machine(monkeypatch, "GenuineIntel", "AVX512")
    choose_library.cache_clear()
    stop = 0
    found = persample.scan(model, nn.CrossEntropyLoss(), data, **options)
    assert used[-1] == "onednn" and found.store.read_settings()["products"] == "onednn"
