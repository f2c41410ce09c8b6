"""What a scan found, and questions to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from persample.batches import Batch, BatchDim
from persample.losses import LossFunction
from persample.scanning import queries
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.errors import ScanError
from persample.scanning.measure import Measurement, Projection, undisturbed
from persample.scanning.queries import Found, Rows
from persample.scanning.source import moved
from persample.scanning.store import Array, Store
from persample.scanning.table import column_names, column_of, read_table

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Influence:
    """For each sample of a test batch, the training examples that push it most: `(samples, k)`, the most first.

    A step on an example `for` it makes its loss smaller; one on an example `against` it makes it larger. Scores are
    positive for the one, and negative for the other.
    """

    for_ids: Tensor
    for_scores: Tensor
    against_ids: Tensor
    against_scores: Tensor


class Scan:
    """A scan that has ended, in its directory.

    `scan(...)` gives one. One that is opened by its path has to be told the model, its loss and the checkpoints that
    were scanned, to answer which examples push a prediction.
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module | None = None,
        loss_fn: LossFunction | None = None,
        checkpoints: Sequence[State | str | Path] | None = None,
        *,
        batch_dim: BatchDim = 0,
        kept_by: Any = None,
    ) -> None:
        self.store = Store(directory)
        self.settings = self.store.settings()
        if not self.store.is_complete:
            done = self.store.shards(len(self.settings["checkpoints"]) - 1)
            raise ScanError(
                f"The scan in {directory} has not ended ({done} shards of its last checkpoint are whole): run it "
                "again, and it goes on."
            )
        if self.store.shards(len(self.settings["checkpoints"]) - 1) != self.summary["shards"]:
            raise ScanError(f"Files of the scan in {directory} are missing: start over with resume=False.")
        self._model, self._loss_fn, self._checkpoints, self._batch_dim = model, loss_fn, checkpoints, batch_dim
        self._kept_by = kept_by  # what removes the directory when nobody needs it any more

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self.store.directory

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The dataset as a whole: the spread of each column, the noise scale, and the batch size that it suggests."""
        return self.store.read_json("summary.json")

    @property
    def columns(self) -> list[str]:
        """The names of what is known of each example."""
        return column_names(self.store)

    def __len__(self) -> int:
        return self.summary["examples"]

    def __repr__(self) -> str:
        columns = ", ".join(name for name in self.columns if name not in ("id", "label"))
        dim = self.settings["project"]
        return f"Scan of {len(self)} examples: {columns}" + (f"; projected to {dim}" if dim else "")

    def table(self) -> pyarrow.Table:
        """All columns, a row for each example."""
        return read_table(self.store)

    def column(self, name: str) -> Array:
        """One column, by the examples' numbers."""
        if name not in self.columns:
            raise ScanError(f"The scan has no column '{name}'; it has {', '.join(self.columns)}.")
        return column_of(self.store, name)

    def ranked(self, by: str = "self_influence", k: int | None = None) -> Found:
        """The examples with the largest values of a column; of alignment, the smallest, which pull against the rest."""
        values = torch.from_numpy(self.column(by)).double().nan_to_num(nan=torch.inf)
        order = values.argsort(descending=by != "alignment", stable=True)[:k]
        return Found(order, values[order])

    @property
    def table_path(self) -> Path:
        """The file with the table."""
        return self.directory / f"table.{self.settings['table']}"

    def report(self, path: str | Path | None = None, *, data: Any = None, **options: Any) -> Path:
        """Writes a page to look at, `report.html` in the scan's directory, and gives its path.

        `data`, what was scanned, is for pictures or texts of the examples. For the other options see
        `persample.scanning.report.write_report`.
        """
        from persample.scanning.report import write_report  # which takes matplotlib and pillow

        return write_report(self, path, data=data, **options)

    # ---- questions ----

    def neighbours(self, i: int, k: int = 10) -> Found:
        """The examples whose gradients point most nearly as that of example `i`, and the cosines."""
        self._check_id(i)
        return queries.neighbours(self._rows(-1), i, k)

    def duplicates(self, tolerance: float = 0.1) -> list[list[int]]:
        """Groups of examples that do the same to the model: whose gradients differ from the first one's by at most
        `tolerance` of their length. The largest groups come first; examples without a gradient are in none."""
        if not 0 < tolerance < 1:
            raise ScanError(f"tolerance is between 0 and 1, got {tolerance}.")
        return sorted(queries.duplicates(self._rows(-1), tolerance), key=len, reverse=True)

    def outliers(self, k: int = 10) -> Found:
        """The examples whose gradients point where few others do, and how many times the average they do so."""
        return queries.outliers(self._rows(-1), k)

    def influence(self, test_batch: Any, k: int = 10, method: Literal["tracin", "whitened"] = "tracin") -> Influence:
        """The examples that push the model's predictions for a test batch most, for and against.

        "tracin": the inner product of the two gradients, times the learning rate, summed over the checkpoints (Pruthi
        et al., 2020). "whitened": after a whitening by the examples' own second moments, in which common directions
        count less, as in TRAK (Park et al., 2023) and influence functions. Both are of projected gradients: a score is
        off by about |g| |g'| / sqrt(project).
        """
        scores = self.scores(test_batch, method)
        best, worst = scores.topk(min(k, len(self))), scores.topk(min(k, len(self)), largest=False)
        return Influence(best.indices, best.values, worst.indices, worst.values)

    def scores(self, test_batch: Any, method: Literal["tracin", "whitened"] = "tracin") -> Tensor:
        """`(samples, examples)`: what `influence` ranks by."""
        if method not in ("tracin", "whitened"):
            raise ScanError(f"method must be 'tracin' or 'whitened', got {method!r}.")
        total = torch.zeros(())
        for checkpoint, (rate, projected) in enumerate(self._projected(test_batch)):
            rows = self._rows(checkpoint)
            if method == "whitened":
                factor = queries.whitening(rows.second_moment(scaled=True)).double()
                projected, rate = projected.double() @ factor @ factor.T, 1 / len(self.settings["checkpoints"])
            total = total + rate * queries.products(rows, projected)
        return total

    # ---- inside ----

    def _rows(self, checkpoint: int) -> Rows:
        if self.settings["project"] is None:
            raise ScanError(f"{self.directory} holds no projected gradients: it was scanned with project=None.")
        return Rows(self.store, checkpoint % len(self.settings["checkpoints"]))

    def _check_id(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise ScanError(f"There is no example {i}; the scan has 0 to {len(self) - 1}.")

    def _projected(self, test_batch: Any) -> list[tuple[float, Tensor]]:
        """The test batch's gradients, projected as the examples' were, by each checkpoint, with its learning rate."""
        if self._model is None or self._loss_fn is None:
            raise ScanError("Influence takes the model and its loss: open the scan as Scan(path, model, loss_fn).")
        dim, seed, method = (self.settings[key] for key in ("project", "seed", "projection"))
        self._rows(0)
        measurement = Measurement(
            self._model,
            self._loss_fn,
            quantities=["loss", "norm"],
            projection=Projection(dim, seed, method),
            parameters=list(self.settings["parameters"]),
            batch_dim=self._batch_dim,
            loss_reduction=self.settings["loss_reduction"],
        )
        states = Checkpoints(self._model, self._checkpoints, self.settings["learning_rates"])
        if states.digests() != self.settings["checkpoints"]:
            raise ScanError("The model's weights are not those that were scanned: load them, or pass the checkpoints.")
        batch = moved(test_batch, measurement.device)
        size = Batch(batch, self._batch_dim, None, pair=measurement.takes_pairs).size
        found = []
        with undisturbed(measurement, None), states.each() as loaded:
            for checkpoint in loaded:
                projected = measurement.of_batch(range(size), batch, None)["projection"]
                found.append((states.learning_rates[checkpoint], projected))
        return found
