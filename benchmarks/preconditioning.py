"""Do Kronecker factors (EK-FAC), or dampings and moments by layer, improve the influence scores of projected gradients?

    python -m benchmarks.preconditioning [--write] [--only TEXT]

The tasks and the linear datamodeling score (LDS) of `benchmarks.attribution`, for one model and five. Whitening inverts
the second moment of whole rows of 512 numbers, with a damping relative to the mean eigenvalue of each parameter ("by
parameter", which persample uses) or of all; "by blocks" inverts the moment of each parameter alone. EK-FAC rotates the
projected gradient of each weight, a matrix, to the eigenvectors of its second moments along rows and along columns,
and divides by the second moments of its entries there. Its sides are projected to "512 numbers" in total; "wide" has
the sides of a scan, whose products are not added up in groups; "whole" has no projection.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attribution import DAMPINGS, PROJECT, Comparison, Score
from benchmarks.attribution_tasks import TASKS, Pair
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from persample.scanning.damping import Whitening
from persample.terms.kronecker import KroneckerSketch, allocate, split_shape

SMALL = (0.1, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.3, 1.0)  # EK-FAC needs little damping
Gradients = dict[str, Tensor]


def compute_gradients(model: nn.Module, batch: Pair) -> Gradients:
    """The gradient of each sample by parameter, in float64."""
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}

    def compute_loss(parameters: Gradients, x: Tensor, y: Tensor) -> Tensor:
        x = x.double() if x.is_floating_point() else x
        return F.cross_entropy(torch.func.functional_call(model, parameters, x[None]), y[None])

    gradients = torch.func.vmap(torch.func.grad(compute_loss), (None, 0, 0))
    parts = [gradients(parameters, x, y) for x, y in zip(*(part.split(100) for part in batch), strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parameters}


# ---- whitening ----


def project_rows(gradients: Gradients) -> tuple[Tensor, Tensor]:
    """`(samples, PROJECT)`: rows as a scan has them, and the number of the parameter of each entry."""
    shapes = {name: part.shape[1:] for name, part in gradients.items()}
    slices = allocate(PROJECT, shapes)
    rows = torch.zeros(len(next(iter(gradients.values()))), PROJECT, dtype=torch.float64)
    for name, part in gradients.items():
        own = slices[name]
        sketch = KroneckerSketch(own.stop - own.start, 0, name, shapes[name], torch.device("cpu"))
        rows[:, own] += sketch.fold(sketch.sides.multiply_dense(part))
    ends = torch.tensor(sorted({own.stop for own in slices.values()}))
    return rows, torch.bucketize(torch.arange(PROJECT), ends, right=True)


def prepare_whitening(data: Gradients, tests: Gradients, kind: str) -> Score:
    """A function from the damping to inner products `(tests, examples)` of whitened rows."""
    (rows, blocks), (own, _) = project_rows(data), project_rows(tests)
    lengths = rows.norm(dim=1)
    is_apart = kind == "by blocks"
    groups = [(blocks == i).nonzero().flatten() for i in blocks.unique()] if is_apart else [torch.arange(PROJECT)]
    moments = [rows[:, group].T @ rows[:, group] / len(rows) for group in groups]

    def score(damping: Any) -> Tensor:
        total = torch.zeros(())
        for group, moment in zip(groups, moments, strict=True):
            whitening = Whitening(moment, damping, lengths, blocks if kind == "by parameter" else None)
            total = total + whitening.solve(own[:, group]) @ rows[:, group].T
        return total

    return score


# ---- EK-FAC ----


def project_sides(gradients: Gradients, kind: str) -> list[Tensor]:
    """`(samples, k, m)` for each parameter."""
    shapes = {name: part.shape[1:] for name, part in gradients.items()}
    slices, projected = allocate(PROJECT, shapes), []
    for name, part in gradients.items():
        size, matrices = slices[name].stop - slices[name].start, part.reshape(len(part), *split_shape(shapes[name]))
        if kind == "wide":
            sides = KroneckerSketch(size, 0, name, shapes[name], torch.device("cpu")).sides
            matrices = sides.multiply_dense(part)
        elif kind == "512 numbers" and matrices[0].numel() > size:
            matrices = _multiply_random(matrices, size)
        projected.append(matrices)
    return projected


def _multiply_random(matrices: Tensor, size: int) -> Tensor:
    """Multiply both sides with random matrices, such that at most `size` products are left, in a square if possible."""
    _, rows, columns = matrices.shape
    k = min(rows, max(1, math.isqrt(size), size // columns))
    generator = torch.Generator().manual_seed(rows * columns)
    left, right = (
        torch.linalg.qr(torch.randn(count, width, generator=generator, dtype=torch.float64))[0]
        for count, width in ((rows, k), (columns, size // k))
    )
    return left.T @ matrices @ right


def prepare_ekfac(data: Gradients, tests: Gradients, kind: str) -> Score:
    """A function from the damping, relative to the mean eigenvalue of each parameter, to scores `(tests, examples)`."""
    rotated = []
    for rows, own in zip(project_sides(data, kind), project_sides(tests, kind), strict=True):
        left = torch.linalg.eigh(torch.einsum("nab,ncb->ac", rows, rows)).eigenvectors
        right = torch.linalg.eigh(torch.einsum("nab,nac->bc", rows, rows)).eigenvectors
        rotated.append(((left.T @ rows @ right).flatten(1), (left.T @ own @ right).flatten(1)))

    def score(damping: float) -> Tensor:
        total = torch.zeros(())
        for rows, own in rotated:
            eigenvalues = rows.square().mean(0)
            damped = eigenvalues + damping * eigenvalues.mean() + torch.finfo(torch.float64).tiny
            total = total + (own / damped) @ rows.T
        return total

    return score


# ---- comparison ----

METHODS: dict[str, tuple[Callable[[Gradients, Gradients, str], Score], str, Sequence[Any]]] = {
    "whitened, damping by parameter": (prepare_whitening, "by parameter", ("auto", *DAMPINGS)),
    "whitened, one damping": (prepare_whitening, "together", ("auto", *DAMPINGS)),
    "whitened by blocks": (prepare_whitening, "by blocks", SMALL),
    "EK-FAC, 512 numbers": (prepare_ekfac, "512 numbers", SMALL),
    "EK-FAC, wide": (prepare_ekfac, "wide", SMALL),
    "EK-FAC, whole": (prepare_ekfac, "whole", SMALL),
}


def compare(comparison: Comparison) -> None:
    """Score all methods with the first model and with all models."""
    batches = comparison.task.data, comparison.task.test
    gradients = [[compute_gradients(model, batch) for batch in batches] for model in comparison.models]
    for name, (prepare, kind, dampings) in METHODS.items():
        scores = [prepare(*own, kind) for own in gradients]
        comparison.add(name, scores[0], dampings)
        comparison.add(f"{name}, {len(scores)} models", partial(_average, scores), dampings)


def _average(scores: Sequence[Score], damping: Any) -> Tensor:
    return torch.stack([score(damping) for score in scores]).mean(0)


def main() -> None:
    """Compare all methods on all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/preconditioning.json")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tasks with TEXT in their name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": describe_machine(), "tasks": {}}
    for name, make_task in TASKS.items():
        if options.only in name:
            print(name, flush=True)
            comparison = Comparison(make_task())
            compare(comparison)
            results["tasks"][name] = comparison.rows
            if options.write:
                write_json(RESULTS / "preconditioning.json", results)


if __name__ == "__main__":
    main()
