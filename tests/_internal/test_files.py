"""Atomic writes, and which unfinished files may be removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from persample._internal import files
from persample._internal.files import (
    SymlinkRefused,
    is_unfinished,
    open_archive,
    remove_unfinished,
    write_atomically,
)

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


# ---- symbolic links, permissions, archives ----


def test_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "numbers"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    with write_atomically(path) as file:
        file.write(b"new")
    assert target.read_bytes() == b"precious"
    assert not path.is_symlink() and path.read_bytes() == b"new"


def test_unfinished_file_is_never_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if somebody guesses its name."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "ab" * size)
    (tmp_path / f"numbers.{files._get_machine()}.{'ab' * 8}.unfinished").symlink_to(target)
    with pytest.raises(FileExistsError), write_atomically(tmp_path / "numbers") as file:
        file.write(b"new")
    assert target.read_bytes() == b"precious"


def test_no_file_is_written_behind_a_linked_directory(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "0").symlink_to(elsewhere)
    for path in (root / "0" / "numbers", root / "0" / "new" / "numbers"):
        with pytest.raises(SymlinkRefused, match="is a symbolic link"), write_atomically(path, root):
            pass
    assert list(elsewhere.iterdir()) == []
    with write_atomically(root / "1" / "numbers", root) as file:
        file.write(b"1")


def test_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    with write_atomically(tmp_path / "root" / "0" / "numbers", tmp_path / "root") as file:
        file.write(b"1")
    assert (tmp_path / "disk" / "0" / "numbers").read_bytes() == b"1"


def test_unfinished_files_behind_links_stay(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    kept = elsewhere / f"numbers.{files._get_machine()}.1.unfinished"
    kept.write_bytes(b"precious")
    make_old(kept)
    (root / "0").symlink_to(elsewhere)
    (root / "link.1.unfinished").symlink_to(kept)
    (tmp_path / "other name").symlink_to(elsewhere)
    os.mkfifo(root / "pipe.1.unfinished")
    for path in (root, tmp_path / "other name"):
        remove_unfinished(path)
    assert kept.read_bytes() == b"precious"
    assert (root / "link.1.unfinished").is_symlink() and (root / "pipe.1.unfinished").exists()


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_new_files_have_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "numbers"
    before = os.umask(umask)
    try:
        with write_atomically(path) as file:
            file.write(b"1")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert path.parent.stat().st_mode & 0o777 == 0o777 & ~umask


def test_archive_that_expands_is_refused(tmp_path: Path) -> None:
    small, large = tmp_path / "small.zip", tmp_path / "large.zip"
    with zipfile.ZipFile(small, "w") as archive:
        archive.writestr("a", bytes(1000))
    with open_archive(small) as archive:
        assert archive.read("a") == bytes(1000)
    with zipfile.ZipFile(large, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(100_000))
    with pytest.raises(ValueError, match=r"would take 100,000 bytes, but the file has only \d+"), open_archive(large):
        pass
