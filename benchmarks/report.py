"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import targets
from persample._internal.text import format_row, format_table

Cell = dict[str, Any]
WORKLOAD, COLUMN = 17, 16  # widths in the table that is printed line by line


def times(quantity: str, tables: dict[str, dict[str, dict[str, Cell]]], engines: Sequence[str]) -> Iterator[str]:
    """The ratios to plain for a quantity, with their quartiles: a line for each workload.

    The quartiles of the plain step's own times, over their median, say how quiet the machine was.
    """
    shown = [name for name in engines if any(name in table[quantity] for table in tables.values())]
    rows = []
    for workload, table in tables.items():
        cells = table[quantity]
        low, high = cells["plain"]["quartiles"]
        plain = f"{cells['plain']['milliseconds']:.1f} ({low:.2f}-{high:.2f})"
        rows.append([workload, plain, *(_time(cells.get(name)) for name in shown)])
    yield f"\n{quantity}: time over that of a plain step, median of rounds (quartiles)"
    yield _format_figures(["", "plain, ms", *shown], rows)


def peaks(quantity: str, tables: dict[str, dict[str, dict[str, Cell]]], engines: Sequence[str]) -> Iterator[str]:
    """The peak memory for a quantity over that of a plain step: a line for each workload."""
    shown = [name for name in engines if any(name in table[quantity] for table in tables.values())]
    rows = []
    for workload, table in tables.items():
        plain = table[quantity]["plain"]
        cells = (_peak(table[quantity].get(name), plain) for name in shown)
        rows.append([workload, f"{plain['peak'] / 1e6:.1f}", *cells])
    yield f"\n{quantity}: peak memory of a step over that of a plain one (in brackets, after the first step)"
    yield _format_figures(["", "plain, MB", *shown], rows)


def notes(tables: Iterable[dict[str, dict[str, Cell]]]) -> Iterator[str]:
    """What the stars stand for."""
    rows = (cells for table in tables for cells in table.values())
    found = {(name, cell["note"]) for cells in rows for name, cell in cells.items() if "note" in cell}
    if found:
        yield "\n* not as the model is written, but with:"
    for name, note in sorted(found):
        yield f"  {name}: {note}"


def time_targets(tables: dict[str, dict[str, dict[str, Cell]]]) -> Iterator[str]:
    """Target by target: what is asked, what was measured, and the best of the others."""
    rows = []
    for workload, table in tables.items():
        for quantity, most in targets.TIME.get(workload, {}).items():
            cells = table.get(quantity, {})
            if "ratio" in cells.get("ours", {}):
                found, best = cells["ours"]["ratio"], best_peer(cells)
                verdict = "met" if found <= most else "not met"
                rows.append([workload, quantity, f"{most:.2f}", f"{found:.2f}", best, verdict])
    yield "\ntargets of time"
    yield format_table(rows, ["", "", "at most", "ours", "best of the others", ""], right={2, 3})


def memory_targets(tables: dict[str, dict[str, dict[str, Cell]]]) -> Iterator[str]:
    """Target by target, for memory. Dense rows: what is taken beyond a plain step, over the size of the rows."""
    rows = []
    for workload, table in tables.items():
        for engine, bars in targets.MEMORY.items():
            for quantity, most in bars.items():
                cells = table.get(quantity, {})
                if "peak" in cells.get(engine, {}):
                    found, later = (cells[engine][key] / cells["plain"]["peak"] for key in ("peak", "later"))
                    tensors = cells[engine]["tensors"] / cells["plain"]["tensors"]
                    rows.append(_memory_row(workload, f"{quantity}, {engine}", most, found, later, tensors))
        cells = table.get("dense", {})
        if "peak" in cells.get("ours", {}):
            size, plain = cells["ours"]["result"], cells["plain"]["peak"]
            found, later = ((cells["ours"][key] - plain) / size for key in ("peak", "later"))
            rows.append(_memory_row(workload, "dense, beyond plain / rows", targets.DENSE_MEMORY, found, later))
    yield "\ntargets of memory"
    yield format_table(
        rows, ["", "", "at most", "resident", "after the first step", "tensors alone", ""], right={2, 3, 4, 5}
    )


def growth_line(axis: str, value: int, times: dict[str, Cell], peaks: dict[str, Cell], engines: Sequence[str]) -> str:
    """Time and memory at a point, over those of a plain step."""
    cells = []
    for name in engines:
        time, peak = _time(times.get(name), spread=False), _peak(peaks.get(name), peaks["plain"], later=False)
        cells.append(time if "failure" in times.get(name, {}) else f"{time} | {peak}")
    plain = f"{times['plain']['milliseconds']:.0f} | {peaks['plain']['peak'] / 1e6:.0f}"
    return _format_line([f"{axis} {value}", plain, *cells])


def growth_head(quantities: Sequence[str], engines: Sequence[str]) -> str:
    """The line above those of the points."""
    title = f"\ngrowth, {' and '.join(quantities)}: time | peak memory over those of a plain step (its own in ms | MB)"
    return title + "\n" + _format_line(["", "plain", *engines])


def best_peer(cells: dict[str, Cell]) -> str:
    """The fastest engine that is not ours, and its ratio."""
    others = {n: c["ratio"] for n, c in cells.items() if "ratio" in c and n != "plain" and not n.startswith("ours")}
    if not others:
        return "none"
    best = min(others, key=others.__getitem__)
    return f"{others[best]:.2f} {best}"


def _memory_row(
    workload: str, what: str, most: float, found: float, later: float, tensors: float | None = None
) -> list[str]:
    verdicts = {"met": found, "met after the first step": later, "met by the tensors": tensors}
    verdict = next((words for words, ratio in verdicts.items() if ratio is not None and ratio <= most), "not met")
    figures = ["" if figure is None else f"{figure:.2f}" for figure in (most, found, later, tensors)]
    return [workload, what, *figures, verdict]


def _time(cell: Cell | None, spread: bool = True) -> str:
    if cell is None or "failure" in cell:
        return _failure(cell)
    low, high = cell["quartiles"]
    figures = f"{_short(cell['ratio'])} ({_short(low)}-{_short(high)})" if spread else _short(cell["ratio"])
    return figures + _star(cell)


def _peak(cell: Cell | None, plain: Cell, later: bool = True) -> str:
    if cell is None or "failure" in cell:
        return _failure(cell)
    figures = _short(cell["peak"] / plain["peak"]) + (f" ({_short(cell['later'] / plain['peak'])})" if later else "")
    return figures + _star(cell)


def _failure(cell: Cell | None) -> str:
    return "–" if cell is None else cell["failure"].replace("error: ", "")


def _star(cell: Cell) -> str:
    return "*" if "note" in cell else ""


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _format_figures(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return format_table(rows, header, right=range(1, len(header)))


def _format_line(cells: Sequence[str]) -> str:
    columns = range(1, len(cells))
    return format_row(cells, [WORKLOAD, *(COLUMN for _ in columns)], right=columns)
