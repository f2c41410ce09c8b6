"""The projection of a scan, and Kronecker factors that whiten gradients before they are projected.

The factors of each layer are multiplied into the matrices of its projection, so that they cost nothing for an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from persample.gradients import Projection as RowProjection
from persample.gradients import ProjectionMethod, make_projection
from persample.scanning.digest import compute_digest
from persample.scanning.errors import ScanError
from persample.scanning.preconditioners import KFAC, end_pass
from persample.scanning.reduced import ComputedTerms
from persample.scanning.source import ShardBatch
from persample.scanning.store import Array, Store
from persample.terms import Term

Shapes = tuple[tuple[str, torch.Size], ...]  # by parameter name
FactorMethod = Literal["kfac"]

# The factors are of evenly spaced shards with about as many examples in all. Their damping is relative to the mean
# eigenvalue of each parameter: docs/internals/scan_evidence.md.
EXAMPLES_OF_FACTORS, DAMPING = 16_384, 0.1


@dataclass(frozen=True)
class Projection:
    """Arguments of `PerSampleGradients.project`, and how gradients are whitened before, if they are.

    Each checkpoint has a seed of its own, so that the errors of the projections cancel in averages over checkpoints.
    """

    dim: int
    seed: int = 0
    method: ProjectionMethod = "kronecker"
    whitening: FactorMethod | None = None
    factors: Factors | None = None  # from when they are fitted on

    def make(self, checkpoint: int, shapes: Shapes, device: torch.device) -> RowProjection:
        """The projection of the gradients with a checkpoint, for parameters of these shapes."""
        plain = make_projection(self.method, self.dim, self.seed + checkpoint, shapes, device)
        return plain if self.factors is None else self.factors.precondition(plain, checkpoint, device)


class Factors:
    """The sides of the projections of a scan with their factors, one file in its directory for each checkpoint."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: tuple[int, RowProjection, RowProjection] | None = None

    def has(self, checkpoint: int) -> bool:
        """Whether the factors of a checkpoint were fitted."""
        return self._store.has_arrays(get_factor_file(checkpoint))

    def precondition(self, plain: RowProjection, checkpoint: int, device: torch.device) -> RowProjection:
        """The projection of gradients that are whitened first."""
        if self._last is None or self._last[:2] != (checkpoint, plain):
            found = self._store.read_arrays(get_factor_file(checkpoint))
            if found is None:
                raise ScanError(f"{get_factor_file(checkpoint)} is missing in {self._store.directory}: scan anew.")

            def read(name: str, kind: str, own: Tensor | None) -> Tensor | None:
                part = found.get(f"{name} {kind}")
                return own if part is None else torch.from_numpy(part).to(device)

            sides = {
                name: replace(own, left=read(name, "left", own.left), right=read(name, "right", own.right))
                for name, own in plain.sides.items()
            }
            self._last = checkpoint, plain, plain.replace_sides(sides)
        return self._last[2]

    def fit(
        self,
        projection: Projection,
        checkpoint: int,
        shapes: Shapes,
        batches: Iterable[ShardBatch],
        pass_terms: Callable[[Sequence[int], Any, ComputedTerms], None],
    ) -> None:
        """Fit the factors to the gradients of batches, which `pass_terms` passes to a receiver, and store them."""
        fitted = {name: KFAC(shape) for name, shape in shapes if shape.numel()}
        seen: set[str] = set()
        for batch in batches:
            if not batch.ids:
                continue
            found = ComputedTerms(lambda name, term: _measure_finite(fitted[name], term))
            pass_terms(batch.ids, batch.batch, found)
            seen |= set(found.values)
            for name, own in fitted.items():
                own.add(found.values.get(name, ()), len(batch.ids))
        used = {name: own for name, own in fitted.items() if name in seen}
        end_pass(used)
        cpu = torch.device("cpu")
        plain = make_projection(projection.method, projection.dim, projection.seed + checkpoint, shapes, cpu).sides
        arrays: dict[str, Array] = {}
        for name, own in used.items():
            whitened = own.whiten(plain[name], DAMPING)
            parts = {"left": whitened.left, "right": whitened.right}
            arrays |= {f"{name} {kind}": part.numpy() for kind, part in parts.items() if part is not None}
        self._store.write_arrays(get_factor_file(checkpoint), arrays)


def _measure_finite(fitted: KFAC, term: Term) -> Sequence[Tensor]:
    """What the fit needs of the samples with a finite gradient."""
    found = fitted.measure(term)
    if all(bool(part.isfinite().all()) for part in found):
        return found
    return fitted.measure(term.clear_samples(~term.squared_norms().isfinite()))


def make_projection_of(store: Store) -> Projection:
    """The projection of a finished scan."""
    settings = store.read_settings()
    whitening = settings.get("precondition")
    factors = None if whitening is None else Factors(store)
    return Projection(settings["project"], settings["seed"], settings["projection"], whitening, factors)


def copy_factors(given: Store, store: Store) -> None:
    """Take the factors of another scan."""
    for checkpoint in range(len(given.read_settings()["checkpoints"])):
        store.write_arrays(get_factor_file(checkpoint), given.read_arrays(get_factor_file(checkpoint)) or {})


def check_factors(given: Store, settings: Mapping[str, Any]) -> str:
    """A digest of the factors of a scan; an error if they do not fit a scan with other settings."""
    before = given.read_settings()
    if before.get("precondition") is None:
        raise ScanError(f"The scan in {given.directory} has no factors: pass precondition='kfac'.")
    for key in ("project", "seed", "parameters", "checkpoints"):
        if before[key] != settings[key]:
            raise ScanError(f"The factors of the scan in {given.directory} are for another {key!r}.")
    return compute_digest([given.read_arrays(get_factor_file(k)) for k in range(len(before["checkpoints"]))])


def get_factor_file(checkpoint: int) -> str:
    """The file in the directory of a scan with the factors of a checkpoint."""
    return f"factors-{checkpoint}.npz"
