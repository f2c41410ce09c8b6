"""Check the results of the engines against a loop over the samples with plain autograd in float64.

An engine that raises an error or gives a wrong result is not measured. The tables show the failure instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.engines import Engine
from benchmarks.engines.base import format_error
from benchmarks.rows import Rows, compute_clipped_sum, compute_gram, compute_norm
from benchmarks.workloads import Workload, compute_loss

# Tolerances, relative to the largest row. Correct float32 rows differ from float64 by 1e-6 to 1e-4, wrong rows by about
# 1. Sometimes rounding moves the input of a ReLU across zero, which changes the row of that sample by 1e-2. So single
# rows may differ by MAX_ERROR, and the median row by MEDIAN_ERROR.
MEDIAN_ERROR, MAX_ERROR = 1e-3, 5e-2
CLIP_ERROR = 1e-2  # of a clipped sum, which may include such a sample
PROJECTION_ERROR = 0.25  # of inner products after projection to 1024 numbers: 0.03 to 0.09 if correct, about 1 if wrong


@dataclass(frozen=True)
class CheckedEngine:
    """An engine with its model, and for each quantity the failure, or "" if the result is correct."""

    engine: Engine | None
    failures: dict[str, str]

    @property
    def note(self) -> str:
        """How the model was changed for the engine."""
        return self.engine.note if self.engine else ""


class Reference:
    """The correct results for a workload.

    Attributes:
        always_checked: quantities that are checked even if they are not asked for.
    """

    always_checked = ("dense", "norms")

    def __init__(self, workload: Workload) -> None:
        model, x, labels = replace(workload, device="cpu").build()
        model = model.double()
        x = x.double() if x.is_floating_point() else x
        # Stored in float32: the rounding error is far below the tolerance.
        self.rows: Rows = {name: torch.empty(len(x), *p.shape) for name, p in model.named_parameters()}
        norms = []
        for n, (sample, label) in enumerate(zip(x.split(1), labels.split(1), strict=True)):
            gradient = torch.autograd.grad(compute_loss(model(sample), label), list(model.parameters()))
            norms.append(compute_norm(gradient))
            for r, part in zip(self.rows.values(), gradient, strict=True):
                r[n] = part
        self.norms = torch.stack(norms).float()
        self.clip = compute_clipped_sum(self.rows, self.norms)
        self.gram = compute_gram(self.rows)

    def accepts(self, quantity: str, result: Any) -> bool:
        """Whether a result is correct. A projection is correct if it keeps the inner products of the rows."""
        if quantity == "project":
            size = self.norms[:, None] * self.norms
            return bool(((result @ result.T - self.gram) / size).square().mean().sqrt() <= PROJECTION_ERROR)
        if quantity == "dense":
            return _are_close(result, self.rows)
        if quantity == "clip":
            return _are_close(_add_batch_dim(result), _add_batch_dim(self.clip), CLIP_ERROR)
        return _are_close({quantity: result}, {quantity: {"norms": self.norms, "gram": self.gram}[quantity]})


def _add_batch_dim(tensors: Rows) -> Rows:
    return {name: tensor[None] for name, tensor in tensors.items()}


def _are_close(actual: Rows, expected: Rows, median_error: float = MEDIAN_ERROR) -> bool:
    return actual.keys() == expected.keys() and all(
        _is_close(actual[name], rows, median_error) for name, rows in expected.items()
    )


def _is_close(actual: Tensor, expected: Tensor, median_error: float) -> bool:
    """Whether the errors of the rows are within the tolerances. False if there are NaNs."""
    if actual.shape != expected.shape:
        return False
    blocks = zip(actual.detach().split(16), expected.split(16), strict=True)
    errors = torch.cat([_compute_row_norms(a - b) for a, b in blocks])
    size = _compute_row_norms(expected).max()
    return bool(errors.max() <= MAX_ERROR * size) and bool(errors.median() <= median_error * size)


def _compute_row_norms(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).norm(dim=1)


def check_engines(
    workload: Workload,
    engines: Iterable[type[Engine]],
    quantities: Sequence[str],
    make_reference: Callable[[Workload], Reference] = Reference,
) -> dict[str, CheckedEngine]:
    """Build each engine and check its results; return them by engine name."""
    reference = make_reference(workload)
    return {engine.name: _check_engine(engine, workload, quantities, reference) for engine in engines}


def _check_engine(
    engine: type[Engine], workload: Workload, quantities: Sequence[str], reference: Reference
) -> CheckedEngine:
    """Check an engine with the original model, and with an adapted model if that has fewer failures."""
    supported = [quantity for quantity in quantities if quantity in engine.quantities]
    original = _try_engine(engine, workload, supported, reference, adapted=False)
    if any(original.failures.values()):
        adapted = _try_engine(engine, workload, supported, reference, adapted=True)
        if _count_failures(adapted) < _count_failures(original):
            return adapted
    return original


def _count_failures(checked: CheckedEngine) -> int:
    return sum(map(bool, checked.failures.values()))


def _try_engine(
    kind: type[Engine], workload: Workload, quantities: Sequence[str], reference: Reference, adapted: bool
) -> CheckedEngine:
    try:
        engine = kind(workload, adapted)
    except ImportError:
        return CheckedEngine(None, dict.fromkeys(quantities, "not installed"))
    except Exception as error:
        return CheckedEngine(None, dict.fromkeys(quantities, format_error(error)))
    # Wrong rows can have nearly correct norms, and wrong norms can give a nearly correct clipped sum. So rows and norms
    # are checked even if they are not asked for.
    needed = [name for name in reference.always_checked if name in kind.quantities and name not in quantities]
    failures = {quantity: _find_failure(engine, quantity, reference) for quantity in (*quantities, *needed)}
    wrong = {quantity for quantity, failure in failures.items() if failure == "wrong"}
    for quantity in quantities:
        if "dense" in wrong or (quantity == "clip" and "norms" in wrong):
            failures[quantity] = failures[quantity] or "wrong"
    return CheckedEngine(engine, {quantity: failures[quantity] for quantity in quantities})


def _find_failure(engine: Engine, quantity: str, reference: Reference) -> str:
    try:
        result = pytree.tree_map_only(Tensor, Tensor.cpu, engine.step(quantity))
        return "" if reference.accepts(quantity, result) else "wrong"
    except Exception as error:
        return format_error(error)
    finally:
        engine.clear()
