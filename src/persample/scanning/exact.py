"""Influence from whole gradients: nothing is projected, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.batches import Batch, BatchDim
from persample.gradients import Stack
from persample.losses import LossFunction
from persample.recording import Selection, Verify
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.errors import NotFinite, ScanError
from persample.scanning.measure import Gradient, Measurement, prepare_model
from persample.scanning.preconditioners import PRECONDITIONERS, Name, Preconditioner
from persample.scanning.progress import choose_mode, show_progress
from persample.scanning.source import Collate, Source
from persample.terms import Dense, Term

USUAL_DAMPING = 0.1  # of the mean eigenvalue of each parameter: docs/internals/scan_evidence.md
SHARD_SIZE = 1024  # examples that are sorted by length together
Compute = Callable[[str, Term], Any]  # from the name of a parameter and its term in a batch


def score(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    *,
    method: Name = "ekfac",
    damping: float = USUAL_DAMPING,
    checkpoints: Sequence[State | str | Path] | None = None,
    measure: LossFunction | None = None,
    parameters: Selection | None = None,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    collate: Collate | None = None,
    verify: Verify = "first",
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Tensor:
    """`(queries, examples)`: the influence of each example of `data` on each sample of a batch, from whole gradients.

    A training step on an example with a positive score lowers the loss of the query. Nothing is projected and nothing
    stored, so the next queries cost the same again; `scan` stores rows for many queries. Options that are not explained
    here are those of `scan`.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
    >>> score(model, nn.CrossEntropyLoss(), (x, y), (x[:5], y[:5])).shape
    torch.Size([5, 100])

    Args:
        data: the training data, as for `scan`; the gradients of the queries and one batch are in memory at a time.
        queries: a batch of samples with their targets, as the loss takes them.
        method: how the gradients of the queries are preconditioned. "ekfac" divides by the second moments along the
            eigenvectors of Kronecker factors, in three passes over the data; "kfac" takes the product of both factors
            for the second moments, in two passes; "diagonal" divides by the second moment of each entry; "dot" by
            nothing, in one pass.
        damping: what is added to the second moments, relative to their mean for each parameter.
        checkpoints: state dicts or files; the scores are averaged over them. Take some of one training.
        measure: a function of the model and the queries that replaces the loss for them, as in `Scan.influence`.
        parameters: the parameters whose gradients count, as in `scan`.
    """
    _check_method(method, damping)
    source = Source(data, batch_size, collate)
    options: Any = {
        "quantities": ["loss", "norm"],
        "parameters": parameters,
        "batch_dim": batch_dim,
        "loss_reduction": loss_reduction,
        "verify": verify,
    }
    measurement, queried = (Measurement(model, part, **options) for part in (loss_fn, measure or loss_fn))
    if complex_names := [name for name, p in measurement.parameters.items() if p.is_complex()]:
        raise ScanError(f"score() needs real parameters, and {complex_names[0]!r} is complex. Leave it out.")
    states, total = Checkpoints(model, checkpoints), torch.zeros(())
    passes = _Passes(measurement, source, progress)
    with prepare_model(measurement, None if device is None else torch.device(device)), states.load_each() as loaded:
        for _ in loaded:
            fitted, rows = passes.fit(method), _compute_rows(queried, queries, batch_dim)
            directions = {name: fitted[name].apply(part, damping) for name, part in rows.items() if name in fitted}
            total = total + passes.multiply(directions)
    return total / len(states.learning_rates)


def _check_method(method: str, damping: float) -> None:
    if method not in PRECONDITIONERS:
        raise ScanError(f"method must be one of {', '.join(map(repr, PRECONDITIONERS))}, got {method!r}.")
    if not 0 < damping < float("inf"):
        raise ScanError(f"damping must be a positive number, relative to the mean second moment, got {damping!r}.")


def _compute_rows(measurement: Measurement, queries: Any, batch_dim: BatchDim) -> Gradient:
    """The gradient of each query by parameter."""
    size = Batch(queries, batch_dim, None, pair=measurement.takes_pairs).size
    results = _Results(lambda _, term: term.dense())
    measurement.pass_terms(range(size), queries, results)
    return results.found


class _Results:
    """What a function computes from the term of each parameter."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.found: dict[str, Any] = {}

    def receive(self, stack: Stack) -> None:
        """Take the term of one parameter, or of several. A pass that is repeated replaces the results."""
        for name, term in stack.split():
            self.found[name] = self._compute(name, term)


def _measure_by(fitted: Mapping[str, Preconditioner]) -> Compute:
    return lambda name, term: fitted[name].measure(term)


class _Passes:
    """Passes over the data with the checkpoint that is loaded."""

    def __init__(self, measurement: Measurement, source: Source, progress: bool | None) -> None:
        self._measurement, self._source, self._mode = measurement, source, choose_mode(progress)

    def fit(self, method: Name) -> Mapping[str, Preconditioner]:
        """The preconditioner of each parameter that has gradients."""
        kind = PRECONDITIONERS[method]
        fitted = {name: kind(p.shape) for name, p in self._measurement.parameters.items() if p.numel()}
        for i in range(kind.passes):
            seen = set()
            for ids, found in self._iterate(f"pass {i + 1}", _measure_by(fitted)):
                seen |= set(found)
                for name, preconditioner in fitted.items():
                    preconditioner.add(found.get(name, ()), len(ids))
            fitted = {name: preconditioner for name, preconditioner in fitted.items() if name in seen}
            for preconditioner in fitted.values():
                preconditioner.end_pass()
        return fitted

    def multiply(self, rows: Gradient) -> Tensor:
        """`(rows, examples)`: the inner products with the gradients of all examples."""
        rows = {name: part for name, part in rows.items() if part.numel()}
        count = max(map(len, rows.values()), default=0)
        scores = torch.zeros(count, 0)
        for ids, found in self._iterate(
            "scores", lambda name, term: term.gram(Dense(rows[name])) if name in rows else 0.0
        ):
            part = sum(found.values(), torch.zeros(len(ids), count)).cpu()
            if not bool(part.isfinite().all()):
                raise NotFinite([i for i, row in zip(ids, part, strict=True) if not row.isfinite().all()], "gradient")
            scores = F.pad(scores.to(part), (0, max(0, 1 + max(ids) - scores.shape[1])))
            scores[:, list(ids)] = part.T
        return scores

    def _iterate(self, title: str, compute: Compute) -> Iterator[tuple[Sequence[int], Mapping[str, Any]]]:
        """The ids of each batch with what a function computes from the terms of its gradients."""
        with show_progress(title, self._source.size, 0, self._mode) as update:
            for batch in self._source.iterate_batches(SHARD_SIZE, lambda shard: True):
                results = _Results(compute)
                self._measurement.pass_terms(batch.ids, batch.batch, results)
                yield batch.ids, results.found
                update(len(batch.ids))
