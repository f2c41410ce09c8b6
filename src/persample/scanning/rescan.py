"""A scan of corrected data that measures only the examples that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from persample.batches import BatchDim
from persample.losses import LossFunction
from persample.scanning.alignment import average_rows, get_last_checkpoint, write_alignment
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.errors import ScanError
from persample.scanning.factors import copy_factors
from persample.scanning.gradient_sum import get_mean_file
from persample.scanning.measure import Measurement, prepare_model
from persample.scanning.names import Ids
from persample.scanning.packing import SKIPPED
from persample.scanning.results import Scan
from persample.scanning.run import scan
from persample.scanning.source import Collate, Source
from persample.scanning.steps import FILE as STEPS_FILE
from persample.scanning.store import Array, Store
from persample.scanning.summary import summarise
from persample.scanning.table import write_table

# Quantities of an earlier scan that a rescan does not have, and why.
LEFT_OUT = {
    "alignment": "a change of the data changes the mean gradient, so that the exact cosine needs the gradients of "
    "all examples again: scan all data without a base, or use estimated_alignment"
}
_FROM_ALL = ("alignment", "estimated_alignment", "noise_scale")  # they depend on the mean gradient of all examples

_SAME = (
    "checkpoints", "learning_rates", "parameters", "groups", "project", "projection", "precondition", "seed", "dtype",
    "loss", "loss_reduction", "code",
)  # fmt: skip
_OPTIONS = ("learning_rates", "project", "projection", "seed", "dtype", "loss_reduction")  # as `scan` takes them


def rescan(
    base: Scan | str | Path,
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    *,
    before: Any,
    out: str | Path,
    checkpoints: Sequence[State | str | Path] | None = None,
    collate: Collate | None = None,
    ids: Ids | None = None,
    classes: Sequence[str] | None = None,
    batch_dim: BatchDim = 0,
    progress: bool | None = None,
) -> Scan:
    """Scan corrected data, and take the examples that have not changed from an earlier scan.

    `base` is the earlier scan, and `before` the data that it has scanned. Examples are compared as a whole, inputs and
    label, wherever they are in the data. Model, loss and checkpoints must be those of the earlier scan; its first
    examples are measured again, and must give the same numbers.

    The mean gradient, and with it the noise scale, is corrected by the gradients of the examples that are new and of
    those that are gone, or estimated from the stored rows if the earlier scan has done so. The estimated alignment is
    computed from the stored rows. The exact alignment is left out: it needs the gradients of all examples.
    `summary["left_out"]` says so.
    """
    base = base if isinstance(base, Scan) else Scan(base)
    settings, store = base.settings, Store(out)
    if not store.is_empty:
        raise ScanError(f"{store.address} exists. Choose an empty or a new directory for the new scan.")
    if "coupled" in settings:
        raise ScanError("A scan of coupled samples cannot take other data: its rows depend on the batches.")
    options = {"batch_size": settings["batch_size"], "collate": collate, "skip_bad": settings.get("skip_bad", False)}
    change = _Change(base, Source(before, **options), Source(data, ids=ids, **options))
    part = change.scan(model, loss_fn, checkpoints, batch_dim, classes, progress)
    change.write(part, store)
    if change.corrects_means():
        measurement = Measurement(
            model,
            loss_fn,
            quantities=["noise_scale"],
            parameters=list(settings["parameters"]),
            batch_dim=batch_dim,
            loss_reduction=settings["loss_reduction"],
            nonfinite=settings["nonfinite"],
        )
        _correct_means(base.store, store, measurement, Checkpoints(model, checkpoints), change.list_changed(part))
    _finish(store, settings, change.count_measured())
    return Scan(store, model, loss_fn, checkpoints, batch_dim=batch_dim)


class _Change:
    """The examples that an earlier scan does not have, and where it has the others."""

    def __init__(self, base: Scan, old: Source, new: Source) -> None:
        if old.size is None or new.size is None:
            raise ScanError("A stream cannot be rescanned: its examples cannot be read by number.")
        self._base, self._old, self._new = base, old, new
        self._settings = base.settings
        if old.compute_digest() != self._settings["data"]:
            raise ScanError(f"`before` is not the data of the scan in {base.directory}, or has changed.")
        self._size = new.size
        self._digests = [list(_compute_digests(source)) for source in (old, new)]
        self._places = _find_unchanged(*self._digests)
        self._unchanged = [j for j in range(self._size) if self._places[j] >= 0]
        self._repeated = self._unchanged[: self._settings["batch_size"]]  # measured again, for a comparison
        measured = self._repeated + [j for j in range(self._size) if self._places[j] < 0]
        self._rows = {j: k for k, j in enumerate(measured)}

    def scan(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        checkpoints: Sequence[State | str | Path] | None,
        batch_dim: BatchDim,
        classes: Sequence[str] | None,
        progress: bool | None,
    ) -> Scan:
        """Measure the new examples and some of the others, with the options of the earlier scan."""
        settings, new = self._settings, self._new
        kept: Any = {key: settings[key] for key in _OPTIONS}
        found = scan(
            model,
            loss_fn,
            _Chosen(new, list(self._rows)),
            quantities=[name for name in settings["quantities"] if name not in _FROM_ALL],
            batch_size=settings["batch_size"],
            precondition=self._base if settings.get("precondition") else None,
            groups=settings["groups"] or None,
            parameters=list(settings["parameters"]),
            checkpoints=checkpoints,
            batch_dim=batch_dim,
            nonfinite=settings["nonfinite"],
            collate=new.collate,
            classes=classes or new.classes or settings["classes"],
            skip_bad=new.skips_bad,
            progress=progress,
            **kept,
        )
        _check_same(settings, found.settings)
        return found

    def write(self, part: Scan, store: Store) -> None:
        """Write the settings and the shards of the new scan, from the earlier one and from the measured part."""
        settings, new, base = self._settings, self._new, self._base
        count = len(settings["checkpoints"])
        columns = _choose_columns(base.store, part.store, count)
        _check_numbers(base.store, part.store, [int(self._places[j]) for j in self._repeated])
        quantities = [name for name in settings["quantities"] if name not in LEFT_OUT]
        changes = {"examples": self._size, "data": new.compute_digest(), "names": new.names.compute_digest()}
        kept = {key: part.settings[key] for key in ("classes", "labelled", "about")}
        earlier = {k: v for k, v in settings.items() if k != "format"}
        store.start({**earlier, **changes, **kept, "quantities": quantities}, resume=True)
        if settings.get("precondition"):
            copy_factors(base.store, store)
        if (steps := base.store.read_arrays(STEPS_FILE)) is not None:  # they do not depend on the data
            store.write_arrays(STEPS_FILE, steps)
        for checkpoint in range(count):
            self._write_shards(part, store, checkpoint, columns)

    def _write_shards(self, part: Scan, store: Store, checkpoint: int, columns: Sequence[str]) -> None:
        settings, new, base = self._settings, self._new, self._base
        readers = [_Reader(found.store, checkpoint, columns) for found in (base, part)]
        for shard, start in enumerate(range(0, self._size, settings["shard_size"])):
            wanted = range(start, min(start + settings["shard_size"], self._size))
            origins = [self._find_origin(j) for j in wanted]
            packed, gradients = _join(readers, origins)
            packed["id"] = np.arange(wanted.start, wanted.stop)
            if new.skips_bad:
                reasons = [(base, part)[which].skipped.get(at, "") for which, at in origins]
                packed[SKIPPED] = np.array([reason.encode("utf-8", "replace") for reason in reasons])
            if new.names.exist:
                packed["name"] = new.names.encode(wanted)
            store.write_shard(checkpoint, shard, packed, gradients)

    def _find_origin(self, j: int) -> tuple[int, int]:
        """0 and the place in the earlier scan, or 1 and the place in the measured part."""
        return (1, self._rows[j]) if self._places[j] < 0 else (0, int(self._places[j]))

    def corrects_means(self) -> bool:
        """Whether the scan has a mean gradient to correct. Otherwise the noise scale is estimated from the rows."""
        has_mean = self._base.store.has_arrays(get_mean_file(get_last_checkpoint(self._base.store)))
        return "noise_scale" in self._settings["quantities"] and (has_mean or not self._settings["project"])

    def list_changed(self, part: Scan) -> list[tuple[Source, int]]:
        """The examples that are new (1) and those that are gone (-1), without skipped ones."""
        added, removed = _find_changes(*self._digests)
        scans = self._base, part
        origins = {j: self._find_origin(j) for j in added}
        added = [j for j, (which, at) in origins.items() if at not in scans[which].skipped]
        removed = [i for i in removed if i not in self._base.skipped]
        chosen = [(_Chosen(self._new, added), 1), (_Chosen(self._old, removed), -1)]
        return [(Source(some, self._settings["batch_size"], self._new.collate), sign) for some, sign in chosen]

    def count_measured(self) -> int:
        """The number of examples that the earlier scan does not have."""
        return self._size - len(self._unchanged)


def _finish(store: Store, settings: dict[str, Any], measured: int) -> None:
    """Write the alignment, the table and the summary of the new scan."""
    projected_mean = average_rows(store) if settings["project"] and not settings.get("precondition") else None
    if projected_mean is not None and "estimated_alignment" in store.read_settings()["quantities"]:
        write_alignment(store, projected_mean)
    summary = summarise(store, projected_mean)
    summary["left_out"] = {name: reason for name, reason in LEFT_OUT.items() if name in settings["quantities"]}
    summary["measured_again"] = measured
    write_table(store)
    store.write_json("summary.json", summary)


def _find_unchanged(old: Sequence[str], new: Sequence[str]) -> Array:
    """For each new example, the number of an equal old example, or -1. Examples are given by their digests."""
    known = {digest: i for i, digest in enumerate(old)}
    return np.array([known.get(digest, -1) for digest in new], dtype=np.int64)


def _find_changes(old: Sequence[str], new: Sequence[str]) -> tuple[list[int], list[int]]:
    """The numbers of new examples to add to the old ones, and of old examples to remove, to get the new ones.

    >>> _find_changes(["a", "b", "b", "c"], ["b", "d", "c", "c"])  # "c" occurs once more, "a" and a "b" are gone
    ([1, 3], [0, 2])
    """
    counts = Counter(new), Counter(old)
    found = []
    for digests, more in ((new, counts[0] - counts[1]), (old, counts[1] - counts[0])):
        seen: Counter[str] = Counter()
        chosen = []
        for i in reversed(range(len(digests))):
            seen[digests[i]] += 1
            if seen[digests[i]] <= more[digests[i]]:
                chosen.append(i)
        found.append(chosen[::-1])
    return found[0], found[1]


def _correct_means(
    base: Store,
    store: Store,
    measurement: Measurement,
    checkpoints: Checkpoints,
    changed: Sequence[tuple[Source, int]],
) -> None:
    """Write the mean gradient of the new data: that of the earlier data, with examples added (1) or removed (-1)."""
    with prepare_model(measurement, None), checkpoints.load_each() as loaded:
        for checkpoint in loaded:
            mean, count = base.read_arrays(get_mean_file(checkpoint)), _count_finite(base, checkpoint)
            if mean is None:
                raise ScanError(f"The mean gradient is missing in {base.directory}: scan all data anew.")
            total = {name: count * part for name, part in mean.items()}
            for source, sign in changed:
                for batch in source.iterate_batches(source.batch_size, lambda shard: True):
                    gradient, size = measurement.sum_gradients(batch.ids, batch.batch)
                    count += sign * size
                    for name, part in gradient.items():
                        total[name] = total[name] + sign * part.double().cpu().numpy()
            store.write_arrays(get_mean_file(checkpoint), {name: part / max(1, count) for name, part in total.items()})


def _count_finite(store: Store, checkpoint: int) -> int:
    """The number of examples in the mean gradient of a checkpoint."""
    parts = [store.read_columns(checkpoint, s, ["loss", "norm"]) for s in range(store.count_shards(checkpoint))]
    return sum(int((np.isfinite(part["loss"]) & np.isfinite(part["norm"])).sum()) for part in parts)


def _compute_digests(source: Source) -> Iterator[str]:
    for i in range(source.size or 0):
        yield source.compute_digest_of(i)


class _Chosen(Dataset[Any]):
    """Some examples of a source, as a dataset."""

    def __init__(self, source: Source, ids: Sequence[int]) -> None:
        self._source, self._ids = source, ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, k: int) -> Any:
        return self._source.read_examples([self._ids[k]])[self._ids[k]]


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in _SAME:
        if before.get(key) != now[key]:
            raise ScanError(f"The model, the loss or an option differs from that of the earlier scan: {key!r}.")


def _choose_columns(base: Store, part: Store, checkpoints: int) -> list[str]:
    """The columns that both scans have, which are all of the new one."""
    stored, own = base.list_columns(checkpoints - 1, 0), part.list_columns(checkpoints - 1, 0)
    left_out = {"id", "name", SKIPPED}
    if missing := set(own) - set(stored) - left_out:
        raise ScanError(f"The earlier scan has no column {sorted(missing)[0]!r}: scan all data anew.")
    return [name for name in own if name not in left_out]


def _check_numbers(base: Store, part: Store, places: Sequence[int]) -> None:
    """Compare losses and norms of unchanged examples in the two scans."""
    for checkpoint in range(len(base.read_settings()["checkpoints"])):
        before, now = (_Reader(store, checkpoint, ["loss", "norm"]) for store in (base, part))
        for name in ("loss", "norm"):
            old = np.array([before.read(i)[0][name] for i in places])
            new = np.array([now.read(k)[0][name] for k in range(len(places))])
            largest = np.abs(old[np.isfinite(old)]).max(initial=0.0)
            if not np.allclose(old, new, rtol=1e-3, atol=1e-3 * largest, equal_nan=True):
                raise ScanError(f"The {name} of unchanged examples differs from the earlier scan: scan all data anew.")


class _Reader:
    """Reads single examples of a stored checkpoint. Keeps the last shard."""

    def __init__(self, store: Store, checkpoint: int, columns: Sequence[str]) -> None:
        settings = store.read_settings()
        self._store, self._checkpoint, self._columns = store, checkpoint, columns
        self._size, self._has_rows = settings["shard_size"], settings["project"] is not None
        self._shard, self._parts, self._rows = -1, dict[str, Array](), np.zeros(0)

    def read(self, i: int) -> tuple[dict[str, Any], Array | None]:
        """The columns and the projected gradient of an example."""
        shard, at = divmod(i, self._size)
        if shard != self._shard:
            self._parts = self._store.read_columns(self._checkpoint, shard, self._columns)
            self._rows = self._store.read_rows(self._checkpoint, shard) if self._has_rows else self._rows
            self._shard = shard
        row = np.array(self._rows[at]) if self._has_rows else None
        return {name: part[at] for name, part in self._parts.items()}, row


def _join(readers: Sequence[_Reader], origins: Sequence[tuple[int, int]]) -> tuple[dict[str, Array], Array | None]:
    """The columns and rows of examples of two scans."""
    found = [readers[which].read(at) for which, at in origins]
    columns = {name: np.array([values[name] for values, _ in found]) for name in found[0][0]}
    return columns, None if found[0][1] is None else np.stack([row for _, row in found if row is not None])
