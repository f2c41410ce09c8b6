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
from persample.terms.products import _has_conflicts, multiply, multiply_rows


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
        ("GenuineIntel", "AVX512", True, "mkl"),
        ("GenuineIntel", "AVX512", False, "mkl"),
        ("GenuineIntel", "AVX2", True, "torch"),
        ("", "DEFAULT", True, "torch"),
    ],
)
def test_the_library_follows_from_the_machine(
    maker: str, instructions: str, has_onednn: bool, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, maker, instructions, has_onednn)
    assert choose_library().library == library and choose_library().reason


@pytest.mark.parametrize("setting", ["torch", "mkl", "onednn"])
def test_a_setting_comes_first(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "GenuineIntel" if setting == "onednn" else "AuthenticAMD", "AVX512")
    monkeypatch.setenv(libraries.SETTING, setting)
    assert choose_library() == (setting, f"{libraries.SETTING}={setting}")


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.SETTING, "blas")
    with pytest.raises(PerSampleError, match="must be 'torch', 'mkl', 'onednn' or 'auto', got 'blas'"):
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


@pytest.mark.parametrize("shape", [(2, 24, 512), (3, 30, 1100), (2, 128, 600), (2, 23, 512), (2, 129, 512)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_rows_are_equal_with_copies(shape: tuple[int, ...], is_transposed: bool) -> None:
    a = torch.randn(shape[1], shape[0], 2048)[..., : shape[2]].transpose(0, 1)
    a = a if is_transposed else torch.randn(*shape[:2], 2048)[..., : shape[2]].copy_(a)
    assert a.stride(1) % 512 == 0
    with use_library("mkl"):
        copied = multiply_rows(a)
        assert _has_conflicts(a) == (24 <= shape[1] <= 128)
    expected = a.double() @ a.double().mT
    torch.testing.assert_close(copied.double(), expected, rtol=1e-5, atol=1e-4)
    with use_library("torch"):
        assert not _has_conflicts(a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
def test_products_of_rows_of_other_dtypes_are_not_copied(dtype: torch.dtype) -> None:
    a = torch.randn(2, 24, 512, dtype=dtype)
    with use_library("mkl"):
        torch.testing.assert_close(multiply_rows(a), a @ a.mH)


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
