"""Which library computes large float32 products on a CPU, and why.

Torch calls MKL, which does not use the widest instructions of processors of other makers than its own. oneDNN does.
On an AMD EPYC with AVX-512, products by oneDNN take half of the time. On an Intel Xeon (Cascade Lake), steps with them
take 10 to 45 % more. There, "mkl" is torch's own product, with copies of rows that its wide kernels read slowly
(`multiply_rows`). So the choice follows from two facts of the machine, the maker and the instruction set, and is the
same in each process on it. The environment variable `PERSAMPLE_PRODUCTS` overrides it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from persample import _torch
from persample.errors import PerSampleError

Library = Literal["torch", "mkl", "onednn"]

SETTING = "PERSAMPLE_PRODUCTS"

_given: ContextVar[Library | None] = ContextVar("persample products", default=None)


class Choice(NamedTuple):
    """A library, and why it was chosen."""

    library: Library
    reason: str


def get_product() -> _torch.Product | None:
    """The function of oneDNN that computes `a @ b.mT`; None if torch's own product is to be used."""
    return _torch.find_onednn_product() if get_library() == "onednn" else None


def get_library() -> Library:
    """The library of the block, or the one of the machine."""
    return _given.get() or choose_library().library


@contextmanager
def use_library(library: Library) -> Iterator[None]:
    """Inside the block, compute products by this library: a scan that is continued has the same bytes then."""
    if library == "onednn" and _torch.find_onednn_product() is None:
        raise PerSampleError("Products by oneDNN are needed here, and this torch has none for this kind of processor.")
    token = _given.set(library)
    try:
        yield
    finally:
        _given.reset(token)


@cache
def choose_library() -> Choice:
    """The library for this machine, unless `PERSAMPLE_PRODUCTS` names one.

    >>> choose_library().library in ("torch", "mkl", "onednn")
    True
    """
    given = os.environ.get(SETTING, "auto")
    if given not in (*get_args(Library), "auto"):
        raise PerSampleError(f"{SETTING} must be 'torch', 'mkl', 'onednn' or 'auto', got {given!r}.")
    if given == "torch":
        return Choice("torch", f"{SETTING}=torch")
    if given == "mkl":
        return Choice("mkl", f"{SETTING}=mkl")
    maker, instructions = find_maker(), torch.backends.cpu.get_cpu_capability()
    facts = f"the processor is {maker or 'of an unknown maker'} with {instructions}"
    has_wide_mkl = instructions == "AVX512" and torch.backends.mkl.is_available()
    if maker == "GenuineIntel" and has_wide_mkl and given == "auto":
        return Choice("mkl", f"{facts}, where oneDNN was measured to be slower than MKL")
    if _torch.find_onednn_product() is None:
        return Choice("torch", "this torch has no oneDNN for this kind of processor")
    if given == "onednn":
        return Choice("onednn", f"{SETTING}=onednn")
    if maker == "AuthenticAMD" and has_wide_mkl:
        return Choice("onednn", f"{facts}, where oneDNN was measured to be faster than MKL")
    return Choice("torch", f"{facts}, where oneDNN was not measured to be faster")


def find_maker() -> str:
    """The maker of the processor, as it names itself; empty if it is not known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
    return named or next((maker for maker in ("AuthenticAMD", "GenuineIntel") if maker in platform.processor()), "")
