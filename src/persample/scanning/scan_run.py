"""The measuring of a scan: its passes over the data, with one checkpoint after the other."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from persample._internal.files import remove_unfinished
from persample._internal.precision import widen
from persample.scanning.alignment import average_rows, write_alignment
from persample.scanning.checkpoints import Checkpoints
from persample.scanning.errors import ScanError
from persample.scanning.factors import EXAMPLES_OF_FACTORS, Factors, copy_factors
from persample.scanning.gradient_sum import GradientSum, get_mean_file
from persample.scanning.measure import Columns, Gradient, Measurement
from persample.scanning.packing import pack_shard
from persample.scanning.progress import Mode, choose_mode, say, show_progress
from persample.scanning.source import ShardBatch, Source
from persample.scanning.steps import write_steps
from persample.scanning.store import Array, Store
from persample.scanning.summary import summarise
from persample.scanning.table import write_table
from persample.scanning.workers import RayTasks, ScanWorkers
from persample.terms import use_library


class ScanRun:
    """The part of a scan that this process does."""

    def __init__(
        self,
        store: Store,
        source: Source,
        measurement: Measurement,
        settings: Mapping[str, Any],
        progress: bool | None,
        tasks: RayTasks | None = None,
    ) -> None:
        self._store, self._source, self._measurement, self._settings = store, source, measurement, settings
        self._workers, self._tasks = ScanWorkers(), tasks
        self._is_first_pass = True
        self._first: ShardBatch | None = None  # that was measured
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
        self._wait()
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
            f"persample: the scan in {self._store.address} continues: {done:,}{of_all} examples{part} are done",
            self._mode,
        )

    def scan_checkpoint(self, checkpoint: int) -> None:
        """Measure the examples of this process with the checkpoint that is loaded."""
        self._measurement.checkpoint = checkpoint
        if self._measurement.is_sharded:
            self._check_sharded()
        self._fit_factors(checkpoint)
        count = len(self._settings["checkpoints"])
        title = f" {checkpoint + 1}/{count}" if count > 1 else ""
        if self._measurement.needs_direction or self._is_first_pass or self._store.has_shard(checkpoint, 0):
            self._check_first_batch()
        if self._tasks is not None:
            self._pass_on_shards(f"examples{title}", self._tasks)
        elif self._measurement.needs_direction:
            direction = self._find_mean_direction(checkpoint, f"mean gradient{title}")
            self._measure_shards(f"examples{title}", direction)
        else:
            needs_sum = self._measurement.needs_sum and not self._store.has_arrays(get_mean_file(checkpoint))
            total = self._start_sum(checkpoint) if needs_sum else None
            self._measure_shards(f"examples{title}", None, total)
            if total is not None:
                self._write_mean(checkpoint, total)
        self._wait()

    def _check_sharded(self) -> None:
        """Refuse what needs more than the passes that all processes take together."""
        kinds = {
            "the exact mean gradient (alignment, or noise_scale with project=None)": self._measurement.needs_sum,
            "precondition": self._settings["precondition"] is not None,
            "several checkpoints": len(self._settings["checkpoints"]) > 1,
            "engine='ray'": self._tasks is not None,
        }
        if wanted := [kind for kind, is_wanted in kinds.items() if is_wanted]:
            raise ScanError(f"A scan of a model with sharded weights (FSDP2) does not support {' and '.join(wanted)}.")

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
        self._wait()
        self._measurement.projection = replace(projection, factors=factors)

    def _measure_shards(self, title: str, direction: Gradient | None, total: GradientSum | None = None) -> None:
        """Measure the missing shards of this process, and those that are missing in the sum of gradients."""
        done = sys.maxsize if total is None else total.shards
        batches = self._iterate_batches(title, lambda s: s >= done or self._is_missing(s))
        for shard, part in groupby(batches, key=lambda batch: batch.shard):
            self._write_shard(shard, part, direction, total)
            if total is not None:
                total.end_shard(shard)

    def _pass_on_shards(self, title: str, tasks: RayTasks) -> None:
        """Have the missing shards measured by tasks, which are copies of this run."""
        size, shard_size = self._settings["examples"], self._settings["shard_size"]
        missing = [shard for shard in range(-(-size // shard_size)) if self._is_missing(shard)]
        copied = copy.copy(self)
        copied._tasks, copied._mode, copied._is_first_pass = None, "none", True
        done = size - sum(min(shard_size, size - shard * shard_size) for shard in missing)
        with show_progress(title, size, done, self._mode if missing else "none") as update:
            for shard in tasks.measure(copied, missing, self._measurement.device):
                update(min(shard_size, size - shard * shard_size))
        self._store.synchronise()
        remove_unfinished(self._store.directory)  # files of workers that were killed

    def measure_shard(self, shard: int) -> None:
        """Measure one shard, unless it is there."""
        with use_library(self._settings["products"]):
            if self._is_first_pass:
                self._check_first_batch()
            if self._is_missing(shard):
                batches = self._source.iterate_batches(self._settings["shard_size"], lambda s: s == shard)
                self._write_shard(shard, batches, None, None)

    def _is_missing(self, shard: int) -> bool:
        return not self._store.has_shard(self._measurement.checkpoint, shard)

    def _write_shard(
        self, shard: int, batches: Iterable[ShardBatch], direction: Gradient | None, total: GradientSum | None
    ) -> None:
        """Measure the batches of a shard, add their gradients to a sum if there is one, and store the shard."""
        skips_bad = self._source.skips_bad
        columns = [self._like] if skips_bad else []
        skipped: dict[int, str] = {}
        for batch in batches:
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
        self._store.write_shard(self._measurement.checkpoint, shard, packed, rows)

    def _wait(self) -> None:
        """Wait for the other processes, and see what they have written."""
        self._workers.wait()
        self._store.synchronise()

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
        self._wait()

    def _check_first_batch(self) -> None:
        """Measure the first batch, to raise errors before hours are spent.

        The first recording of a process may differ from later ones in the last digit, so that nothing of it is stored:
        a scan that is continued gives the same bits.

        If the first shard is stored already, the first batch must give the same numbers: a change of the data, the loss
        or the model may not show in any digest.
        """
        self._is_first_pass = False
        checkpoint = self._measurement.checkpoint
        can_be_later = self._source.skips_bad
        for batch in self._source.iterate_batches(self._settings["shard_size"], lambda s: s == 0 or can_be_later):
            if not batch.ids:
                continue
            columns = self._measurement.measure_batch(batch.ids, batch.batch, None)
            self._first = batch
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
                        f"The data, the loss or the model changed since the scan in {self._store.address} was "
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
        self._wait()  # all processes have looked for the file before one of them writes it
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
        self._wait()  # all processes have looked for the mean before one of them writes it
        file = f"sum-{checkpoint}-{self._workers.rank}of{self._workers.count}.npz"
        return GradientSum(self._store, file, {name: p.shape for name, p in self._measurement.parameters.items()})

    def _write_mean(self, checkpoint: int, total: GradientSum) -> dict[str, Array]:
        """Write and return the mean gradient of all processes."""
        count = self._workers.sum(torch.tensor(float(total.count), dtype=torch.float64)).clamp(min=1)
        mean = {name: (self._workers.sum(part) / count).numpy() for name, part in total.gradient.items()}
        if self._workers.is_first:
            self._store.write_arrays(get_mean_file(checkpoint), mean)
            self._store.remove(f"sum-{checkpoint}-*.npz")  # including files of an earlier run with more processes
        self._wait()
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
            for batch in self._keep_pace(
                self._source.iterate_batches(shard_size, lambda s: s in own and is_missing(s))
            ):
                yield batch
                update(len(batch.ids) + len(batch.skipped))

    def _keep_pace(self, batches: Iterator[ShardBatch]) -> Iterator[ShardBatch]:
        """The batches of this process. With sharded weights, it takes part in passes of processes that have more."""
        if not self._measurement.is_sharded:
            yield from batches
            return
        while self._workers.any((batch := next(batches, None)) is not None):
            if batch is not None and batch.ids:
                yield batch
                continue
            assert self._first is not None
            self._measurement.measure_batch(self._first.ids, self._first.batch, None)
            if batch is not None:
                yield batch


def _is_close(now: Array, before: Array) -> bool:
    """Whether numbers are equal up to rounding, which depends on the machine and the number of threads."""
    largest = np.abs(before[np.isfinite(before)]).max(initial=0.0)
    return np.allclose(now, before, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
