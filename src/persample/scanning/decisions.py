"""Decisions about suspects, kept in the folder of a scan.

Each is a line of JSON; the last one about an example counts.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from persample.scanning.errors import ScanError, explain_write_errors
from persample.scanning.folder import Folder

FILE = "review.jsonl"
WORDS = ("accept", "keep", "relabel", "remove", "unsure")
_MAX_LABEL = 1000  # characters


@dataclass(frozen=True)
class Decision:
    """What to do with an example: `word` is one of `WORDS`, `label` is the new label of accept and relabel."""

    word: str
    label: str = ""

    @property
    def new_label(self) -> str:
        """The cell `new_label` of a file of fixes: empty if the example stays as it is."""
        return "remove" if self.word == "remove" else self.label if self.word in ("accept", "relabel") else ""


class Decisions:
    """The decisions that are stored in a folder."""

    def __init__(self, folder: Folder | str | Path) -> None:
        self._folder = folder if isinstance(folder, Folder) else Folder(folder)
        self.path = self._folder.directory / FILE

    def read(self) -> dict[int, Decision]:
        """The last decision about each example. A line that was cut off counts for nothing."""
        found: dict[int, Decision] = {}
        self._folder.fetch(self.path)
        lines = self.path.read_text("utf-8", "replace").splitlines() if self.path.is_file() else []
        for line in lines:
            try:
                i, decision = parse_decision(json.loads(line))
            except (ValueError, ScanError):
                continue
            found.pop(i, None)
            if decision is not None:
                found[i] = decision
        return found

    def add(self, i: int, decision: Decision | None) -> None:
        """Store a decision; None takes back the one that was made. No link is followed."""
        self._folder.fetch(self.path)
        entry: dict[str, Any] = {"id": i, **(asdict(decision) if decision else {"word": None})}
        with explain_write_errors(self.path):
            flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
            with open(os.open(self.path, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        self._folder.synchronise()


def parse_decision(entry: Any) -> tuple[int, Decision | None]:
    """The example and the decision in an entry that a browser or a file holds.

    >>> parse_decision({"id": 7, "word": "relabel", "label": "cat"}), parse_decision({"id": 7, "word": None})
    ((7, Decision(word='relabel', label='cat')), (7, None))
    """
    found = entry if isinstance(entry, dict) else {}
    i, word, label = found.get("id"), found.get("word"), found.get("label") or ""
    is_id = isinstance(i, int) and not isinstance(i, bool) and i >= 0
    is_label = isinstance(label, str) and len(label) <= _MAX_LABEL
    if not isinstance(i, int) or not (is_id and is_label and (word is None or word in WORDS)):
        raise ScanError("A decision has an id, one of the words " + ", ".join(WORDS) + ", and a label.")
    return i, None if word is None else Decision(word, label)
