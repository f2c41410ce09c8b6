"""The result of a scan, and queries on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from persample.batches import Batch, BatchDim
from persample.losses import LossFunction
from persample.scanning import queries, rankings
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.errors import ScanError
from persample.scanning.estimates import WrongLabels, count_far_out, read_estimate
from persample.scanning.examples import Examples
from persample.scanning.measure import Measurement, Projection, prepare_model
from persample.scanning.notebook import format_html_table
from persample.scanning.queries import Ranking, StoredGradients
from persample.scanning.source import move_to_device
from persample.scanning.store import Array, Store
from persample.scanning.table import DESCRIPTIONS, get_column_names, read_column, read_table

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Influence:
    """The training examples with the most influence on each sample of a test batch: tensors `(samples, k)`, best first.

    A training step on one of `for_ids` lowers the loss of the test sample: its score is positive. A step on one of
    `against_ids` raises the loss: its score is negative.
    """

    for_ids: Tensor
    for_scores: Tensor
    against_ids: Tensor
    against_scores: Tensor

    def _repr_html_(self) -> str:
        rows = [
            [sample, direction, i, score]
            for sample in range(len(self.for_ids))
            for direction, ids, scores in (
                ("for", self.for_ids, self.for_scores),
                ("against", self.against_ids, self.against_scores),
            )
            for i, score in zip(ids[sample].tolist(), scores[sample].tolist(), strict=True)
        ]
        return format_html_table(["sample", "pushes", "example", "score"], rows, "Influence", most=40)


_SHOWN_IN_NOTEBOOKS = ("name", "label", "predicted", "probability", "suggested", "prediction", "target")


class Scan:
    """A finished scan in a directory.

    `scan(...)` returns one. To open a scan by its path, pass the directory; `influence` also needs the model, its loss
    and the checkpoints that were scanned.
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
        self.settings = self.store.read_settings()
        shards = self.store.count_shards(len(self.settings["checkpoints"]) - 1)
        if not self.store.is_complete:
            raise ScanError(
                f"The scan in {directory} is not finished ({shards} shards of its last checkpoint are complete). Run "
                "it again to continue."
            )
        if shards != self.summary["shards"]:
            raise ScanError(f"Files of the scan in {directory} are missing. Start over with resume=False.")
        self._model, self._loss_fn, self._checkpoints, self._batch_dim = model, loss_fn, checkpoints, batch_dim
        self._kept_by = kept_by  # an object that removes the directory when it is collected

    @property
    def directory(self) -> Path:
        """The directory of the scan."""
        return self.store.directory

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The dataset as a whole: quantiles of each column, the noise scale, and a suggested batch size."""
        return self.store.read_json("summary.json")

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return get_column_names(self.store)

    def __len__(self) -> int:
        return self.summary["examples"]

    def __repr__(self) -> str:
        columns = ", ".join(name for name in self.columns if name not in DESCRIPTIONS)
        dim = self.settings["project"]
        return f"Scan of {len(self)} examples: {columns}" + (f"; projected to {dim}" if dim else "")

    def _repr_html_(self) -> str:
        """The scan in a notebook: what was measured, and the first examples by default."""
        estimate = self.estimate_wrong_labels()
        caption = repr(self) + (f". Wrong labels: {estimate}" if estimate else "")
        if self.default_ranking is None:
            return format_html_table([], [], caption)
        found = self.ranked(k=10)
        known = self.describe(found.ids)
        names = [name for name in _SHOWN_IN_NOTEBOOKS if name in known[0]]
        rows = [
            [i, *(example[name] for name in names), score]
            for i, example, score in zip(found.ids.tolist(), known, found.scores.tolist(), strict=True)
        ]
        return format_html_table(["id", *names, self.default_ranking], rows, caption)

    def table(self) -> pyarrow.Table:
        """All columns, with one row per example."""
        return read_table(self.store)

    def column(self, name: str) -> Array:
        """One column, with one entry per example."""
        if name not in self.columns:
            raise ScanError(f"The scan has no column '{name}'. It has {', '.join(self.columns)}.")
        return read_column(self.store, name)

    def describe(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        """What the scan knows about some examples: name, label, what the model predicts and suggests."""
        examples = Examples(self.store)
        return [examples.describe(int(i)) for i in ids]

    # ---- rankings ----

    @property
    def rankings(self) -> list[str]:
        """What `ranked` can rank by: the measured columns, and scores that are computed from them."""
        return rankings.list_rankings(self.store, self._measured)

    def ranked(self, by: str | None = None, k: int | None = None) -> Ranking:
        """The `k` examples that come first by a column or another of `rankings`, most suspicious first.

        That is the largest value, for "alignment" the smallest. The default is the mean loss over the checkpoints, or
        the loss if there is one checkpoint: `benchmarks/results/rankings.json` compares the rankings.
        """
        by = by or self.default_ranking
        if by is None:
            raise ScanError("The scan has no column to rank by.")
        scores = torch.from_numpy(self.scores_by(by)).nan_to_num(nan=torch.inf)
        order = scores.argsort(descending=True, stable=True)[:k]
        return Ranking(order, -scores[order] if by == "alignment" else scores[order])

    def scores_by(self, by: str) -> Array:
        """One score per example, large for the examples that `ranked` puts first."""
        return rankings.compute_scores(self.store, by, self._measured)

    @property
    def default_ranking(self) -> str | None:
        """What `ranked` ranks by unless told; None if nothing was measured."""
        return rankings.choose_ranking(self._measured)

    def suspects(self, by: str | None = None) -> Ranking:
        """The examples of a ranking before its cut: as many as labels are estimated to be wrong.

        If the model is no classifier, the cut is behind the examples whose score lies far above all others: three
        interquartile ranges above the third quartile. Clean data may have no suspects.
        """
        return self.ranked(by, self.count_suspects(by))

    def count_suspects(self, by: str | None = None) -> int:
        """The number of `suspects`."""
        estimate = self.estimate_wrong_labels()
        by = by or self.default_ranking
        if estimate is not None or by is None:
            return estimate.count if estimate else 0
        return count_far_out(self.scores_by(by))

    def estimate_wrong_labels(self) -> WrongLabels | None:
        """How many labels are wrong, with an interval; None if the model is no classifier.

        It is too low if the model has memorised its labels and no earlier checkpoint was scanned, and too high if the
        classes overlap or the model is not trained yet; `warning` says so as far as the scan can tell.
        """
        return read_estimate(self.summary)

    def compare_rankings(self, k: int | None = None) -> dict[str, float]:
        """For each of `rankings`, the share of its first `k` examples that are among the first `k` by default.

        `k` is the number of suspects, or at least a hundredth of the examples. A small share means that the rankings
        disagree: look at both.
        """
        if self.default_ranking is None:
            return {}
        k = max(1, self.count_suspects(), len(self) // 100) if k is None else k
        own = set(self.ranked(k=k).ids.tolist())
        names = [name for name in self.rankings if not name.startswith("norm/") and name != self.default_ranking]
        return {name: len(own & set(self.ranked(name, k).ids.tolist())) / len(own) for name in names}

    @property
    def _measured(self) -> list[str]:
        return [name for name in self.columns if name not in DESCRIPTIONS]

    @property
    def table_path(self) -> Path:
        """The file of the table."""
        return self.directory / f"table.{self.settings['table']}"

    def report(self, path: str | Path | None = None, *, data: Any = None, **options: Any) -> Path:
        """Write an HTML report, by default `report.html` in the directory of the scan, and return its path.

        Pass the scanned data as `data` to show images or texts of the examples. The other options are explained
        in `persample.scanning.report.write_report`.
        """
        from persample.scanning.report import write_report  # needs matplotlib and pillow

        return write_report(self, path, data=data, **options)

    # ---- queries ----

    def neighbours(self, i: int, k: int = 10) -> Ranking:
        """The `k` examples with gradients most similar to that of example `i`, with their cosines."""
        self._check_id(i)
        return queries.find_neighbours(self._get_gradients(-1), i, k)

    def duplicates(self, tolerance: float = 0.1) -> list[list[int]]:
        """Groups of examples with the same effect on the model, largest groups first.

        The gradients of a group differ from that of its first example by at most `tolerance`, relative to the longer
        gradient. Examples without a gradient are in no group.
        """
        if not 0 < tolerance < 1:
            raise ScanError(f"tolerance must be between 0 and 1, got {tolerance}.")
        return sorted(queries.find_duplicates(self._get_gradients(-1), tolerance), key=len, reverse=True)

    def outliers(self, k: int = 10) -> Ranking:
        """The `k` examples with the most unusual gradient directions.

        The score is the leverage of the gradient's direction, as a multiple of the average.
        """
        return queries.find_outliers(self._get_gradients(-1), k)

    def influence(self, test_batch: Any, k: int = 10, method: Literal["tracin", "whitened"] = "tracin") -> Influence:
        """The `k` training examples with the most influence on each sample of a test batch, for and against it.

        "tracin": the inner product of the two gradients times the learning rate, summed over the checkpoints (Pruthi et
        al., 2020). "whitened": the inner product after whitening with the second moment of the training gradients, so
        that common directions count less, as in TRAK (Park et al., 2023) and influence functions. Both use projected
        gradients: the error of a score is about |g| |g'| / sqrt(project).
        """
        scores = self.scores(test_batch, method)
        best, worst = scores.topk(min(k, len(self))), scores.topk(min(k, len(self)), largest=False)
        return Influence(best.indices, best.values, worst.indices, worst.values)

    def scores(self, test_batch: Any, method: Literal["tracin", "whitened"] = "tracin") -> Tensor:
        """`(samples, examples)`: the scores that `influence` ranks."""
        if method not in ("tracin", "whitened"):
            raise ScanError(f"method must be 'tracin' or 'whitened', got {method!r}.")
        total = torch.zeros(())
        for checkpoint, (rate, projected) in enumerate(self._project(test_batch)):
            gradients = self._get_gradients(checkpoint)
            if method == "whitened":
                factor = queries.compute_whitening(gradients.compute_second_moment(scaled=True)).double()
                projected, rate = projected.double() @ factor @ factor.T, 1 / len(self.settings["checkpoints"])
            total = total + rate * queries.compute_products(gradients, projected)
        return total

    # ---- helpers ----

    def _get_gradients(self, checkpoint: int) -> StoredGradients:
        if self.settings["project"] is None:
            raise ScanError(f"The scan in {self.directory} has no projected gradients: it was made with project=None.")
        return StoredGradients(self.store, checkpoint % len(self.settings["checkpoints"]))

    def _check_id(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise ScanError(f"There is no example {i}. The scan has examples 0 to {len(self) - 1}.")

    def _project(self, test_batch: Any) -> list[tuple[float, Tensor]]:
        """For each checkpoint, its learning rate and the projected gradients of the test batch."""
        if self._model is None or self._loss_fn is None:
            raise ScanError("influence needs the model and its loss: open the scan as Scan(path, model, loss_fn).")
        self._get_gradients(0)
        dim, seed, method = (self.settings[key] for key in ("project", "seed", "projection"))
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
        if states.compute_digests() != self.settings["checkpoints"]:
            raise ScanError(
                "The weights of the model differ from the scanned ones. Load the scanned weights, or pass the "
                "checkpoints to Scan(...)."
            )
        batch = move_to_device(test_batch, measurement.device)
        size = Batch(batch, self._batch_dim, None, pair=measurement.takes_pairs).size
        projected = []
        with prepare_model(measurement, None), states.load_each() as loaded:
            for checkpoint in loaded:
                columns = measurement.measure_batch(range(size), batch, None)
                projected.append((states.learning_rates[checkpoint], columns["projection"]))
        return projected
