"""Report of a check, as data and as a table."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from persample._internal.text import format_bytes, format_table
from persample.errors import PerSampleError
from persample.gradients import TriedFunction, describe_tried
from persample.terms import Outer, Patches, Rows, Sum, Term, choose_norm_algorithm

WIDTH = 120

# "adds up": the rows could not be compared one by one, but their sum equals the plain gradient.
# "not finite": the gradient contains NaN or infinity, in the loop as well.
Verdict = Literal["right", "WRONG", "unused", "refused", "adds up", "not finite"]
Outcome = Literal["right", "wrong", "refused", "not compared"]

_HEADLINES: dict[Outcome, str] = {
    "right": "RIGHT: the gradients of {samples} equal the gradients of a loop with plain autograd.",
    "wrong": "WRONG: the gradients of {samples} differ from the gradients of a loop with plain autograd.",
    "refused": "REFUSED: the per-sample gradients of this model, loss and batch cannot be recorded.",
    "not compared": "NOT COMPARED: there are no finite gradients of a loop to compare {samples} with.",
}


@dataclass(frozen=True)
class ParameterReport:
    """Result for one parameter.

    Attributes:
        rules: torch functions that used the parameter. "generic (f)" means that f has no rule and the generic rule was
            used. "linear (through mul)" means that linear used a weight that mul computed from the parameter.
        term: structure of the per-sample gradient.
        norms: how the norms are computed: "ghost" from inner products of positions, "dense" from blocks of the dense
            gradient, "rows" from the rows of an embedding table that were looked up.
        kept_bytes: estimated memory of the term for the whole batch. Terms may share tensors.
        dense_bytes: estimated memory of the result of `dense()` for the whole batch.
        error: largest difference from the loop, relative to the scale of the row.
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
    """Result of `persample.check`; `print` shows it as a table."""

    parameters: list[ParameterReport]
    samples: int  # how many samples were compared
    batch_size: int
    dtype: str
    tolerance: float
    refusal: PerSampleError | None = None
    coupled: bool | None = None  # whether samples influence each other in the plain model; None if unknown
    notes: list[str] = field(default_factory=list)
    tried: list[TriedFunction] = field(default_factory=list)  # functions that persample does not know

    @property
    def outcome(self) -> Outcome:
        """Summary of all verdicts in one word."""
        verdicts = {p.verdict for p in self.parameters}
        if self.refusal is not None:
            return "refused"
        if "WRONG" in verdicts:
            return "wrong"
        return "not compared" if {"adds up", "not finite"} & verdicts else "right"

    @property
    def ok(self) -> bool:
        """Whether the gradients of all used parameters were compared and are right."""
        return self.outcome == "right"

    def raise_if_wrong(self) -> None:
        """Raise the error of a refused recording, or an error with the table unless `ok`."""
        if self.refusal is not None:
            raise self.refusal
        if not self.ok:
            raise PerSampleError(f"persample.check:\n{self}")

    def to_dict(self) -> dict[str, Any]:
        """Report as plain data for `json.dumps`; an `error` that is not finite becomes None."""
        parameters = [asdict(p) for p in self.parameters]
        for row in parameters:
            row["shape"] = list(row["shape"])
            row["error"] = row["error"] if row["error"] is not None and math.isfinite(row["error"]) else None
        refusal = self.refusal and {"type": type(self.refusal).__name__, "message": str(self.refusal)}
        copied = ("samples", "batch_size", "dtype", "tolerance", "coupled", "notes")
        return {
            "ok": self.ok,
            "outcome": self.outcome,
            "refusal": refusal,
            "parameters": parameters,
            "tried": [asdict(function) for function in self.tried],
            **{name: getattr(self, name) for name in copied},
        }

    def __str__(self) -> str:
        samples = f"{self.samples} of {self.batch_size} samples"
        paragraphs = [_HEADLINES[self.outcome].format(samples=samples)]
        if self.refusal is not None:
            paragraphs.append(_wrap(str(self.refusal), "  "))
        elif self.parameters:
            paragraphs.append(self._table())
            paragraphs.append(
                _wrap(
                    f"Computed in {self.dtype}; allowed error: {self.tolerance:.0e} of the scale of a row. kept and "
                    f"dense(): estimated memory for all {self.batch_size} samples."
                )
            )
        if self.tried:
            paragraphs.append(describe_tried(self.tried))
        if self.notes:
            paragraphs.append("\n".join("- " + _wrap(note, "  ").lstrip() for note in self.notes))
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
                format_bytes(p.kept_bytes) if p.term else "",
                format_bytes(p.dense_bytes) if p.term else "",
                "" if p.error is None else f"{p.error:.0e}",
                p.verdict,
            ]
            for p in self.parameters
        ]
        kept, dense = (sum(getattr(p, name) for p in self.parameters) for name in ("kept_bytes", "dense_bytes"))
        rows.append(["all", "", "", "", "", format_bytes(kept), format_bytes(dense), "", ""])
        return format_table(rows, header, right={5, 6, 7}, rule=True, indent="  ")


def _wrap(text: str, indent: str = "") -> str:
    return "\n".join(
        textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
        for line in text.splitlines()
    )


# ---- terms and the algorithms of their norms, in words ----


def describe_term(term: Term) -> str:
    """Structure of a term, by class names.

    >>> import torch
    >>> outer = Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    >>> describe_term(Sum([Rows(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 4), 5), outer]))
    'Rows + Outer'
    """
    inner = " + ".join(dict.fromkeys(map(describe_term, _find_inner_terms(term))))
    if isinstance(term, Sum):
        return inner
    return f"{type(term).__name__}({inner})" if inner else type(term).__name__


def describe_norms(term: Term) -> str:
    """How the norms of a term are computed: "ghost", "dense" or "rows"; see `ParameterReport`.

    >>> import torch
    >>> describe_norms(Outer(torch.ones(2, 1, 4), torch.ones(2, 1, 5)))
    'ghost'
    >>> describe_norms(Outer(torch.ones(2, 9, 4), torch.ones(2, 9, 5)))
    'dense'
    """
    if inner := _find_inner_terms(term):
        return " + ".join(dict.fromkeys(map(describe_norms, inner)))
    if isinstance(term, Outer):
        return "ghost" if term.positions == 1 else choose_norm_algorithm(term.positions, *term.shape)
    if isinstance(term, Patches):
        return term.choose_norm_algorithm()
    return "rows" if isinstance(term, Rows) else "dense"


def _find_inner_terms(term: Term) -> list[Term]:
    """The terms that a composite term holds."""
    held = [part for value in vars(term).values() for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [part for part in held if isinstance(part, Term)]
