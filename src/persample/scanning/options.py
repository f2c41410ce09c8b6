"""The options of `scan` that determine its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from persample._version import __version__
from persample.batches import BatchDim
from persample.gradients import PROJECTION_METHODS, ProjectionMethod
from persample.losses import LossFunction, get_name
from persample.recording import Coupled, Selection, Verify
from persample.scanning.checkpoints import Checkpoints
from persample.scanning.digest import compute_digest, describe_structure
from persample.scanning.errors import ScanError
from persample.scanning.factors import FactorMethod, Projection
from persample.scanning.groups import Groups
from persample.scanning.measure import Measurement
from persample.scanning.source import Source
from persample.scanning.store import describe_rows
from persample.scanning.table import TableKind
from persample.terms import Library, allocate


@dataclass(frozen=True)
class ScanOptions:
    """The options of `scan` that determine its result; see there."""

    quantities: Sequence[str]
    project: int | None
    projection: ProjectionMethod
    seed: int
    dtype: Literal["float16", "float32"]
    groups: Groups | None
    parameters: Selection | None
    batch_dim: BatchDim
    loss_reduction: str
    nonfinite: Literal["raise", "keep"]
    classes: Sequence[str] | None
    shard_size: int
    table: TableKind
    coupled: Coupled = None
    precondition: FactorMethod | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "float32"):
            raise ScanError(f"dtype must be 'float16' or 'float32', got {self.dtype!r}.")
        if self.table not in ("parquet", "csv"):
            raise ScanError(f"table must be 'parquet' or 'csv', got {self.table!r}.")
        if self.projection not in PROJECTION_METHODS:
            raise ScanError(f"projection must be one of {', '.join(PROJECTION_METHODS)}; got {self.projection!r}.")
        if self.project is not None and self.project < 1:
            raise ScanError(f"project must be a positive number of dimensions or None, got {self.project}.")
        if self.precondition not in (None, "kfac"):
            raise ScanError(
                f"precondition must be 'kfac', an earlier scan with it, or None, got {self.precondition!r}."
            )
        if self.precondition and (self.project is None or self.projection != "kronecker"):
            raise ScanError("precondition needs projected gradients with projection='kronecker'.")

    def make_measurement(
        self, model: nn.Module, loss_fn: LossFunction, source: Source, verify: Verify = "first"
    ) -> Measurement:
        """The measurement that these options ask for."""
        return Measurement(
            model,
            loss_fn,
            quantities=self.quantities,
            projection=None
            if self.project is None
            else Projection(self.project, self.seed, self.projection, self.precondition),
            groups=self.groups,
            parameters=self.parameters,
            batch_dim=self.batch_dim,
            loss_reduction=self.loss_reduction,
            nonfinite=self.nonfinite,
            has_labels=source.has_labels(),
            verify=verify,
            coupled=self.coupled,
        )

    def make_settings(
        self, source: Source, measurement: Measurement, checkpoints: Checkpoints, products: Library
    ) -> dict[str, Any]:
        """The contents of scan.json: all that the result depends on. A scan is continued only if they are the same."""
        code = (describe_structure(measurement.model), measurement.loss_fn, source.collate, self.batch_dim)
        return {
            "examples": source.size,
            "data": source.compute_digest(),
            "names": source.names.compute_digest(),
            "batch_size": source.batch_size,
            "shard_size": max(1, self.shard_size // source.batch_size) * source.batch_size,
            "project": self.project,
            "projection": self.projection,
            "precondition": self.precondition,
            "quantities": list(measurement.quantities),
            "groups": measurement.groups,
            "blocks": self._list_blocks(measurement),
            "seed": self.seed,
            "dtype": self.dtype,
            "rows": None if self.project is None else describe_rows(self.dtype, self.project),
            "parameters": {name: list(p.shape) for name, p in measurement.parameters.items()},
            "loss": get_name(measurement.loss_fn),
            "loss_reduction": self.loss_reduction,
            "skip_bad": source.skips_bad,
            "nonfinite": self.nonfinite,
            "code": compute_digest(*code),
            "labelled": measurement.has_labels,
            "checkpoints": checkpoints.compute_digests(),
            "learning_rates": checkpoints.learning_rates,
            "classes": source.classes if self.classes is None else list(self.classes),
            "table": self.table,
            "products": products,
            **({} if self.coupled is None else {"coupled": self.coupled}),
            "about": {"persample": __version__, "torch": torch.__version__},
        }

    def _list_blocks(self, measurement: Measurement) -> list[tuple[str, int, int]] | None:
        """`(parameter, start, stop)`: the numbers of a projected row that belong to each parameter, if that is so."""
        if self.project is None or self.projection != "kronecker":
            return None
        slices = allocate(self.project, {name: p.shape for name, p in measurement.parameters.items()})
        return [(name, part.start, part.stop) for name, part in slices.items()]
