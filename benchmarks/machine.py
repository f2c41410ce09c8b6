"""Description of the machine and the software of a run, which is stored with its results."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "persample", "opacus", "backpack-for-pytorch", "opake-dpsgd")


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores, threads in use, memory, and the versions of Python and of the measured packages."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _find_processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: _find_version(package) for package in PACKAGES},
    }


def _find_processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
