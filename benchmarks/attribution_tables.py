"""The tables of docs/internals/scan_evidence.md from `attribution.json`.

python -m benchmarks.attribution_tables
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.output import RESULTS

Tasks = Mapping[str, Mapping[str, Any]]


def format_lds(tasks: Tasks) -> str:
    """The LDS of each method with its default damping and its interval, and with the damping that was tuned."""
    last = ["highest that can be reached", *(f"{task['ceiling']:.2f}" for task in tasks.values())]
    return _format_table("LDS: default damping / tuned", tasks, [*_list_methods(tasks, _format_scores), last])


def format_seconds(tasks: Tasks) -> str:
    """The processor time of each method with its default damping, for all test samples."""
    return _format_table(
        "processor time, seconds", tasks, _list_methods(tasks, lambda row: f"{row['processor_seconds']:.2g}")
    )


def format_auc(tasks: Tasks) -> str:
    """The area under the ROC curve of each ranking, for flipped labels."""
    names = next(iter(tasks.values()))["mislabel_auc"]
    rows = [[name, *(_format_interval(task["mislabel_auc"][name]) for task in tasks.values())] for name in names]
    return _format_table("flipped labels, AUC", tasks, rows)


def _list_methods(tasks: Tasks, format_row: Callable[[Mapping[str, Any]], str]) -> list[list[str]]:
    by_task = [{row["method"]: row for row in task["lds"]} for task in tasks.values()]
    return [
        [name, *("failed" if "error" in rows[name] else format_row(rows[name]) for rows in by_task)]
        for name in by_task[0]
    ]


def _format_scores(row: Mapping[str, Any]) -> str:
    tuned = f" / {row['tuned']['value']:.2f}" if row["tuned"] else ""
    return _format_interval(row["default"]) + tuned


def _format_interval(found: Mapping[str, float]) -> str:
    value, low, high = (round(found[key], 2) + 0.0 for key in ("value", "low", "high"))  # + 0.0: no "-0.00"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _format_table(title: str, tasks: Tasks, rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in ([title, *tasks], *rows)]
    return "\n".join([lines[0], "|---" * (1 + len(tasks)) + "|", *lines[1:]])


def main() -> None:
    """Print all tables."""
    tasks = json.loads((RESULTS / "attribution.json").read_text())["tasks"]
    print("\n\n".join(make_table(tasks) for make_table in (format_lds, format_seconds, format_auc)))


if __name__ == "__main__":
    main()
