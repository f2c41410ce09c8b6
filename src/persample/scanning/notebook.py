"""Results as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from persample._internal.text import format_values


def format_html_table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", most: int = 20) -> str:
    """A table with at most `most` rows. All texts are escaped.

    >>> format_html_table(["id"], [[3], ["<b>"]], "two")
    '<table><caption>two</caption><tr><th>id</th></tr><tr><td>3</td></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(str(cell))}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(_format(cell))}</td>" for cell in row) for row in rows[:most]]
    if len(rows) > most:
        lines.append(f'<td colspan="{len(header)}">and {len(rows) - most:,} more</td>')
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{f'<caption>{escape(caption)}</caption>' if caption else ''}{body}</table>"


def _format(cell: Any) -> str:
    if cell is None:
        return ""
    return format_values(cell) if isinstance(cell, (float, list)) else str(cell)
