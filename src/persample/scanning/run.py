"""The scan of a dataset."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from persample._internal.precision import widen
from persample.batches import BatchDim
from persample.gradients import ProjectionMethod
from persample.losses import LossFunction
from persample.recording import Coupled, Selection, Verify
from persample.scanning.alignment import average_rows, write_alignment
from persample.scanning.batch_size import choose_batch_size
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.diagnosis import explain_failure, make_screen
from persample.scanning.errors import ScanError
from persample.scanning.factors import EXAMPLES_OF_FACTORS, FactorMethod, Factors, check_factors, copy_factors
from persample.scanning.gradient_sum import GradientSum, get_mean_file
from persample.scanning.groups import Groups
from persample.scanning.labels import check_classes
from persample.scanning.measure import QUANTITIES, Columns, Gradient, Measurement, prepare_model
from persample.scanning.names import Ids
from persample.scanning.options import ScanOptions
from persample.scanning.packing import pack_shard
from persample.scanning.progress import Mode, choose_mode, say, show_progress
from persample.scanning.results import Scan
from persample.scanning.source import Collate, ShardBatch, Source
from persample.scanning.steps import write_steps
from persample.scanning.store import Array, Store
from persample.scanning.summary import summarise
from persample.scanning.table import TableKind, write_table
from persample.scanning.workers import ScanWorkers
from persample.terms import choose_library, use_library


def scan(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    *,
    quantities: Sequence[str] = QUANTITIES,
    out: str | Path | None = None,
    batch_size: int | None = None,
    project: int | None = 512,
    projection: ProjectionMethod = "kronecker",
    precondition: FactorMethod | Scan | None = None,
    seed: int = 0,
    dtype: Literal["float16", "float32"] = "float16",
    groups: Groups | None = None,
    parameters: Selection | None = None,
    checkpoints: Sequence[State | str | Path] | None = None,
    learning_rates: Sequence[float] | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    nonfinite: Literal["raise", "keep"] = "raise",
    collate: Collate | None = None,
    classes: Sequence[str] | None = None,
    ids: Ids | None = None,
    shard_size: int = 1024,
    table: TableKind = "parquet",
    verify: Verify = "first",
    coupled: Coupled = None,
    skip_bad: bool = False,
    resume: bool = True,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Scan:
    """Measure the gradient of each example of a dataset, and store the result in the directory `out`.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
    >>> found = scan(model, nn.CrossEntropyLoss(), (x, y), project=64)
    >>> found
    Scan of 100 examples: loss, norm, self_influence, el2n, estimated_alignment, norm/0, norm/2; projected to 64
    >>> found.column("norm").shape, len(found.neighbours(7, k=3).ids)
    ((100,), 3)

    `data` is a Dataset, a DataLoader (the scan reads its dataset in dataset order), tensors with the examples in
    dimension 0, or an iterable that can be iterated several times. `batch_size` and `collate` are taken from a
    DataLoader unless given. Otherwise a batch has 64 examples, or up to 256 if there are thousands of examples, and the
    model saves little for each of them.

    `loss_fn` is a loss of torch or another `nn.Module`, called as `loss_fn(model(inputs), targets)`, or any other
    function, called as `loss_fn(model, batch)`. A function returns one loss per sample, or a single number: their mean,
    or with `loss_reduction="sum"` their sum. A single number costs an additional forward pass per sample.

    `quantities` selects the columns of the table:

    - "loss": the loss of the example;
    - "norm": the norm of its gradient;
    - "group_norms": `norm/GROUP`, the norm for each module, or for each of `groups`: a function from a parameter's name
      to its group, or a dict from group to parameter names;
    - "self_influence": the squared norm times the learning rate, summed over `checkpoints`. It is high for examples
      that no other example explains, such as wrong labels;
    - "estimated_alignment": the cosine with the mean gradient of all examples, both projected: an estimate with an
      error of about 1 / sqrt(project);
    - "alignment": the same cosine, exact. It needs a second, plain pass over the data. Measured by default only with
      `project=None`, in place of the estimate;
    - "noise_scale": not a column but in the summary, with the batch size that it suggests. It is an estimate from the
      projected gradients, and exact with "alignment" or with `project=None`;
    - "predictions": what the model says about the example, from the same forward pass. For classifiers: `predicted`,
      its `probability`, `given_probability` (of the label), `suggested` (a label that fits better, else nothing) and
      `el2n`; for regression: `prediction` and `target`; for several labels per example: the label that the model
      contradicts most. Outputs that are none of these give no columns.

    `checkpoints` are state dicts or files of state dicts, with `learning_rates` (default 1); without them the model is
    scanned as it is. All columns describe the last checkpoint, except self_influence, mean_loss, el2n and
    suggested, which are computed from all of them.

    `project` numbers of each gradient are stored in `dtype` for the queries `Scan.influence`, `neighbours`,
    `duplicates` and `outliers`; with None, none are stored. `PerSampleGradients.project` explains `projection` and
    `seed`. `parameters` selects parameters as in `record`, and `batch_dim` is the dimension of the samples, as there.

    `precondition="kfac"` whitens gradients by Kronecker factors before they are projected, for influence on language
    models; an earlier scan in its place gives its factors. docs/scan.md says more.

    `verify` is as in `record`: by default, two examples of the first batch run alone, and their outputs and losses are
    compared with those of the batch. False turns both comparisons off.

    `coupled="contributions"` scans losses in which samples influence each other, such as contrastive ones, as in
    `record`: norms and stored rows are then of an example's contributions to the gradient of its batch, and depend on
    the batch. The loss function must return one loss per sample. `scan.json` and `repr` say so. There is no influence,
    and no rescan.

    The model is in evaluation mode during the scan, on `device` if given, and is restored afterwards. An example with a
    loss or gradient that is not finite raises an error, or is kept in the table with `nonfinite="keep"`.

    An example that cannot be read, that has another shape than the others, NaN in its inputs or a label that is no
    class raises `BadExamples`, which names all of them. With `skip_bad=True` these examples are not measured: they keep
    their ids, `Scan.skipped` says what is wrong with them, and `nonfinite` is "keep".

    Results are stored in shards of `shard_size` examples. A scan that was stopped continues with the first missing
    shard and gives the same result; `resume=False` starts over. The processes of torch.distributed share the work.
    `table` is the format of the table, `classes` are the names of the classes (default: `data.classes`), and `progress`
    shows a progress bar (default: in a terminal or a notebook; elsewhere a line is printed every half minute). Without
    `out`, the files are removed with the returned object.

    `ids` gives the examples names, for the column `name`, queries and reports: a sequence with one name per example, or
    the key of the name in each example. Datasets that know their files, such as those of torchvision, need none.
    """
    options = ScanOptions(
        quantities=quantities,
        project=project,
        projection=projection,
        precondition=precondition.settings["precondition"] if isinstance(precondition, Scan) else precondition,
        seed=seed,
        dtype=dtype,
        groups=groups,
        parameters=parameters,
        batch_dim=batch_dim,
        loss_reduction=loss_reduction,
        nonfinite="keep" if skip_bad else nonfinite,
        classes=classes,
        shard_size=shard_size,
        table=table,
        coupled=coupled,
    )
    source = Source(data, batch_size, collate, ids, skip_bad)
    if source.size == 0:
        raise ScanError("The data has no examples.")
    check_classes(source.classes if classes is None else classes, model)
    temporary = tempfile.TemporaryDirectory(prefix="persample-") if out is None else None
    store = Store(temporary.name if temporary else str(out))
    before = store.read_settings() if store.exists and resume else {}
    measurement = options.make_measurement(model, loss_fn, source, verify)
    states = Checkpoints(model, checkpoints, learning_rates)
    with explain_failure(source, measurement):
        if skip_bad:
            source.screen = make_screen(source, measurement)
        if source.has_default_batch_size:
            stored = before.get("batch_size")
            if isinstance(stored, int) and stored > 0:
                source.batch_size = stored
            else:
                source.batch_size = choose_batch_size(measurement, source, shard_size)
        settings = options.make_settings(source, measurement, states, before.get("products", choose_library().library))
    if isinstance(precondition, Scan):
        settings |= {"factors": check_factors(precondition.store, settings)}
    run = _Run(store, source, measurement, settings, progress)
    with prepare_model(measurement, None if device is None else torch.device(device)):
        if run.start(resume, precondition.store if isinstance(precondition, Scan) else None):
            products = use_library(store.read_settings()["products"])
            with products, states.load_each() as loaded, explain_failure(source, measurement):
                for checkpoint in loaded:
                    run.scan_checkpoint(checkpoint)
            run.finish(states)
    return Scan(store.directory, model, loss_fn, checkpoints, batch_dim=batch_dim, data=source, kept_by=temporary)


class _Run:
    """The part of a scan that this process does."""

    def __init__(
        self,
        store: Store,
        source: Source,
        measurement: Measurement,
        settings: Mapping[str, Any],
        progress: bool | None,
    ) -> None:
        self._store, self._source, self._measurement, self._settings = store, source, measurement, settings
        self._workers = ScanWorkers()
        self._is_first_pass = True
        self._like: Columns = {}  # the columns of a batch, without entries
        self._mode: Mode = choose_mode(progress) if self._workers.is_first else "none"

    def start(self, resume: bool, given: Store | None = None) -> bool:
        """Create the directory, or check the scan in it. Return whether any work is left.

        `given` is the store of a scan whose factors are taken.
        """
        if self._workers.is_first:
            self._store.start(self._settings, resume)
            if given is not None:
                copy_factors(given, self._store)
            self._say_where_it_continues()
        self._workers.wait()
        return not self._store.is_complete

    def _say_where_it_continues(self) -> None:
        """Print how much of an earlier run is kept."""
        count, size = len(self._settings["checkpoints"]), self._settings["examples"]
        shards = [self._store.count_shards(checkpoint) for checkpoint in range(count)]
        if self._store.is_complete or not any(shards):
            return
        current = max(checkpoint for checkpoint in range(count) if shards[checkpoint])
        done = shards[current] * self._settings["shard_size"]
        of_all = "" if size is None else f" of {size:,}"
        part = f" of checkpoint {current + 1} of {count}" if count > 1 else ""
        done = done if size is None else min(done, size)
        say(
            f"persample: the scan in {self._store.directory} continues: {done:,}{of_all} examples{part} are done",
            self._mode,
        )

    def scan_checkpoint(self, checkpoint: int) -> None:
        """Measure the examples of this process with the checkpoint that is loaded."""
        self._measurement.checkpoint = checkpoint
        self._fit_factors(checkpoint)
        count = len(self._settings["checkpoints"])
        title = f" {checkpoint + 1}/{count}" if count > 1 else ""
        if self._measurement.needs_direction:
            self._check_first_batch(checkpoint)
            direction = self._find_mean_direction(checkpoint, f"mean gradient{title}")
            self._measure_shards(checkpoint, f"examples{title}", direction)
        else:
            if self._is_first_pass or self._store.has_shard(checkpoint, 0):
                self._check_first_batch(checkpoint)
            needs_sum = self._measurement.needs_sum and not self._store.has_arrays(get_mean_file(checkpoint))
            total = self._start_sum(checkpoint) if needs_sum else None
            self._measure_shards(checkpoint, f"examples{title}", None, total)
            if total is not None:
                self._write_mean(checkpoint, total)
        self._workers.wait()

    def _fit_factors(self, checkpoint: int) -> None:
        """Fit the factors of a checkpoint in the first process, and whiten gradients by them from now on."""
        projection, size = self._measurement.projection, self._settings["examples"]
        if projection is None or projection.whitening is None:
            return
        factors = projection.factors or Factors(self._store)
        if self._workers.is_first and not factors.has(checkpoint):
            shard_size = self._settings["shard_size"]
            step = max(1, round((size or 0) / EXAMPLES_OF_FACTORS))
            batches = self._source.iterate_batches(shard_size, lambda shard: shard % step == 0)
            measurement = self._measurement
            factors.fit(projection, checkpoint, measurement.shapes, batches, measurement.pass_terms)
        self._workers.wait()
        self._measurement.projection = replace(projection, factors=factors)

    def _measure_shards(
        self, checkpoint: int, title: str, direction: Gradient | None, total: GradientSum | None = None
    ) -> None:
        """Measure the missing shards of this process, and those that are missing in the sum of gradients."""
        done = sys.maxsize if total is None else total.shards
        batches = self._iterate_batches(title, lambda s: s >= done or not self._store.has_shard(checkpoint, s))
        skips_bad = self._source.skips_bad
        for shard, part in groupby(batches, key=lambda batch: batch.shard):
            columns = [self._like] if skips_bad else []
            skipped: dict[int, str] = {}
            for batch in part:
                skipped |= batch.skipped
                if not batch.ids:
                    continue
                if total is None:
                    found = self._measurement.measure_batch(batch.ids, batch.batch, direction)
                else:
                    found, gradient, count = self._measurement.measure_and_sum(batch.ids, batch.batch)
                    total.add(gradient, count)
                columns.append(found)
            packed, rows = pack_shard(columns, self._settings["dtype"], skipped if skips_bad else None)
            if self._source.names.exist:
                packed["name"] = self._source.names.encode(range(packed["id"][0], packed["id"][-1] + 1))
            self._store.write_shard(checkpoint, shard, packed, rows)
            if total is not None:
                total.end_shard(shard)

    def finish(self, checkpoints: Checkpoints) -> None:
        """Write the steps between the checkpoints, the table and the summary. All shards must be complete."""
        if self._workers.is_first:
            write_steps(self._store, self._measurement, checkpoints)
            with self._store.keep_contents():
                mean = average_rows(self._store) if self._measurement.needs_projected_mean else None
                if mean is not None and "estimated_alignment" in self._measurement.quantities:
                    write_alignment(self._store, mean)
                summary = summarise(self._store, mean)
                write_table(self._store)
            self._store.write_json("summary.json", summary)
        self._workers.wait()

    def _check_first_batch(self, checkpoint: int) -> None:
        """Measure the first batch, to raise errors before hours are spent.

        The first recording of a process may differ from later ones in the last digit, so that nothing of it is stored:
        a scan that is continued gives the same bits.

        If the first shard is stored already, the first batch must give the same numbers: a change of the data, the loss
        or the model may not show in any digest.
        """
        self._is_first_pass = False
        can_be_later = self._source.skips_bad
        for batch in self._source.iterate_batches(self._settings["shard_size"], lambda s: s == 0 or can_be_later):
            if not batch.ids:
                continue
            columns = self._measurement.measure_batch(batch.ids, batch.batch, None)
            self._like = {name: column[:0] for name, column in columns.items()}
            if self._measurement.needs_direction:
                self._like["alignment"] = self._like["norm"]
            if not self._store.has_shard(0, 0):
                self._measurement.losses.check_alone(batch.ids, batch.batch, columns["loss"])
            if batch.shard == 0 and self._store.has_shard(checkpoint, 0):
                stored, rows = self._store.read_columns(checkpoint, 0), list(batch.ids)
                pairs = [(columns[name].numpy(), stored[name][rows]) for name in ("loss", "norm")]
                if not all(_is_close(now, before) for now, before in pairs):
                    raise ScanError(
                        f"The data, the loss or the model changed since the scan in {self._store.directory} was "
                        "started: the first batch gives other numbers now. Choose another `out`, or start over with "
                        "resume=False."
                    )
            return
        if can_be_later:
            raise ScanError("Not one of the examples can be scanned. Run it without skip_bad to see what is wrong.")

    # ---- mean gradient ----

    def _find_mean_direction(self, checkpoint: int, title: str) -> Gradient:
        """The mean gradient of all examples of all processes, scaled to length 1. Costs a plain pass over the data."""
        mean = self._store.read_arrays(get_mean_file(checkpoint))
        self._workers.wait()  # all processes have looked for the file before one of them writes it
        if mean is None:
            total = self._start_sum(checkpoint)
            batches = self._iterate_batches(title, lambda shard: shard >= total.shards)
            for shard, part in groupby(batches, key=lambda batch: batch.shard):
                for batch in part:
                    if batch.ids:
                        total.add(*self._measurement.sum_gradients(batch.ids, batch.batch))
                total.end_shard(shard)
            mean = self._write_mean(checkpoint, total)
        parameters = self._measurement.parameters
        length = max(math.sqrt(sum(float(np.square(part).sum()) for part in mean.values())), sys.float_info.min)
        direction = {name: torch.from_numpy(part / length) for name, part in mean.items()}
        return {
            name: part.to(parameters[name].device, widen(parameters[name]).dtype) for name, part in direction.items()
        }

    def _start_sum(self, checkpoint: int) -> GradientSum:
        self._workers.wait()  # all processes have looked for the mean before one of them writes it
        file = f"sum-{checkpoint}-{self._workers.rank}of{self._workers.count}.npz"
        return GradientSum(self._store, file, {name: p.shape for name, p in self._measurement.parameters.items()})

    def _write_mean(self, checkpoint: int, total: GradientSum) -> dict[str, Array]:
        """Write and return the mean gradient of all processes."""
        count = self._workers.sum(torch.tensor(float(total.count), dtype=torch.float64)).clamp(min=1)
        mean = {name: (self._workers.sum(part) / count).numpy() for name, part in total.gradient.items()}
        if self._workers.is_first:
            self._store.write_arrays(get_mean_file(checkpoint), mean)
            self._store.remove(f"sum-{checkpoint}-*.npz")  # including files of an earlier run with more processes
        self._workers.wait()
        return mean

    # ---- batches ----

    def _iterate_batches(self, title: str, is_missing: Callable[[int], bool]) -> Iterator[ShardBatch]:
        """The batches of this process's missing shards, with a progress bar."""
        size, shard_size = self._settings["examples"], self._settings["shard_size"]
        own = self._workers.assign_shards(None if size is None else -(-size // shard_size))
        counts = {s: min(shard_size, size - s * shard_size) for s in own} if size is not None else {}
        left = [s for s in counts if is_missing(s)]
        done = sum(counts.values()) - sum(counts[s] for s in left)
        if self._workers.count > 1:
            title = f"process 1 of {self._workers.count}: {title}"
        total = None if size is None else sum(counts.values())
        mode: Mode = "none" if size is not None and not left else self._mode
        with show_progress(title, total, done, mode) as update:
            for batch in self._source.iterate_batches(shard_size, lambda s: s in own and is_missing(s)):
                yield batch
                update(len(batch.ids) + len(batch.skipped))


def _is_close(now: Array, before: Array) -> bool:
    """Whether numbers are equal up to rounding, which depends on the machine and the number of threads."""
    largest = np.abs(before[np.isfinite(before)]).max(initial=0.0)
    return np.allclose(now, before, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
