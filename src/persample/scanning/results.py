"""The result of a scan, and queries on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from persample.batches import BatchDim
from persample.losses import LossFunction
from persample.recording import Options, Selection
from persample.scanning import influence, queries
from persample.scanning.answers import Influence, Ranking, format_html_table, rank_scores
from persample.scanning.checkpoints import State, check_weights, load_last
from persample.scanning.damping import Damping
from persample.scanning.errors import ScanError
from persample.scanning.exact import USUAL_DAMPING, check_exact_method, score
from persample.scanning.influence import InfluenceScores, Method, StoredModel
from persample.scanning.preconditioners import Name as ExactMethod
from persample.scanning.probe import Probe
from persample.scanning.progress import choose_mode
from persample.scanning.scanned_examples import ScannedExamples
from persample.scanning.source import Source
from persample.scanning.step_sizes import Adam
from persample.scanning.store import Store
from persample.scanning.stored_gradients import StoredGradients, write_rows
from persample.scanning.table import DESCRIPTIONS

if TYPE_CHECKING:
    from persample.scanning.issues import Issues


_SHOWN_IN_NOTEBOOKS = ("name", "label", "predicted", "probability", "suggested", "prediction", "target")


class Scan(ScannedExamples):
    """A finished scan in a directory.

    `scan(...)` returns one. To open a scan by its path, pass the directory, or its address in object storage such as
    `s3://bucket/scan`; `influence` also needs the model, its loss and the checkpoints that were scanned, and with
    `exact=True` the data.

    >>> import torch
    >>> from persample import scan
    >>> found = scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.randn(20, 3), torch.randint(2, (20,))), project=8)
    >>> Scan(found.directory).column("loss").shape
    (20,)
    """

    def __init__(
        self,
        directory: str | Path | Store,
        model: nn.Module | None = None,
        loss_fn: LossFunction | None = None,
        checkpoints: Sequence[State | str | Path] | None = None,
        *,
        batch_dim: BatchDim = 0,
        data: Any = None,
        kept_by: Any = None,
    ) -> None:
        super().__init__(directory)
        self._model, self._loss_fn, self._checkpoints, self._batch_dim = model, loss_fn, checkpoints, batch_dim
        self._data = data
        self._stored_models: list[StoredModel] = []
        self._kept_by = kept_by  # an object that removes the directory when it is collected

    def __repr__(self) -> str:
        columns = ", ".join(name for name in self.columns if name not in DESCRIPTIONS)
        dim = self.settings["project"]
        coupled = self.settings.get("coupled")
        whitened = "whitened and " if self.settings.get("precondition") else ""
        end = (f"; {whitened}projected to {dim}" if dim else "") + (
            f"; {coupled} of coupled samples" if coupled else ""
        )
        return f"Scan of {len(self)} examples: {columns}{end}"

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

    def report(self, path: str | Path | None = None, *, data: Any = None, **options: Any) -> Path:
        """Write an HTML report, by default `report.html` in the directory of the scan, and return its path.

        Pass the scanned data as `data` to show images or texts of the examples. The other options are explained
        in `persample.scanning.report.write_report`.
        """
        from persample.scanning.report import write_report  # needs matplotlib and pillow

        return write_report(self, path, data=data, **options)

    def find_issues(self, data: Any = None) -> Issues:
        """What is wrong with the data, by type of issue. With the scanned data, its inputs are looked at as well.

        >>> import persample, torch
        >>> data = torch.randn(80, 3), torch.randint(2, (80,))
        >>> found = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, project=16).find_issues()
        >>> "near_duplicate" in found, found.table().column_names[:2]
        (True, ['is_label_issue', 'label_score'])
        """
        from persample.scanning.issues import find_issues  # needs pillow

        return find_issues(self, data if data is None else Source(data, skip_bad=bool(self.skipped)))

    # ---- queries ----

    def neighbours(self, i: int, k: int = 10) -> Ranking:
        """The `k` examples with gradients most similar to that of example `i`, with their cosines."""
        self._check_id(i)
        return queries.find_neighbours(self._get_gradients(-1), i, k)

    def duplicates(self, tolerance: float = 0.1, progress: bool = False) -> list[list[int]]:
        """Groups of examples with the same effect on the model, largest groups first.

        The gradients of a group differ from that of its first example by at most `tolerance`, relative to the longer
        gradient. Examples without a gradient are in no group. The work is at most that of comparing all pairs in full,
        twice; `progress` shows how far it is.
        """
        if not 0 < tolerance < 1:
            raise ScanError(f"tolerance must be between 0 and 1, got {tolerance}.")
        mode = choose_mode(None if progress else False)
        return sorted(queries.find_duplicates(self._get_gradients(-1), tolerance, mode), key=len, reverse=True)

    def outliers(self, k: int = 10, damping: Damping = "auto") -> Ranking:
        """The `k` examples with the most unusual gradient directions.

        The score is the leverage of the gradient's direction, as a multiple of the average. `damping` is explained
        in `influence`; here it is relative to the mean eigenvalue of all parameters together, and "auto" may be less
        than 1.
        """
        return queries.find_outliers(self._get_gradients(-1), k, damping)

    def self_influence(self, method: Method = "whitened", k: int | None = None, damping: Damping = "auto") -> Ranking:
        """The `k` examples (default: all) with the most influence on their own loss, by a method of `influence`.

        With "tracin" this is the column `self_influence` of the table, up to the error of the projection.

        >>> import persample, torch
        >>> data = torch.randn(80, 3), torch.randint(2, (80,))
        >>> found = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, project=16)
        >>> len(found.self_influence("whitened", k=5))
        5
        """
        self._check_method(influence.check_method(method))
        scores = influence.compute_self_influence(self._get_models(), self.settings["learning_rates"], method, damping)
        order = scores.argsort(descending=True, stable=True)[:k]
        return Ranking(order, scores[order])

    def influence(
        self,
        test_batch: Any,
        k: int = 10,
        method: Method | ExactMethod | None = None,
        *,
        exact: bool = False,
        damping: Damping = "auto",
        measure: LossFunction | None = None,
        parameters: Selection | None = None,
        adam: Adam | None = None,
    ) -> Influence:
        """The `k` training examples with the most influence on each sample of a test batch, for and against it.

        >>> import persample, torch
        >>> x, y = torch.randn(80, 3), torch.randint(2, (80,))
        >>> found = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), project=16)
        >>> found.influence((x[:2], y[:2]), k=3).for_ids.shape
        torch.Size([2, 3])
        >>> logit = lambda model, batch: model(batch[0])[:, 1]  # the examples that lower this output
        >>> found.influence((x[:2], y[:2]), k=3, measure=logit, parameters=["bias"]).for_ids.shape
        torch.Size([2, 3])

        Without `exact`, projected gradients are compared: the error of an inner product is about
        |g| |g'| / sqrt(project).

        Args:
            test_batch: samples with their targets, as the loss of the scan takes them.
            k: the number of examples for and against each sample.
            method: "whitened" by default, with `exact` "ekfac". "tracin" is the inner product of the two gradients
                times the learning rate, summed over the checkpoints (Pruthi et al., 2020). "cosine" is their cosine,
                averaged over the checkpoints with the learning rates as weights. "whitened" is the inner product
                after whitening with the second moment of the training gradients, averaged over the checkpoints, so
                that common directions count less, as in influence functions. "trak" is the same with gradients of the
                margin log(p / (1 - p)), where each training example counts with 1 - p (Park et al., 2023); the loss
                must be -log p of one label per sample, or a squared error, whose root takes the place of the margin.
                Scan several checkpoints of one training.
            exact: pass over the data again, and compare whole gradients; `method` is then one of
                `persample.scanning.score`. Open the scan with its data, or use the one that `scan` returned.
            damping: what "whitened" and "trak" add to the second moment, relative to its mean eigenvalue for each
                parameter (for all together unless the projection is "kronecker"). "auto" chooses it by the steps of
                the training between the checkpoints, or is 3 if there are none; docs/scan.md explains how. With
                `exact`, it is that of `score`.
            measure: a function of the model and the batch, called as the loss, that returns one number per sample. It
                replaces the loss: a training step on an example with a positive score lowers this number.
            parameters: only these parameters of the test gradients count, as in `scan`. The scores of groups of
                parameters add up to the score of all (not with "cosine").
            adam: the Adam optimizer of the training, or its second moments by parameter name: the inner product is then
                the effect of a step of Adam without momentum (Xia et al., 2024). Only for "tracin".

        Warns:
            RandomScores: the scores are on par with random: the projection is too coarse for this model.
        """
        if exact:
            scores = self._score_exactly(test_batch, method, damping, measure, parameters, adam)
            return rank_scores(scores, min(k, len(self)))
        return self._make_scores(test_batch, method, damping, measure, parameters, adam).rank(min(k, len(self)))

    def scores(
        self,
        test_batch: Any,
        method: Method | ExactMethod | None = None,
        *,
        exact: bool = False,
        damping: Damping = "auto",
        measure: LossFunction | None = None,
        parameters: Selection | None = None,
        adam: Adam | None = None,
    ) -> Tensor:
        """`(samples, examples)`: the scores that `influence` ranks, with the same arguments."""
        if exact:
            return self._score_exactly(test_batch, method, damping, measure, parameters, adam)
        return self._make_scores(test_batch, method, damping, measure, parameters, adam).compute()

    def export_rows(
        self, directory: str | Path, checkpoint: int = -1, dtype: Literal["float16", "float32"] = "float32"
    ) -> Path:
        """Write the projected gradients of one checkpoint as one file, for programs such as FAISS.

        The directory gets `rows.npy` `(examples, project)`, rows of length 1 in the order of the data, which
        `numpy.load(..., mmap_mode="r")` maps; `ids.npy`, the ids of the examples; and `lengths.npy`, the original
        lengths. The inner product of two rows is the cosine that `neighbours` ranks.

        >>> import persample, torch, numpy, tempfile
        >>> data = torch.randn(80, 3), torch.randint(2, (80,))
        >>> found = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, project=16)
        >>> directory = tempfile.TemporaryDirectory()
        >>> numpy.load(found.export_rows(directory.name) / "rows.npy", mmap_mode="r").shape
        (80, 16)
        """
        return write_rows(self._get_gradients(checkpoint), Path(directory), dtype)

    # ---- model ----

    @property
    def has_model(self) -> bool:
        """Whether the scan was opened with its model and its loss."""
        return self._model is not None and self._loss_fn is not None

    @contextmanager
    def load_model(self) -> Iterator[tuple[nn.Module, LossFunction]]:
        """Give the model with the scanned weights, those of the last checkpoint, and the loss."""
        if self._model is None or self._loss_fn is None:
            raise ScanError("The scan has no model: open it as Scan(path, model, loss_fn).")
        check_weights(self.settings, self._model, self._checkpoints)
        with load_last(self._model, self._checkpoints):
            yield self._model, self._loss_fn

    def describe_checkpoints(self) -> str:
        """Whether the scanned checkpoints are of one training, and the damping that influence chooses by them."""
        return influence.describe_training(self._get_models())

    # ---- helpers ----

    def _get_gradients(self, checkpoint: int) -> StoredGradients:
        return self._get_models()[checkpoint].stored

    def _get_models(self) -> list[StoredModel]:
        """The stored gradients of all checkpoints."""
        if self.settings["project"] is None:
            raise ScanError(f"The scan in {self.directory} has no projected gradients: it was made with project=None.")
        if not self._stored_models:
            self._stored_models = influence.load_models(self.store)
        return self._stored_models

    def _make_scores(
        self,
        test_batch: Any,
        method: str | None,
        damping: Damping,
        measure: LossFunction | None,
        parameters: Selection | None,
        adam: Adam | None,
    ) -> InfluenceScores:
        method = influence.check_method("whitened" if method is None else method)
        self._check_method(method)
        if adam is not None and method != "tracin":
            raise ScanError(f"adam can be combined with method='tracin' only, not with {method!r}.")
        if self._model is None or (self._loss_fn is None and measure is None):
            raise ScanError("influence needs the model and its loss: open the scan as Scan(path, model, loss_fn).")
        models = self._get_models()
        probe = Probe(measure or self._loss_fn, parameters, adam)  # type: ignore[arg-type]
        tests = probe.project_batch(self._model, self._checkpoints, self.store, self._batch_dim, test_batch)
        influence.warn_if_random(models, tests, method, damping)
        return influence.make_scores(models, tests, method, damping, of_loss=measure is None)

    def _score_exactly(
        self,
        test_batch: Any,
        method: str | None,
        damping: Damping,
        measure: LossFunction | None,
        parameters: Selection | None,
        adam: Adam | None,
    ) -> Tensor:
        """`score` with the model and the data of this scan."""
        method = check_exact_method("ekfac" if method is None else method)
        self._check_coupled()
        if adam is not None:
            raise ScanError("adam cannot be combined with exact=True.")
        if self._model is None or self._loss_fn is None or self._data is None:
            raise ScanError("exact=True needs the data: open the scan as Scan(path, model, loss_fn, data=data).")
        if self.skipped:
            raise ScanError("exact=True is not available: the scan has skipped examples of its data.")
        source = self._data if isinstance(self._data, Source) else Source(self._data)
        if source.compute_digest() != self.settings["data"]:
            raise ScanError("The data differs from the scanned data.")
        check_weights(self.settings, self._model, self._checkpoints)
        weights = dict(self._model.named_parameters())
        scanned: dict[str, Tensor] = {name: weights[name] for name in self.settings["parameters"]}
        return score(
            self._model,
            self._loss_fn,
            source,
            test_batch,
            method=method,
            damping=USUAL_DAMPING if damping == "auto" else damping,
            checkpoints=self._checkpoints,
            measure=measure,
            parameters=list(Options(parameters=parameters).select(scanned)),
            batch_dim=self._batch_dim,
            loss_reduction=self.settings["loss_reduction"],
        )

    def _check_method(self, method: Method) -> None:
        self._check_coupled()
        influence.check_method(method, self.settings.get("precondition") is not None)
        if method == "trak":
            influence.check_trak_loss(self.settings["loss"])

    def _check_coupled(self) -> None:
        if self.settings.get("coupled") is not None:
            raise ScanError(
                "Influence is not available: the scan has contributions of examples to the gradients of their batches "
                "(coupled='contributions'), and an example without its batch would have others."
            )
