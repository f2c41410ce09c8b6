"""What a scan knows about each example, and rankings of examples."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persample.scanning import rankings
from persample.scanning.answers import Ranking
from persample.scanning.errors import ScanError
from persample.scanning.estimates import NoEstimate, WrongLabels, count_far_out, read_estimate
from persample.scanning.examples import Examples
from persample.scanning.store import Array, Store
from persample.scanning.table import DESCRIPTIONS, get_column_names, read_column, read_table

if TYPE_CHECKING:
    import pyarrow


class ScannedExamples:
    """The examples of a finished scan in a directory: their columns, what is wrong with them, and their rankings."""

    def __init__(self, directory: str | Path | Store) -> None:
        self.store = directory if isinstance(directory, Store) else Store(directory)
        self.settings = self.store.read_settings()
        shards = self.store.count_shards(len(self.settings["checkpoints"]) - 1)
        if not self.store.is_complete:
            raise ScanError(
                f"The scan in {self.store.address} is not finished ({shards} shards of its last checkpoint are "
                "complete). Run it again to continue."
            )
        if shards != self.summary["shards"]:
            raise ScanError(f"Files of the scan in {self.store.address} are missing. Start over with resume=False.")

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
        examples, ids = Examples(self.store), [int(i) for i in ids]
        for i in ids:
            self._check_id(i)
        return [examples.describe(i) for i in ids]

    @cached_property
    def skipped(self) -> dict[int, str]:
        """What is wrong with the examples that were not measured, by id; see `skip_bad` of `scan`."""
        return {int(i): reason for i, reason in self.summary.get("skipped", {}).items()}

    # ---- rankings ----

    @property
    def rankings(self) -> list[str]:
        """What `ranked` can rank by: the measured columns, and scores that are computed from them."""
        return rankings.list_rankings(self.store, self._measured)

    def ranked(self, by: str | None = None, k: int | None = None) -> Ranking:
        """The `k` examples that come first by a column or another of `rankings`, most suspicious first.

        That is the largest value, for "alignment" and "estimated_alignment" the smallest. The default is the mean loss
        over the checkpoints, or the loss if there is one checkpoint: `benchmarks/results/rankings.json` compares the
        rankings.
        """
        by = by or self.default_ranking
        if by is None:
            raise ScanError("The scan has no column to rank by.")
        scores = torch.from_numpy(self.scores_by(by)).nan_to_num(nan=torch.inf)
        scores[list(self.skipped)] = -torch.inf
        order = scores.argsort(descending=True, stable=True)[: len(self) - len(self.skipped)][:k]
        return Ranking(order, -scores[order] if by in rankings.SMALLEST_FIRST else scores[order])

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
        if estimate:
            return estimate.count
        if by is None:
            return 0
        return count_far_out(np.delete(self.scores_by(by), list(self.skipped)))

    def estimate_wrong_labels(self) -> WrongLabels | NoEstimate:
        """How many labels are wrong, with an interval; or a false value with the `reason` why that is not known.

        It is too low if the model has memorised its labels and no earlier checkpoint was scanned, and too high if the
        classes overlap or the model is not trained yet; `warning` says so as far as the scan can tell.
        """
        return read_estimate(self.summary, self.columns)

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
        path = self.directory / f"table.{self.settings['table']}"
        self.store.fetch(path)
        return path

    def _check_id(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise ScanError(f"There is no example {i}. The scan has examples 0 to {len(self) - 1}.")
