"""An issue: which examples have it, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from persample.scanning.store import Array


@dataclass(frozen=True)
class Issue:
    """A type of issue in the conventions of cleanlab's Datalab: a flag and a score for each example.

    Scores lie between 0 and 1; low scores are bad. An issue of the data as a whole has its own `score`, and may flag
    no example.
    """

    name: str
    flags: Array  # (examples,) of bool
    scores: Array  # (examples,) of float
    info: Mapping[str, Any] = field(default_factory=dict)
    overall: float | None = None  # for issues of the data as a whole

    @property
    def score(self) -> float:
        """The score of the data: that of the data as a whole, or the mean over the examples."""
        return float(np.mean(self.scores)) if self.overall is None else self.overall

    @property
    def count(self) -> int:
        """The number of examples with the issue; for properties of the data, their number."""
        return int(self.info.get("count", self.flags.sum()))

    @property
    def worst(self) -> list[int]:
        """The examples with the issue, worst first."""
        order = np.argsort(self.scores, kind="stable")
        return order[self.flags[order]].tolist()


class Issues(dict[str, Issue]):
    """Issues by name, in the conventions of cleanlab's Datalab."""

    def table(self) -> pa.Table:
        """One row per example, with the columns `is_NAME_issue` and `NAME_score` of each issue."""
        columns: dict[str, Any] = {}
        for name, issue in self.items():
            columns |= {f"is_{name}_issue": pa.array(issue.flags), f"{name}_score": pa.array(issue.scores)}
        return pa.table(columns)

    def summary(self) -> list[dict[str, Any]]:
        """The type, the score and the number of examples of each issue."""
        return [{"issue_type": name, "score": one.score, "num_issues": one.count} for name, one in self.items()]


def flag(name: str, size: int, ids: Any, scores: Array | None = None, **info: Any) -> Issue:
    """The issue of some examples. Without scores, these have 0 and all others 1."""
    flags = np.zeros(size, dtype=bool)
    flags[np.asarray(list(ids), dtype=int)] = True
    return Issue(name, flags, np.where(flags, 0.0, 1.0) if scores is None else np.clip(scores, 0, 1), info)
