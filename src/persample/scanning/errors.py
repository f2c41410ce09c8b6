"""Errors of a scan."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from persample._internal.files import SymlinkRefused
from persample._internal.text import format_list
from persample.errors import PerSampleError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ScanError(PerSampleError):
    """A scan or a query cannot be carried out; the message says why and what to do."""


class NotFinite(ScanError):
    """The loss or the gradient of the examples `ids` is infinite or not a number."""

    def __init__(self, ids: Sequence[int], quantity: str) -> None:
        self.ids, self.quantity = list(ids), quantity
        noun = "example" if len(self.ids) == 1 else "examples"
        super().__init__(
            f"The {quantity} of {noun} {format_list(self.ids, _SHOWN)} is not a finite number. Correct or remove these "
            "examples, or pass nonfinite='keep' to keep them in the table."
        )


class UnreadableExample(ScanError):
    """An example cannot be read from its file."""


class BadExamples(ScanError):
    """Examples that cannot be scanned. `ids` are all of them, `reasons` maps what is wrong to ids with details."""

    def __init__(self, reasons: Mapping[str, Mapping[int, str]], get_name: Callable[[int], str | None]) -> None:
        self.reasons = {reason: dict(examples) for reason, examples in reasons.items()}
        self.ids = sorted({i for examples in reasons.values() for i in examples})
        parts = []
        for reason, examples in self.reasons.items():
            listed = [_describe_example(i, get_name(i), detail) for i, detail in examples.items()]
            parts.append(f"{reason}: {format_list(listed, _SHOWN)}")
        count = "1 example" if len(self.ids) == 1 else f"{len(self.ids):,} examples"
        super().__init__(
            f"{count} cannot be scanned; {'; '.join(parts)}. Correct or remove them, or skip them with skip_bad=True."
        )


_SHOWN = 50  # ids in a message


def _describe_example(i: int, name: str | None, detail: str) -> str:
    about = ", ".join(filter(None, [name, detail]))
    return f"{i} ({about})" if about else str(i)


class DiskFull(ScanError):
    """There is no space left for a file of the scan."""


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as a `ScanError` that names the file and says what to do."""
    try:
        yield
    except SymlinkRefused as error:
        raise ScanError(str(error)) from error
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DiskFull(
                f"No space left to write {path} ({error.strerror}). All finished shards are saved: free some space "
                "and run the scan again to continue."
            ) from error
        raise ScanError(f"Cannot write {path}: {error.strerror or error}") from error
