"""Going through a dataset, and keeping what each example's gradient is like."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import persample
from persample._internal.dtypes import widen
from persample.batches import BatchDim
from persample.losses import LossFunction, get_name
from persample.recording.options import Selection
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.digest import digest_of, structure_of
from persample.scanning.errors import ScanError
from persample.scanning.measure import (
    QUANTITIES,
    Columns,
    Direction,
    Groups,
    Measurement,
    Projection,
    undisturbed,
)
from persample.scanning.processes import Processes
from persample.scanning.results import Scan
from persample.scanning.source import Collate, Piece, Source
from persample.scanning.store import Array, Store
from persample.scanning.summary import summarised
from persample.scanning.table import TableKind, write_table

# How often the sum of the gradients is saved, which is as large as the model in float64.
SECONDS_BETWEEN_SAVES = 60.0


def scan(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    *,
    quantities: Sequence[str] = QUANTITIES,
    out: str | Path | None = None,
    batch_size: int | None = None,
    project: int | None = 512,
    projection: Literal["tensor", "sparse"] = "tensor",
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
    shard_size: int = 1024,
    table: TableKind = "parquet",
    resume: bool = True,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Scan:
    """Measures each example of a dataset by its gradient, and keeps the result in the directory `out`.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
    >>> found = scan(model, nn.CrossEntropyLoss(), (x, y), project=64)
    >>> found
    Scan of 100 examples: loss, norm, self_influence, alignment, norm/0, norm/2; projected to 64
    >>> found.column("norm").shape, len(found.neighbours(7, k=3).ids)
    ((100,), 3)

    `data` is a Dataset, a DataLoader (its dataset is gone through in its own order), tensors, or what can be iterated
    over again and again. A loss of torch, or any other `nn.Module`, is called as `loss_fn(model(inputs), targets)`;
    another function as `loss_fn(model, batch)`, and gives a loss for each sample, or one number, their mean (or sum:
    `loss_reduction`). One number costs a forward pass more for each sample, to know its loss.

    `quantities` are columns of the table:

    - "loss", and "norm", that of the gradient; "group_norms": `norm/GROUP` for each module, or for `groups`, a function
      of a parameter's name, or the names of each group's parameters;
    - "self_influence": the squared norms, times `learning_rates`, summed over the `checkpoints` (state dicts, or files
      with them; without any, the model as it is). What only itself explains, such as a wrong label, is high here;
    - "alignment": the cosine with the mean gradient of all examples. It takes another, plain, pass over the data,
      as does "noise_scale", in the summary: how many examples a batch should have.

    Other columns than self_influence are of the last checkpoint. `project` numbers of each gradient are stored for
    questions (`Scan.influence`, `neighbours`, `duplicates`, `outliers`), None: nothing is; see
    `PerSampleGradients.project` for `projection` and `seed`.

    The model is in evaluation mode meanwhile, and as it was afterwards. A scan that was stopped goes on, with `resume`,
    after the last whole shard of `shard_size` examples, and gives what it would have given. Processes of
    torch.distributed share the work. `classes` are the names of the classes, if the dataset has none (`data.classes`).
    Without `out`, files are kept until the result is dropped.
    """
    source = Source(data, batch_size, collate)
    if source.size == 0:
        raise ScanError("The data have no examples.")
    if dtype not in ("float16", "float32") or table not in ("parquet", "csv"):
        raise ScanError(f"dtype is 'float16' or 'float32', table 'parquet' or 'csv', got {dtype!r} and {table!r}.")
    if project is not None and project < 1:
        raise ScanError(f"project is a number of dimensions, or None, got {project}.")
    measurement = Measurement(
        model,
        loss_fn,
        quantities=quantities,
        projection=None if project is None else Projection(project, seed, projection),
        groups=groups,
        parameters=parameters,
        batch_dim=batch_dim,
        loss_reduction=loss_reduction,
        nonfinite=nonfinite,
        labelled=source.is_labelled(),
    )
    states = Checkpoints(model, checkpoints, learning_rates)
    settings = {
        "examples": source.size,
        "data": source.digest(),
        "batch_size": source.batch_size,
        "shard_size": max(1, shard_size // source.batch_size) * source.batch_size,
        "quantities": list(measurement.quantities),
        "groups": measurement.groups,
        "project": project,
        "projection": projection,
        "seed": seed,
        "dtype": dtype,
        "parameters": {name: list(p.shape) for name, p in measurement.parameters.items()},
        "loss": get_name(loss_fn),
        "loss_reduction": loss_reduction,
        "nonfinite": nonfinite,
        "code": digest_of(structure_of(model), loss_fn, source.collate, batch_dim),
        "labelled": measurement.labelled,
        "checkpoints": states.digests(),
        "learning_rates": states.learning_rates,
        "classes": source.classes if classes is None else list(classes),
        "table": table,
        "about": {"persample": persample.__version__, "torch": torch.__version__},
    }
    temporary = tempfile.TemporaryDirectory(prefix="persample-") if out is None else None
    store = Store(out if out is not None else str(temporary and temporary.name))
    run = _Run(store, source, measurement, settings, progress)
    with undisturbed(measurement, None if device is None else torch.device(device)):
        if run.begin(resume):
            with states.each() as loaded:
                for checkpoint in loaded:
                    run.go_through(checkpoint)
            run.finish()
    return Scan(store.directory, model, loss_fn, checkpoints, batch_dim=batch_dim, kept_by=temporary)


class _Run:
    """This process's part of a scan."""

    def __init__(
        self,
        store: Store,
        source: Source,
        measurement: Measurement,
        settings: Mapping[str, Any],
        progress: bool | None,
    ) -> None:
        self._store, self._source, self._measurement, self._settings = store, source, measurement, settings
        self._processes = Processes()
        self._progress = self._processes.is_first and (sys.stderr.isatty() if progress is None else progress)

    def begin(self, resume: bool) -> bool:
        """Makes the directory, or finds what is there; tells whether anything is left to do."""
        if self._processes.is_first:
            self._store.begin(self._settings, resume)
        self._processes.wait()
        return not self._store.is_complete

    def go_through(self, checkpoint: int) -> None:
        """Measures the examples of this process's shards by the model as it is now."""
        all_of_them = len(self._settings["checkpoints"])
        number = f" {checkpoint + 1}/{all_of_them}" if all_of_them > 1 else ""
        self._look_first(checkpoint)
        mean = self._mean(checkpoint, f"mean gradient{number}") if self._measurement.needs_mean else None
        pieces = self._pieces(f"examples{number}", lambda shard: not self._store.has_shard(checkpoint, shard))
        for shard, batches in groupby(pieces, key=lambda piece: piece.shard):
            measured = [self._measurement.of_batch(piece.ids, piece.batch, mean) for piece in batches]
            self._store.write_shard(checkpoint, shard, *_packed(measured, self._settings["dtype"]))
        self._processes.wait()

    def finish(self) -> None:
        """Writes the table and the summary, when all shards are there."""
        if self._processes.is_first:
            summary = summarised(self._store)
            write_table(self._store)
            self._store.write_json("summary.json", summary)
        self._processes.wait()

    # ---- the mean gradient ----

    def _mean(self, checkpoint: int, title: str) -> Direction:
        """The direction of the mean gradient of all examples, of all processes; the gradient itself is stored."""
        name = f"mean-{checkpoint}.npz"
        found = self._store.read_arrays(name)
        self._processes.wait()  # who finds none must not be after who writes it
        if found is None:
            found = self._summed(checkpoint, title)
            total = self._processes.total(torch.tensor(float(found.pop(_COUNT)), dtype=torch.float64))
            for key, part in found.items():
                found[key] = (self._processes.total(torch.from_numpy(part)) / total.clamp(min=1)).numpy()
            if self._processes.is_first:
                self._store.write_arrays(name, found)
                self._store.remove(f"sum-{checkpoint}-*.npz")  # also those of another number of processes
            self._processes.wait()
        given = self._measurement.parameters
        length = max(math.sqrt(sum(float(np.square(part).sum()) for part in found.values())), sys.float_info.min)
        direction = {key: torch.from_numpy(part / length) for key, part in found.items()}
        return {key: part.to(given[key].device, widen(given[key]).dtype) for key, part in direction.items()}

    def _summed(self, checkpoint: int, title: str) -> dict[str, Array]:
        """The sum of this process's gradients and their count; saved from time to time, to go on from."""
        name, given = self._sum_name(checkpoint), self._measurement.parameters
        total = self._store.read_arrays(name) or {
            _COUNT: np.zeros(()),
            _SHARDS: np.zeros((), dtype=np.int64),
            **{key: np.zeros(p.shape) for key, p in given.items()},
        }
        saved, done = time.monotonic(), int(total[_SHARDS])
        pieces = self._pieces(title, lambda shard: shard >= done)
        for shard, batches in groupby(pieces, key=lambda piece: piece.shard):
            for piece in batches:
                parts, count = self._measurement.sum_of_batch(piece.ids, piece.batch)
                total[_COUNT] += count
                for key, part in parts.items():
                    total[key] += part.double().cpu().numpy()
            total[_SHARDS][...] = shard + 1
            if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                self._store.write_arrays(name, total)
                saved = time.monotonic()
        del total[_SHARDS]
        return total

    def _sum_name(self, checkpoint: int) -> str:
        return f"sum-{checkpoint}-{self._processes.rank}of{self._processes.count}.npz"

    def _look_first(self, checkpoint: int) -> None:
        """Has the first batch measured: what cannot be, or is not as it was, is refused before hours are spent."""
        for piece in self._source.pieces(self._settings["shard_size"], lambda shard: shard == 0):
            found = self._measurement.of_batch(piece.ids, piece.batch, None)
            if not self._store.has_shard(0, 0):
                self._measurement.check_alone(piece.ids, piece.batch)
            if self._store.has_shard(checkpoint, 0):
                stored = self._store.columns(checkpoint, 0)
                parts = [(found[name].numpy(), stored[name][: len(piece.ids)]) for name in ("loss", "norm")]
                if not all(_same(now, before) for now, before in parts):
                    raise ScanError(
                        f"{self._store.directory} holds a scan of other data, by another loss or model: the first "
                        "batch gives other numbers now. Choose another `out`, or start over with resume=False."
                    )
            return

    # ---- which examples ----

    def _pieces(self, title: str, missing: Callable[[int], bool]) -> Iterator[Piece]:
        """The batches of this process's shards that are missing, with a progress bar."""
        size, shard_size = self._settings["examples"], self._settings["shard_size"]
        if size is None:  # who knows how many there will be
            own = range(self._processes.rank, sys.maxsize, self._processes.count)
        else:
            own = self._processes.share(-(-size // shard_size))
        left = None if size is None else sum(min(shard_size, size - s * shard_size) for s in own if missing(s))
        if self._processes.count > 1:
            title = f"process 1 of {self._processes.count}: {title}"
        with tqdm(desc=title, total=left, unit=" examples", disable=not self._progress or left == 0) as bar:
            for piece in self._source.pieces(shard_size, lambda shard: shard in own and missing(shard)):
                yield piece
                bar.update(len(piece.ids))


# Beside the parameters' names, which have no spaces.
_COUNT, _SHARDS = "number of examples", "number of shards"


def _same(now: Array, before: Array) -> bool:
    """Whether numbers are the same but for rounding, which differs with machines and threads."""
    largest = np.abs(before[np.isfinite(before)]).max(initial=0.0)
    return np.allclose(now, before, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)


def _packed(measured: Sequence[Columns], dtype: str) -> tuple[dict[str, Array], Array | None]:
    """The columns of a shard, and its projected gradients, each scaled to length 1, which suits float16."""
    columns = {name: torch.cat([part[name] for part in measured]) for name in measured[0]}
    rows: Array | None = None
    if (projected := columns.pop("projection", None)) is not None:
        lengths = projected.double().norm(dim=1).nan_to_num(nan=0.0, posinf=0.0)  # what is no number pushes nobody
        rows = _unit(projected.double(), lengths).numpy().astype(dtype)
        columns["length"] = lengths
    return {name: column.numpy() for name, column in columns.items()}, rows


def _unit(rows: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(lengths[:, None] > 0, rows / lengths[:, None], 0.0)
