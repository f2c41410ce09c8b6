"""Free memory of the host, within the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from persample._internal.memory import find_free_host_memory


def make_system(root: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc with 1,000 KiB of free memory, and a tree of control groups."""
    for name, text in {
        "proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 1000 kB\n",
        "proc/self/cgroup": groups,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


CASES = {
    "no limit": ("0::/\n", {"cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n"}, 1024_000),
    "the group itself": ("0::/a\n", {"cgroup/a/memory.max": "900\n", "cgroup/a/memory.current": "500\n"}, 400),
    "a group above": ("0::/a/b\n", {"cgroup/a/memory.max": "900\n", "cgroup/a/memory.current": "500\n"}, 400),
    "path of the host": ("0::/x\n", {"cgroup/memory.max": "900\n", "cgroup/memory.current": "500\n"}, 400),
    "cached files": (
        "0::/\n",
        {"cgroup/memory.max": "900", "cgroup/memory.current": "500", "cgroup/memory.stat": "inactive_file 70\n"},
        470,
    ),
    "version 1": (
        "5:cpu:/\n4:memory:/a\n",
        {"cgroup/memory/a/memory.limit_in_bytes": "900", "cgroup/memory/a/memory.usage_in_bytes": "1000"},
        0,
    ),
    "nothing readable": ("0::/\n", {}, 1024_000),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_limits_of_containers(case: str, tmp_path: Path) -> None:
    groups, files, expected = CASES[case]
    assert find_free_host_memory(*make_system(tmp_path, groups, files)) == expected


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert find_free_host_memory(tmp_path, tmp_path) is None
