"""From suspects to corrected data: a CSV file to fill in, and a copy of the data with its corrections.

The file has a row for each suspect: its id, name and given label, what the model suggests, and scores. The user writes
into the column `new_label`: the name of a class, or `remove`; an empty cell keeps the example as it is.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import parquet

from persample._internal.text import format_list
from persample.scanning.decisions import Decisions
from persample.scanning.errors import ScanError, explain_write_errors
from persample.scanning.results import Scan
from persample.scanning.table import escape_formula, make_key

REMOVE = "remove"
_DESCRIBED = ("name", "given", "suggested", "predicted", "probability", "given_probability", "prediction", "target")
_SCORES = ("loss", "mean_loss", "norm", "self_influence")


# ---- export ----


def write_suspects(
    scan: Scan,
    path: str | Path,
    by: str | None = None,
    k: int | None = None,
    accept: bool = False,
    reviewed: bool = False,
) -> int:
    """Write the suspects of a scan to a CSV file, to be filled in; return their number.

    The suspects are those before the cut of `Scan.suspects`, or the first `k`; with `reviewed`, the examples that were
    decided about in `persample review`. With `accept`, the suggested labels are filled in. Decisions are filled in
    anyway. `key` is the name in a form that no spreadsheet changes: `urllib.parse.unquote(key)` is the name.
    """
    decisions = Decisions(scan.store).read()
    ids = (scan.suspects(by) if k is None else scan.ranked(by, k)).ids.tolist()
    ids = [i for i in decisions if i < len(scan)] if reviewed else ids
    scores = {name: scan.column(name) for name in _SCORES if name in scan.columns}
    rows = []
    for i, example in zip(ids, scan.describe(ids), strict=True):
        example["given"] = example.pop("label", None)
        key = {"key": make_key(example["name"])} if example.get("name") else {}
        row = {"id": i, **key, **{name: example[name] for name in _DESCRIBED if name in example}}
        row |= {name: float(column[i]) for name, column in scores.items()}
        decision = decisions.get(i)
        new_label = decision.new_label if decision else (example.get("suggested") or "") if accept else ""
        rows.append({**row, "decision": decision.word if decision else "", "new_label": new_label})
    header = list(rows[0]) if rows else ["id", "new_label"]
    with explain_write_errors(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows([[_format_cell(value) for value in row.values()] for row in rows])
    return len(rows)


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        escape_formula(value) if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
    )


# ---- fixes ----


@dataclass(frozen=True)
class Fix:
    """A row that the user has filled in."""

    id: int
    name: str
    given: str
    new: str

    @property
    def removes(self) -> bool:
        """Whether the example is removed."""
        return self.new.lower() == REMOVE

    @property
    def removes_unlabelled(self) -> bool:
        """Whether an example is removed whose label the scan does not know, such as a file that cannot be read."""
        return self.removes and not self.given

    def __str__(self) -> str:
        return f"{self.id} ({self.name})" if self.name else str(self.id)


def read_fixes(path: str | Path) -> list[Fix]:
    """The rows of a CSV file of suspects that have a new label which is not the given one."""
    if not Path(path).is_file():
        raise ScanError(f"There is no file {path}.")
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"id", "new_label"} <= set(rows[0]):
        raise ScanError(f"{path} has no columns id and new_label. Write it with `persample export`.")
    fixes = []
    for line, row in enumerate(rows, 2):
        cells = {key: _unescape((value or "").strip()) for key, value in row.items() if key is not None}
        if not cells["id"].isdecimal():
            raise ScanError(f"Line {line} of {path} has the id {cells['id']!r}, which is no number.")
        name = unquote(cells["key"]) if cells.get("key") else cells.get("name", "")
        fix = Fix(int(cells["id"]), name, cells.get("given", ""), cells["new_label"])
        if fix.new and fix.new != fix.given:
            fixes.append(fix)
    if len({fix.id for fix in fixes}) < len(fixes):
        raise ScanError(f"{path} has several rows with the same id.")
    return fixes


def _unescape(text: str) -> str:
    """A text without the apostrophe that `escape_formula` has put in front."""
    return text[1:] if text.startswith("'") and escape_formula(text[1:]) == text else text


# ---- folders ----


def apply_to_folder(fixes: Sequence[Fix], folder: str | Path, out: str | Path) -> None:
    """Copy a folder of images, with each fixed image in the folder of its new class, or without it if it is removed."""
    root, out = Path(folder), Path(out)
    if not root.is_dir():
        raise ScanError(f"There is no folder {root}.")
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    for fix in fixes:
        place = PurePosixPath(fix.name)
        if not fix.name or place.is_absolute() or ".." in place.parts or not (root / place).is_file():
            raise ScanError(f"{root} has no file {fix.name!r}, the name of example {fix.id}.")
        if place.parts[0] != fix.given and not fix.removes_unlabelled:
            raise ScanError(
                f"Example {fix} has the class {place.parts[0]!r} in {root}, but {fix.given!r} in the fixes."
            )
    _check_labels(fixes, classes, f"folders of {root}; make a folder for a new class")
    with _make_copy(root, out) as copy:
        shutil.copytree(root, copy, symlinks=True)
        for fix in fixes:
            source = copy / fix.name
            if fix.removes:
                source.unlink()
                continue
            target = copy / _find_free_place(fix, [root, copy])
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)


def _find_free_place(fix: Fix, folders: Sequence[Path]) -> PurePosixPath:
    """The place of the image in the folder of its new class, with another name if one of `folders` has that file.

    A name that only the original folder has is not reused: `compare_scans` would take one image for the other.
    """
    place = PurePosixPath(fix.new, *PurePosixPath(fix.name).parts[1:])
    renamed = place.with_name(f"{fix.given}-{place.name}")
    numbered = (renamed.with_stem(f"{renamed.stem}-{i}") for i in range(1, 1_000_000))
    places = itertools.chain([place, renamed], numbered)
    return next(place for place in places if not any((folder / place).exists() for folder in folders))


# ---- tables ----


def apply_to_table(fixes: Sequence[Fix], table: str | Path, out: str | Path, label: str = "label") -> None:
    """Copy a CSV, JSONL or Parquet file, with the new labels, and without the rows that are removed.

    All other cells stay as they are. Ids are the numbers of rows, from 0.
    """
    path, out = Path(table), Path(out)
    if not path.is_file():
        raise ScanError(f"There is no file {path}.")
    if path.suffix not in _COPIES:
        raise ScanError(f"{path} must be one of {', '.join(_COPIES)}.")
    if out.suffix != path.suffix:
        raise ScanError(f"{out} must end in {path.suffix}, as {path} does.")
    with _make_copy(path, out) as copy:
        _COPIES[path.suffix](path, copy, {fix.id: fix for fix in fixes}, label)


def _copy_csv(path: Path, copy: Path, fixes: dict[int, Fix], label: str) -> None:
    with open(path, newline="", encoding="utf-8-sig") as file:
        header, *rows = [row for row in csv.reader(file) if row]
    if label not in header:
        raise ScanError(f"{path} has no column '{label}'. It has {', '.join(header)}.")
    at = header.index(label)
    _check_rows(fixes, [row[at] if at < len(row) else "" for row in rows], path)
    with open(copy, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for i, row in enumerate(rows):
            if i not in fixes:
                writer.writerow(row)
            elif not fixes[i].removes:
                writer.writerow([*row[:at], fixes[i].new, *row[at + 1 :]])


def _copy_json_lines(path: Path, copy: Path, fixes: dict[int, Fix], label: str) -> None:
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines]
    _check_rows(fixes, [_to_text(record.get(label)) for record in records], path)
    numbers = all(isinstance(record.get(label), int) for record in records)
    with open(copy, "w", encoding="utf-8") as file:
        for i, (line, record) in enumerate(zip(lines, records, strict=True)):
            if i not in fixes:
                file.write(line + "\n")
            elif not fixes[i].removes:
                changed = {**record, label: int(fixes[i].new) if numbers else fixes[i].new}
                file.write(json.dumps(changed, ensure_ascii=False) + "\n")


def _copy_parquet(path: Path, copy: Path, fixes: dict[int, Fix], label: str) -> None:
    table = parquet.read_table(path)
    if label not in table.column_names:
        raise ScanError(f"{path} has no column '{label}'. It has {', '.join(table.column_names)}.")
    values = table[label].to_pylist()
    _check_rows(fixes, [_to_text(value) for value in values], path)
    numbers = all(isinstance(value, int) for value in values)
    for i, fix in fixes.items():
        if not fix.removes:
            values[i] = int(fix.new) if numbers else fix.new
    at = table.column_names.index(label)
    table = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    kept = [i for i in range(len(table)) if i not in fixes or not fixes[i].removes]
    parquet.write_table(table.take(kept), copy)


_COPIES: dict[str, Callable[[Path, Path, dict[int, Fix], str], None]] = {
    ".csv": _copy_csv,
    ".jsonl": _copy_json_lines,
    ".parquet": _copy_parquet,
}


def _check_rows(fixes: dict[int, Fix], labels: Sequence[str], path: Path) -> None:
    """Refuse fixes of rows that do not exist, or have another label than the fixes say."""
    for fix in fixes.values():
        if fix.id >= len(labels):
            raise ScanError(f"{path} has {len(labels)} rows, but the fixes have example {fix}.")
        if labels[fix.id] != fix.given and not fix.removes_unlabelled:
            raise ScanError(
                f"Row {fix.id} of {path} has the label {labels[fix.id]!r}, but {fix.given!r} in the fixes: the table "
                "has changed since the scan, or its labels are numbers of the classes that the fixes name."
            )
    _check_labels(list(fixes.values()), sorted(set(labels)), f"labels of {path}")


def _check_labels(fixes: Sequence[Fix], known: Sequence[str], what: str) -> None:
    if unknown := [fix for fix in fixes if not fix.removes and fix.new not in known]:
        raise ScanError(
            f"Example {unknown[0]} has the new label {unknown[0].new!r}, which is none of the {what}: "
            f"{format_list(known, 20)}. Write one of them, or `{REMOVE}`."
        )


def _to_text(value: Any) -> str:
    return "" if value is None else str(value)


# ---- copies ----


@contextmanager
def _make_copy(source: Path, out: Path) -> Iterator[Path]:
    """Yield a temporary path beside `out`, which gets its name if the block succeeds. Nothing is ever overwritten."""
    inside = out.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(out.resolve())
    if inside or os.path.lexists(out):
        reason = f"overlaps with {source}" if inside else "exists already"
        raise ScanError(f"{out} {reason}. Corrected data is written to a new place, and never over other data.")
    with explain_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".persample-", dir=out.parent) as folder:
            copy = Path(folder) / out.name
            yield copy
            copy.rename(out)
