"""Whether an engine's answers are right: against a loop over the samples with plain autograd in float64.

An engine that errs, or is wrong, shows that in place of a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import Engine
from benchmarks.rows import Rows, clip_factors, gram_of
from benchmarks.workloads import Workload, loss_of

# Answers in float32 differ from those in float64 by 1e-6 to 1e-4 of a row, wrong ones by all of it. Now and then
# rounding moves an input of a ReLU across zero, which costs the sample's row 1e-2: allowed, though not to most rows.
TIGHT, LOOSE = 1e-3, 5e-2
CLIPPED = 1e-2  # of a clipped sum, to which such a sample contributes
SPREAD = 0.25  # of inner products by a projection to 1024 numbers: some 0.03 to 0.09, of a wrong one about 1


@dataclass(frozen=True)
class Examined:
    """An engine with its model, and for each quantity what to show in place of a figure, or nothing."""

    engine: Engine | None
    failures: dict[str, str]

    @property
    def note(self) -> str:
        """What had to be changed in the model before the engine took it."""
        return self.engine.note if self.engine else ""


class Reference:
    """The right answers for a workload."""

    def __init__(self, workload: Workload) -> None:
        model, x, labels = workload.build()
        model = model.double()
        x = x.double() if x.is_floating_point() else x
        # What is kept is rounded to float32, far below the tolerance, and takes half of the memory.
        self.rows: Rows = {name: torch.empty(len(x), *p.shape) for name, p in model.named_parameters()}
        norms = []
        for n, (one, label) in enumerate(zip(x.split(1), labels.split(1), strict=True)):
            gradient = torch.autograd.grad(loss_of(model(one), label), list(model.parameters()))
            norms.append(torch.stack(torch._foreach_norm(gradient)).norm())
            for r, part in zip(self.rows.values(), gradient, strict=True):
                r[n] = part
        self.norms = torch.stack(norms).float()
        factors = clip_factors(self.norms)
        self.clip = {name: torch.tensordot(factors, r, 1) for name, r in self.rows.items()}
        self.gram = gram_of(self.rows)

    def accepts(self, quantity: str, answer: Any) -> bool:
        """Whether the answer is right; for a projection, whether it keeps the rows' inner products."""
        if quantity == "project":
            size = self.norms[:, None] * self.norms
            return bool(((answer @ answer.T - self.gram) / size).square().mean().sqrt() <= SPREAD)
        if quantity == "dense":
            return _same(answer, self.rows)
        if quantity == "clip":
            return _same({k: v[None] for k, v in answer.items()}, {k: v[None] for k, v in self.clip.items()}, CLIPPED)
        return _same({quantity: answer}, {quantity: {"norms": self.norms, "gram": self.gram}[quantity]})


def _same(found: Rows, wanted: Rows, most: float = TIGHT) -> bool:
    return found.keys() == wanted.keys() and all(_near(found[name], want, most) for name, want in wanted.items())


def _near(found: Tensor, want: Tensor, most: float) -> bool:
    """Whether no row is far off and most are hardly so, as parts of the largest row. Not true of NaNs."""
    if found.shape != want.shape:
        return False
    off = torch.cat([_norms(a - b) for a, b in zip(found.detach().split(16), want.split(16), strict=True)])
    size = _norms(want).max()
    return bool(off.max() <= LOOSE * size) and bool(off.median() <= most * size)


def _norms(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).norm(dim=1)


def examine(workload: Workload, engines: Iterable[type[Engine]], quantities: Sequence[str]) -> dict[str, Examined]:
    """What is known of each engine before anything is measured, by their names."""
    reference = Reference(workload)
    return {engine.name: _examine(engine, workload, quantities, reference) for engine in engines}


def _examine(engine: type[Engine], workload: Workload, quantities: Sequence[str], reference: Reference) -> Examined:
    """On the model as it is written; or on an adapted one, if that helps with any quantity."""
    asked = [quantity for quantity in quantities if quantity in engine.offers]
    found = _tried(engine, workload, asked, reference, adapted=False)
    if any(found.failures.values()):
        helped = _tried(engine, workload, asked, reference, adapted=True)
        if sum(map(bool, helped.failures.values())) < sum(map(bool, found.failures.values())):
            return helped
    return found


def _tried(
    engine: type[Engine], workload: Workload, quantities: Sequence[str], reference: Reference, adapted: bool
) -> Examined:
    try:
        made = engine(workload, adapted)
    except ImportError:
        return Examined(None, dict.fromkeys(quantities, "not installed"))
    except Exception as error:
        return Examined(None, dict.fromkeys(quantities, _name(error)))
    needed = [quantity for quantity in ("dense", "norms") if quantity in engine.offers and quantity not in quantities]
    failures = {quantity: _failure(made, quantity, reference) for quantity in (*quantities, *needed)}
    # Wrong rows may have norms that are nearly right, and wrong norms a clipped sum that is: those alone show nothing.
    wrong = {quantity for quantity, failure in failures.items() if failure == "wrong"}
    for quantity in quantities:
        if "dense" in wrong or (quantity == "clip" and "norms" in wrong):
            failures[quantity] = failures[quantity] or "wrong"
    return Examined(made, {quantity: failures[quantity] for quantity in quantities})


def _failure(engine: Engine, quantity: str, reference: Reference) -> str:
    try:
        return "" if reference.accepts(quantity, engine.step(quantity)) else "wrong"
    except Exception as error:
        return _name(error)
    finally:
        engine.clear()


def _name(error: Exception) -> str:
    return f"error: {type(error).__name__}"
