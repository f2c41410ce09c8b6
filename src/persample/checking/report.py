"""What a check found, as data and as a table to read."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from persample.errors import PerSampleError
from persample.gradients.matrix import _bytes

WIDTH = 120

# adds up: the rows could not be compared one by one, but their sum is the plain gradient. not finite: also in the loop.
Verdict = Literal["right", "WRONG", "unused", "refused", "adds up", "not finite"]
Outcome = Literal["right", "wrong", "refused", "not compared"]

_HEADLINES: dict[Outcome, str] = {
    "right": "RIGHT: the gradients of {samples} are those of a loop with plain autograd.",
    "wrong": "WRONG: the gradients of {samples} are not those of a loop with plain autograd.",
    "refused": "REFUSED: this model, loss and batch have no per-sample gradients that could be recorded.",
    "not compared": "NOT COMPARED: for the gradients of {samples} there are no numbers to compare each row with.",
}


@dataclass(frozen=True)
class ParameterReport:
    """One parameter: by which rules its gradients came, in which structure, what they cost, whether they are right.

    `rules` are the torch functions that used it, "generic (...)" where they have no rule of their own; "linear (through
    mul)" used what a mul had made of it. `error` is the largest difference from the loop, relative to the scale of its
    row. `norms` is how its norms are computed: "ghost" from inner products of positions, "dense" by making the
    gradient in blocks, "rows" from the rows of a table that were looked up. The bytes are estimates for the whole
    batch: what its term keeps, which may share tensors with others, and what `dense()` would take.
    """

    name: str
    shape: tuple[int, ...]
    verdict: Verdict
    rules: list[str] = field(default_factory=list)
    term: str = ""
    norms: str = ""
    kept_bytes: int = 0
    dense_bytes: int = 0
    error: float | None = None


@dataclass(frozen=True)
class Report:
    """What `persample.check` found; `print` shows it as a table."""

    parameters: list[ParameterReport]
    samples: int  # of the batch, which were compared
    batch_size: int
    dtype: str
    tolerance: float
    refusal: PerSampleError | None = None
    coupled: bool | None = None  # whether samples influence each other in the plain model; None where it is not known
    notes: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        """In a word."""
        verdicts = {p.verdict for p in self.parameters}
        if self.refusal is not None:
            return "refused"
        if "WRONG" in verdicts:
            return "wrong"
        return "not compared" if {"adds up", "not finite"} & verdicts else "right"

    @property
    def ok(self) -> bool:
        """Whether the gradients of every parameter that was used were compared, and are right."""
        return self.outcome == "right"

    def raise_if_wrong(self) -> None:
        """Raises what the recording was refused with, or an error with the table where not all is right."""
        if self.refusal is not None:
            raise self.refusal
        if not self.ok:
            raise PerSampleError(f"persample.check:\n{self}")

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data that `json.dumps` takes; an error that is no number is None."""
        parameters = [asdict(p) for p in self.parameters]
        for row in parameters:
            row["shape"] = list(row["shape"])
            row["error"] = row["error"] if row["error"] is not None and math.isfinite(row["error"]) else None
        refusal = self.refusal and {"type": type(self.refusal).__name__, "message": str(self.refusal)}
        own = ("samples", "batch_size", "dtype", "tolerance", "coupled", "notes")
        return {
            "ok": self.ok,
            "outcome": self.outcome,
            "refusal": refusal,
            "parameters": parameters,
            **{name: getattr(self, name) for name in own},
        }

    def __str__(self) -> str:
        samples = f"{self.samples} of {self.batch_size} samples"
        paragraphs = [_HEADLINES[self.outcome].format(samples=samples)]
        if self.refusal is not None:
            paragraphs.append(_wrapped(str(self.refusal), "  "))
        elif self.parameters:
            paragraphs.append(self._table())
            paragraphs.append(
                _wrapped(
                    f"Computed in {self.dtype}; an error of {self.tolerance:.0e} of a row's scale is allowed. kept and "
                    f"dense(): the memory that all {self.batch_size} samples take, estimated."
                )
            )
        if self.notes:
            paragraphs.append("\n".join("- " + _wrapped(note, "  ").lstrip() for note in self.notes))
        return "\n\n".join(paragraphs)

    def _table(self) -> str:
        header = ["parameter", "shape", "rule", "term", "norms", "kept", "dense()", "error", "verdict"]
        rows = [
            [
                p.name,
                "x".join(map(str, p.shape)) or "scalar",
                " + ".join(p.rules),
                p.term,
                p.norms,
                _bytes(p.kept_bytes) if p.term else "",
                _bytes(p.dense_bytes) if p.term else "",
                "" if p.error is None else f"{p.error:.0e}",
                p.verdict,
            ]
            for p in self.parameters
        ]
        kept, dense = (sum(getattr(p, name) for p in self.parameters) for name in ("kept_bytes", "dense_bytes"))
        rows.append(["all", "", "", "", "", _bytes(kept), _bytes(dense), "", ""])
        return aligned(header, rows, right={5, 6, 7})


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> str:
    """A table of text; the columns in `right` are set to the right.

    >>> print(aligned(["name", "size"], [["a", "5"], ["bias", "10"]], right={1}))
      name  size
      ----  ----
      a        5
      bias    10
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> str:
    return "\n".join(
        textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
        for line in text.splitlines()
    )
