"""Passes over data that take the whole gradient of each example: nothing is projected, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.batches import Batch, BatchDim
from persample.losses import LossFunction
from persample.recording import Selection, Verify
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.errors import NotFinite, ScanError
from persample.scanning.fisher import Labels, make_fitted_loss
from persample.scanning.measure import Measurement, prepare_model
from persample.scanning.preconditioners import PRECONDITIONERS, Name, Preconditioner, end_pass
from persample.scanning.progress import choose_mode, show_progress
from persample.scanning.reduced import ComputedTerms
from persample.scanning.source import Collate, Source
from persample.terms import Term

SHARD_SIZE = 1024  # examples that are sorted by length together
Compute = Callable[[str, Term], Any]  # from the name of a parameter and its term in a batch
Fitted = Mapping[str, Preconditioner]  # by the name of the parameter


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Options of all functions that take passes over the data. Those that are not explained here are those of `scan`.

    Attributes:
        checkpoints: state dicts or files; the scores are averaged over them. Take some of one training.
        measure: a function of the model and the queries that replaces the loss for them, as in `Scan.influence`.
        parameters: the parameters whose gradients count, as in `scan`.
        batch_size: the number of examples in a batch.
        batch_dim: the dimension of the samples.
        fisher: whose gradients the preconditioner is fitted to: "data", those of the labels of the data; "sampled",
            those of labels that the model draws, whose second moment is the Fisher matrix (for cross-entropy, binary
            cross-entropy and squared errors of torch); or a function of the model and a batch that returns losses.
        loss_reduction: "mean" or "sum": what a loss function does that returns a single number.
        collate: makes a batch of a list of examples.
        verify: compare samples with the same samples alone, as in `record`. False turns all checks of the scores off.
        device: where the model runs.
        progress: show a progress bar.
    """

    checkpoints: Sequence[State | str | Path] | None = None
    measure: LossFunction | None = None
    parameters: Selection | None = None
    fisher: Labels | LossFunction = "data"
    batch_size: int | None = None
    batch_dim: BatchDim = 0
    loss_reduction: str = "mean"
    collate: Collate | None = None
    verify: Verify = "first"
    device: torch.device | str | None = None
    progress: bool | None = None


class PassKeywords(TypedDict, total=False):
    """The fields of `PassOptions`."""

    checkpoints: Sequence[State | str | Path] | None
    measure: LossFunction | None
    parameters: Selection | None
    fisher: Labels | LossFunction
    batch_size: int | None
    batch_dim: BatchDim
    loss_reduction: str
    collate: Collate | None
    verify: Verify
    device: torch.device | str | None
    progress: bool | None


class Passes:
    """Passes over the examples and over batches of queries, with the checkpoint that is loaded."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, data: Any, options: PassOptions) -> None:
        self.source = data if isinstance(data, Source) else Source(data, options.batch_size, options.collate)
        losses = (loss_fn, options.measure or loss_fn, make_fitted_loss(loss_fn, options.fisher))
        self.measurement, self.queried, self.fitted = (
            Measurement(
                model,
                function,
                quantities=["loss", "norm"],
                parameters=options.parameters,
                batch_dim=options.batch_dim,
                loss_reduction=options.loss_reduction,
                verify=options.verify if i < 2 or options.fisher == "data" else False,  # drawn labels differ
            )
            for i, function in enumerate(losses)
        )
        self.parameters = {name: p for name, p in self.measurement.parameters.items() if p.numel()}
        if complex_names := [name for name, p in self.parameters.items() if p.is_complex()]:
            raise ScanError(f"score() needs real parameters, and {complex_names[0]!r} is complex. Leave it out.")
        self.checkpoints = Checkpoints(model, options.checkpoints)
        self._device = None if options.device is None else torch.device(options.device)
        self.batch_dim, self._mode = options.batch_dim, choose_mode(options.progress)

    @contextmanager
    def load_each(self) -> Iterator[Iterator[int]]:
        """Give an iterator that loads each checkpoint and yields its index. The block restores the model."""
        with prepare_model(self.measurement, self._device), self.checkpoints.load_each() as loaded:
            yield loaded

    def fit(self, method: Name, queries: Any = None, share: float = 0.0) -> Fitted:
        """The preconditioner of each parameter that has gradients.

        `share` is that of the second moment of the queries; the rest is that of the data.
        """
        kind = PRECONDITIONERS[method]
        fitted: dict[str, Preconditioner] = {name: kind(p.shape) for name, p in self.parameters.items()}
        for i in range(kind.passes):
            seen: set[str] = set()
            examples = 0
            for ids, found in self.iterate(_measure_by(fitted), f"pass {i + 1}", self.fitted):
                seen |= set(found)
                examples += len(ids)
                _add_sums(fitted, found, len(ids))
            if share:
                size, found = self.pass_queries(queries, _measure_by(fitted))
                _add_sums(fitted, found, size, share / (1 - share) * examples / size)
            fitted = {name: preconditioner for name, preconditioner in fitted.items() if name in seen}
            end_pass(fitted)
        return fitted

    def count_queries(self, queries: Any) -> int:
        """The number of samples in a batch of queries."""
        return Batch(queries, self.batch_dim, None, pair=self.queried.losses.takes_pairs).size

    def pass_queries(self, queries: Any, compute: Compute) -> tuple[int, Mapping[str, Any]]:
        """The number of queries, and what a function computes from the term of each parameter."""
        size = self.count_queries(queries)
        results = ComputedTerms(compute)
        self.queried.pass_terms(range(size), queries, results)
        return size, results.values

    def iterate(
        self, compute: Compute, title: str, measurement: Measurement | None = None
    ) -> Iterator[tuple[Sequence[int], Mapping[str, Any]]]:
        """The ids of each batch with what a function computes from the terms of its gradients."""
        with show_progress(title, self.source.size, 0, self._mode) as update:
            for batch in self.source.iterate_batches(SHARD_SIZE, lambda shard: True):
                results = ComputedTerms(compute)
                (measurement or self.measurement).pass_terms(batch.ids, batch.batch, results)
                yield batch.ids, results.values
                update(len(batch.ids))

    def add_up(self, compute: Compute, shape: tuple[int, ...]) -> Tensor:
        """`(*shape, examples)`: for each example the sum over the parameters of what a function computes.

        The function returns `(examples of the batch, *shape)` for the term of a parameter.
        """
        totals = torch.zeros(*shape, 0)
        for ids, found in self.iterate(compute, "scores"):
            part = sum(found.values(), torch.zeros(len(ids), *shape)).cpu()
            is_finite = part.reshape(len(ids), -1).isfinite().all(1)
            if not bool(is_finite.all()):
                raise NotFinite([i for i, known in zip(ids, is_finite.tolist(), strict=True) if not known], "gradient")
            totals = F.pad(totals.to(part), (0, max(0, 1 + max(ids) - totals.shape[-1])))
            totals[..., list(ids)] = part.movedim(0, -1)
        return totals


def _measure_by(fitted: Fitted) -> Compute:
    return lambda name, term: fitted[name].measure(term)


def _add_sums(fitted: Fitted, found: Mapping[str, Any], count: int, weight: float = 1.0) -> None:
    for name, preconditioner in fitted.items():
        preconditioner.add(found.get(name, ()), count, weight)
