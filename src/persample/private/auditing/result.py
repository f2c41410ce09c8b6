"""The result of an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from persample._internal.text import format_list, format_table
from persample.private.auditing.direct import DirectTest
from persample.private.auditing.plot import write_plot

_BOUNDS = {"one run": "Steinke et al. (2023)", "two worlds": "Clopper-Pearson"}


@dataclass(frozen=True)
class AuditResult:
    """What an audit has found: direct tests of the claims, and lower bounds of epsilon beside the claimed epsilon.

    A training that does what it claims fails a direct test, or is below `gaussian`, with a probability of at most
    `false_alarm`. A result without findings does not prove that the training is private: `not_tested` and the canaries
    say how far it goes.

    `epsilon` is smaller than the true epsilon with a probability of at least `confidence`, whatever the training does.
    `gaussian` is another lower bound, which holds if the mechanism is Gaussian, or close to it as many steps of DP-SGD
    are, and, with one run, if the scores of the canaries are independent.

    >>> result = AuditResult(0.4, 1.2, 1e-5, 0.95, "one run", "gradient", None, {"canaries": 100.0}, [1.0], [0.0])
    >>> result.exceeds, result.to_dict()["epsilon"]
    (False, 0.4)
    """

    epsilon: float
    claimed: float | None
    delta: float
    confidence: float
    method: str  # "one run" or "two worlds"
    canaries: str  # "gradient" or "input"
    gaussian: float | None  # a bound under assumptions, see the class
    evidence: Mapping[str, float]
    scores_in: list[float] = field(repr=False)
    scores_out: list[float] = field(repr=False)
    tests: Sequence[DirectTest] = ()
    false_alarm: float = 1e-4
    level: float = 0.0  # a test with a smaller p-value has failed
    not_tested: Mapping[str, str] = field(default_factory=dict)  # why tests were not made

    @property
    def failed(self) -> list[DirectTest]:
        """The direct tests that contradict the claims."""
        return [test for test in self.tests if test.p_value <= self.level]

    @property
    def exceeds(self) -> bool:
        """Whether the training leaks more than it claims: a direct test has failed, or a bound is above the claim."""
        return bool(self._list_reasons())

    def _list_reasons(self) -> list[str]:
        """What contradicts the claims: names of tests, and of bounds as the text of the result has them."""
        bounds = {"lower bound": self.epsilon, "if Gaussian": self.gaussian or 0.0}
        above = [name for name, bound in bounds.items() if self.claimed is not None and bound > self.claimed]
        return [test.name for test in self.failed] + above

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        tests = [{**vars(test), "failed": test in self.failed} for test in self.tests]
        return {**asdict(self), "tests": tests, "exceeds": self.exceeds}

    def plot(self, path: str | Path) -> Path:
        """Write a plot as SVG: the scores, and the bounds beside the claim."""
        return write_plot(self, Path(path))

    def __str__(self) -> str:
        rows = [[test.name, self._describe_test(test)] for test in self.tests]
        rows += [[name, f"not tested: {reason}"] for name, reason in self.not_tested.items()]
        rows += [
            ["canaries", f"{self.method}, {self.canaries} canaries"],
            ["evidence", ", ".join(f"{_format(value)} {name}" for name, value in self.evidence.items())],
            ["claimed epsilon", "unknown" if self.claimed is None else f"{self.claimed:.3f} at delta {self.delta:g}"],
            ["lower bound", f"{self.epsilon:.3f} with {100 * self.confidence:g} % confidence, {_BOUNDS[self.method]}"],
        ]
        if self.gaussian is not None:
            confidence = f"{100 * (1 - self.false_alarm / 2):g} % confidence"
            rows.append(["if Gaussian", f"{self.gaussian:.3f} with {confidence}, Gaussian mechanism assumed"])
        return f"{format_table(rows)}\n{self._describe_verdict()}"

    def _describe_test(self, test: DirectTest) -> str:
        verdict = "FAILED" if test in self.failed else "passed"
        return f"{verdict}: {test.finding} (p = {test.p_value:.2g})"

    def _describe_verdict(self) -> str:
        reasons = self._list_reasons()
        if reasons:
            return f"The training leaks more than it claims: {format_list(reasons)}."
        if self.claimed is None:
            return "There is no claim to compare with: return the engine or its epsilon from the training function."
        return "No contradiction to the claim was found."


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
