"""What can go wrong in a scan."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from persample.errors import PerSampleError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ScanError(PerSampleError):
    """A scan, or a question to one, cannot be carried out; the message says why, and what can be done."""


class NotFinite(ScanError):
    """Examples whose loss or gradient is not a number, or infinite; `ids` are theirs."""

    def __init__(self, ids: Sequence[int], what: str) -> None:
        self.ids = list(ids)
        shown = ", ".join(map(str, self.ids[:10])) + (f" and {len(self.ids) - 10} more" if len(self.ids) > 10 else "")
        examples = "example" if len(self.ids) == 1 else "examples"
        super().__init__(
            f"The {what} of {examples} {shown} is not a finite number. Look at them, leave them out, or have them in "
            "the table as they are with nonfinite='keep'."
        )


class NoRoom(ScanError):
    """The disk is full."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in one line why a file cannot be written, and what to do where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise NoRoom(
                f"There is no room for {path} ({error.strerror}). What was finished is whole: make room and scan "
                "again, and it goes on from there."
            ) from error
        raise ScanError(f"{path} cannot be written: {error.strerror or error}") from error
