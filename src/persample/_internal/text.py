"""Text for people: tables, numbers of bytes, counts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch


def format_table(
    rows: Sequence[Sequence[str]],
    header: Sequence[str] = (),
    *,
    right: Collection[int] = (),
    rule: bool = False,
    indent: str = "",
) -> str:
    """Align the cells of a table; each column is as wide as its widest cell.

    `right` holds the positions of columns that are aligned on the right. `rule` draws a line below the header.

    >>> print(format_table([["a", "5"], ["bias", "10"]], ["name", "size"], right={1}, rule=True, indent="  "))
      name  size
      ----  ----
      a        5
      bias    10
    """
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if header and rule:
        lines.insert(1, ["-" * width for width in widths])
    return "\n".join(indent + format_row(line, widths, right) for line in lines)


def format_row(cells: Sequence[str], widths: Sequence[int], right: Collection[int] = ()) -> str:
    """One line of a table, for tables that are printed while their rows are computed.

    >>> format_row(["bias", "10"], [6, 4], right={1})
    'bias      10'
    """
    pairs = enumerate(zip(cells, widths, strict=True))
    return "  ".join(cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in pairs).rstrip()


def format_bytes(count: float) -> str:
    """A number of bytes in three digits and a decimal unit.

    >>> format_bytes(12), format_bytes(4_200_000), format_bytes(1.5e16)
    ('12 B', '4.2 MB', '1.5e+04 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_count(count: int, noun: str) -> str:
    """A number with its noun, in the plural where needed.

    >>> format_count(1, "example"), format_count(1797, "example")
    ('1 example', '1,797 examples')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_list(items: Sequence[object], most: int = 10) -> str:
    """The first items, separated by commas, and how many more there are.

    >>> format_list([3, 5]), format_list(range(1200), most=2)
    ('3, 5', '0, 1 and 1,198 more')
    """
    shown = ", ".join(map(str, items[:most]))
    return shown + (f" and {len(items) - most:,} more" if len(items) > most else "")


def describe_value(value: Any) -> str:
    """Describe a value for an error message.

    >>> describe_value(torch.ones(2, 3)), describe_value((torch.ones(2), "a")), describe_value(3), describe_value(None)
    ('a tensor of shape (2, 3)', 'a tuple of 2 (Tensor, str)', 'an int', 'None')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, Tensor):
        # While a step is traced, the user's code sees fake tensors.
        is_plain = type(value) in (Tensor, nn.Parameter, _torch.FakeTensor)
        layout = "" if value.layout is torch.strided else f"{value.layout} ".removeprefix("torch.")
        return f"{_add_article(layout + ('tensor' if is_plain else name))} of shape {tuple(value.shape)}"
    if not isinstance(value, (tuple, list)):
        return _add_article(name)
    types = [type(part).__name__ for part in value[:4]] + ["..."] * (len(value) > 4)
    return f"{_add_article(name)} of {len(value)}" + (f" ({', '.join(types)})" if types else "")


def _add_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None.

    >>> replace_nonfinite({"loss": float("nan"), "range": (0.0, float("inf"))})
    {'loss': None, 'range': [0.0, None]}
    """
    if isinstance(value, dict):
        return {key: replace_nonfinite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_values(value: float | Sequence[float | None] | None, most: int = 4) -> str:
    """A number with four significant digits, or the first numbers of a vector; a question mark for None.

    >>> format_values(0.5), format_values([12345.678, None]), format_values([1.0] * 9)
    ('0.5', '(1.235e+04, ?)', '(1, 1, 1, 1, … 9 numbers)')
    """
    if isinstance(value, Sequence):
        rest = [f"… {len(value)} numbers"] if len(value) > most else []
        return f"({', '.join([*map(format_values, value[:most]), *rest])})"
    return "?" if value is None else f"{value:.4g}"
