"""Atomic writes, and which unfinished files may be removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from persample._internal import files
from persample._internal.files import is_unfinished, remove_unfinished, write_atomically

# Loads the module from its file: importing the package would import torch, which takes seconds.
WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("files", sys.argv[2])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
with files.write_atomically(sys.argv[1]) as file:
    file.write(b"half of it")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has written half of a file, and waits for a line or a signal."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), files.__file__], **pipes) as process:
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


def list_unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if is_unfinished(path)]


def make_old(path: Path) -> None:
    before = time.time() - files.STALE_AFTER - 60
    os.utime(path, (before, before))


def rename_to_other_machine(path: Path) -> Path:
    return path.rename(path.with_name(path.name.replace(files._get_machine(), "0" * 8)))


def assert_removed_only_if_old(path: Path) -> None:
    remove_unfinished(path.parent)
    assert path.exists()
    make_old(path)
    remove_unfinished(path.parent)
    assert not path.exists()


# ---- writing ----


def test_old_contents_stay_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"old")
    with write_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old" and len(list_unfinished(tmp_path)) == 1
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_the_block_leaves_old_contents_and_no_other_file(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"old")
    with pytest.raises(error), write_atomically(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_path_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    with write_atomically(path) as first:
        with write_atomically(path) as second:
            first.write(b"first")
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


# ---- removing unfinished files ----


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("other_machine", [False, True])
def test_file_of_a_live_writer_survives(old: bool, other_machine: bool, tmp_path: Path) -> None:
    with writer(tmp_path / "deep" / "numbers") as process:
        (unfinished,) = list_unfinished(tmp_path)
        if old:
            make_old(unfinished)
        name = unfinished
        if other_machine:
            name = rename_to_other_machine(unfinished)
        remove_unfinished(tmp_path)
        assert name.read_bytes() == b"half of it"
        name.rename(unfinished)
        process.communicate("finish\n")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "deep" / "numbers"]


def test_file_of_a_writer_in_this_process_survives(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "numbers") as file:
        file.write(b"1")
        remove_unfinished(tmp_path)
    assert (tmp_path / "numbers").read_bytes() == b"1"


def test_file_of_a_killed_writer_goes_at_once(tmp_path: Path) -> None:
    with writer(tmp_path / "deep" / "numbers") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list_unfinished(tmp_path)) == 1
    remove_unfinished(tmp_path)
    assert list((tmp_path / "deep").iterdir()) == []


def test_file_of_another_machine_goes_only_after_a_day(tmp_path: Path) -> None:
    """Its lock may not be visible here."""
    with writer(tmp_path / "numbers") as process:
        process.kill()
        process.wait()
    assert_removed_only_if_old(rename_to_other_machine(list_unfinished(tmp_path)[0]))


def test_file_without_locks_goes_only_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system or an operating system that does not support locks."""

    def refuse(*args: object) -> None:
        raise OSError("locks are not supported")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with write_atomically(tmp_path / "numbers") as file:
        file.write(b"1")
        remove_unfinished(tmp_path)
    assert (tmp_path / "numbers").read_bytes() == b"1"
    left = tmp_path / f"numbers.{files._get_machine()}.ab12.unfinished"
    left.write_bytes(b"2")
    assert_removed_only_if_old(left)


def test_no_locks_in_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with write_atomically(tmp_path / "numbers") as file:
        file.write(b"1")
        remove_unfinished(tmp_path)
    left = tmp_path / "numbers.ab12.unfinished"
    left.write_bytes(b"2")
    make_old(left)
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers"]


def test_process_ids_in_names_mean_nothing(tmp_path: Path) -> None:
    """Names that contain the id of a process that exists, and of one that does not."""
    paths = [tmp_path / f"numbers.{pid}.unfinished" for pid in (os.getpid(), os.getppid(), 999_999_999)]
    for path in paths:
        path.write_bytes(b"")
    for path in paths:
        assert_removed_only_if_old(path)


def test_writer_tries_again_if_a_cleaner_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner removes the new file between its creation and its lock, then holds the lock of the next one."""
    lock, calls = files._try_lock, []

    def be_slow(file: object) -> bool | None:
        calls.append(file)
        if len(calls) == 1:
            for path in list_unfinished(tmp_path):
                path.unlink()
        return False if len(calls) == 2 else lock(file)

    monkeypatch.setattr(files, "_try_lock", be_slow)
    with write_atomically(tmp_path / "numbers") as file:
        file.write(b"1")
    assert len(calls) == 3 and (tmp_path / "numbers").read_bytes() == b"1"


def test_only_unfinished_files_of_the_given_file_are_removed(tmp_path: Path) -> None:
    machine = files._get_machine()
    own, other, kept = (tmp_path / name for name in (f"a.{machine}.1.unfinished", f"b.{machine}.1.unfinished", "a.txt"))
    for path in (own, other, kept):
        path.write_bytes(b"")
    remove_unfinished(tmp_path / "a")
    assert not own.exists() and other.exists() and kept.exists()
    remove_unfinished(tmp_path / "missing" / "a")
