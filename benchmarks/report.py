"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import targets
from benchmarks.run import Cell, Table
from persample._internal.text import format_row, format_table

NAME_WIDTH, COLUMN_WIDTH = 17, 16  # of the table of growth, which is printed line by line


def format_times(quantity: str, tables: dict[str, Table], engines: Sequence[str]) -> str:
    """Ratios to a plain step for a quantity, with quartiles; a line for each workload.

    The quartiles of the plain step are relative to its median. They show how quiet the machine was.
    """
    shown = _select_engines(quantity, tables, engines)
    rows = []
    for workload, table in tables.items():
        cells = table[quantity]
        low, high = cells["plain"]["quartiles"]
        plain = f"{cells['plain']['milliseconds']:.1f} ({low:.2f}-{high:.2f})"
        rows.append([workload, plain, *(_format_time(cells.get(name)) for name in shown)])
    title = f"\n{quantity}: time as a ratio to a plain step, median of rounds (quartiles)"
    return title + "\n" + _format_numbers(["", "plain, ms", *shown], rows)


def format_peaks(quantity: str, tables: dict[str, Table], engines: Sequence[str]) -> str:
    """Peak memory for a quantity as a ratio to a plain step; a line for each workload."""
    shown = _select_engines(quantity, tables, engines)
    rows = []
    for workload, table in tables.items():
        plain = table[quantity]["plain"]
        cells = (_format_peak(table[quantity].get(name), plain) for name in shown)
        rows.append([workload, f"{plain['peak'] / 1e6:.1f}", *cells])
    title = f"\n{quantity}: peak memory as a ratio to a plain step (in brackets: after the first step)"
    return title + "\n" + _format_numbers(["", "plain, MB", *shown], rows)


def format_notes(tables: Iterable[Table]) -> str:
    """The meaning of the stars; empty if there are none."""
    rows = (cells for table in tables for cells in table.values())
    notes = {(name, cell["note"]) for cells in rows for name, cell in cells.items() if "note" in cell}
    lines = [f"  {name}: {note}" for name, note in sorted(notes)]
    return "\n".join(["\n* with a changed model:", *lines]) if lines else ""


def format_time_targets(tables: dict[str, Table]) -> str:
    """For each target of time: the upper bound, the measured ratio, and the best ratio of the peers."""
    rows = []
    for workload, table in tables.items():
        for quantity, bound in targets.TIME.get(workload, {}).items():
            cells = table.get(quantity, {})
            if "ratio" in cells.get("ours", {}):
                ratio, best = cells["ours"]["ratio"], find_best_peer(cells)
                verdict = "met" if ratio <= bound else "not met"
                rows.append([workload, quantity, f"{bound:.2f}", f"{ratio:.2f}", best, verdict])
    header = ["workload", "quantity", "at most", "ours", "best peer", ""]
    return "\ntargets of time\n" + format_table(rows, header, right={2, 3})


def format_memory_targets(tables: dict[str, Table]) -> str:
    """For each target of memory: the upper bound and the measured ratios.

    For dense rows, the ratio is (peak - peak of a plain step) / size of the rows.
    """
    rows = []
    for workload, table in tables.items():
        for engine, bounds in targets.MEMORY.items():
            for quantity, bound in bounds.items():
                cells = table.get(quantity, {})
                if "peak" in cells.get(engine, {}):
                    peak, later = (cells[engine][key] / cells["plain"]["peak"] for key in ("peak", "later"))
                    tensors = cells[engine]["tensors"] / cells["plain"]["tensors"]
                    rows.append(_make_memory_row(workload, f"{quantity}, {engine}", bound, peak, later, tensors))
        cells = table.get("dense", {})
        if "peak" in cells.get("ours", {}):
            size, plain = cells["ours"]["result"], cells["plain"]["peak"]
            peak, later = ((cells["ours"][key] - plain) / size for key in ("peak", "later"))
            rows.append(_make_memory_row(workload, "dense, (peak - plain) / rows", targets.DENSE_MEMORY, peak, later))
    header = ["workload", "quantity", "at most", "resident", "after the first step", "tensors alone", ""]
    return "\ntargets of memory\n" + format_table(rows, header, right={2, 3, 4, 5})


def format_growth_header(quantities: Sequence[str], engines: Sequence[str]) -> str:
    """Title and header of the table of growth."""
    title = f"\ngrowth, {' and '.join(quantities)}: time | peak memory as ratios to a plain step (plain in ms | MB)"
    return title + "\n" + _format_line(["", "plain", *engines])


def format_growth_row(
    axis: str, value: int, times: dict[str, Cell], peaks: dict[str, Cell], engines: Sequence[str]
) -> str:
    """Time and memory at one point as ratios to a plain step."""
    cells = []
    for name in engines:
        time = _format_time(times.get(name), spread=False)
        peak = _format_peak(peaks.get(name), peaks["plain"], later=False)
        cells.append(time if "failure" in times.get(name, {}) else f"{time} | {peak}")
    plain = f"{times['plain']['milliseconds']:.0f} | {peaks['plain']['peak'] / 1e6:.0f}"
    return _format_line([f"{axis} {value}", plain, *cells])


def find_best_peer(cells: dict[str, Cell]) -> str:
    """The fastest engine besides persample, and its ratio."""
    peers = {n: c["ratio"] for n, c in cells.items() if "ratio" in c and n != "plain" and not n.startswith("ours")}
    if not peers:
        return "none"
    best = min(peers, key=peers.__getitem__)
    return f"{peers[best]:.2f} {best}"


def format_ratio(ratio: float) -> str:
    """A ratio with two decimals below 10, and without decimals above."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _select_engines(quantity: str, tables: dict[str, Table], engines: Sequence[str]) -> list[str]:
    """The engines that support a quantity."""
    return [name for name in engines if any(name in table[quantity] for table in tables.values())]


def _make_memory_row(
    workload: str, quantity: str, bound: float, peak: float, later: float, tensors: float | None = None
) -> list[str]:
    verdicts = {"met": peak, "met after the first step": later, "met by the tensors": tensors}
    verdict = next((words for words, ratio in verdicts.items() if ratio is not None and ratio <= bound), "not met")
    numbers = ["" if number is None else f"{number:.2f}" for number in (bound, peak, later, tensors)]
    return [workload, quantity, *numbers, verdict]


def _format_time(cell: Cell | None, spread: bool = True) -> str:
    if cell is None or "failure" in cell:
        return _format_failure(cell)
    low, high = cell["quartiles"]
    quartiles = f" ({format_ratio(low)}-{format_ratio(high)})" if spread else ""
    return format_ratio(cell["ratio"]) + quartiles + _format_star(cell)


def _format_peak(cell: Cell | None, plain: Cell, later: bool = True) -> str:
    if cell is None or "failure" in cell:
        return _format_failure(cell)
    after_first = f" ({format_ratio(cell['later'] / plain['peak'])})" if later else ""
    return format_ratio(cell["peak"] / plain["peak"]) + after_first + _format_star(cell)


def _format_failure(cell: Cell | None) -> str:
    return "–" if cell is None else cell["failure"].replace("error: ", "")


def _format_star(cell: Cell) -> str:
    return "*" if "note" in cell else ""


def _format_numbers(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return format_table(rows, header, right=range(1, len(header)))


def _format_line(cells: Sequence[str]) -> str:
    columns = range(1, len(cells))
    return format_row(cells, [NAME_WIDTH, *(COLUMN_WIDTH for _ in columns)], right=columns)
