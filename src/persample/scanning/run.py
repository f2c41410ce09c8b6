"""The scan of a dataset."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from persample.batches import BatchDim
from persample.gradients import ProjectionMethod
from persample.losses import LossFunction
from persample.recording import Coupled, Selection, Verify
from persample.scanning.batch_size import choose_batch_size
from persample.scanning.checkpoints import Checkpoints, State
from persample.scanning.diagnosis import explain_failure, make_screen
from persample.scanning.errors import ScanError
from persample.scanning.factors import FactorMethod, check_factors
from persample.scanning.groups import Groups
from persample.scanning.labels import check_classes
from persample.scanning.measure import QUANTITIES, prepare_model
from persample.scanning.names import Ids
from persample.scanning.options import ScanOptions
from persample.scanning.results import Scan
from persample.scanning.scan_run import ScanRun
from persample.scanning.source import Collate, Source
from persample.scanning.store import Store
from persample.scanning.table import TableKind
from persample.scanning.workers import start_ray
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
    engine: Literal["processes", "ray"] = "processes",
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

    Results are stored in `out`, a directory or an address in object storage such as `s3://bucket/scan` (by fsspec), in
    shards of `shard_size` examples. A scan that was stopped continues with the first missing
    shard and gives the same result; `resume=False` starts over. The processes of torch.distributed share the work. With
    `engine="ray"`, shards are tasks of the Ray cluster that this process is connected to, or of this machine.

    `table` is the format of the table, `classes` are the names of the classes (default: `data.classes`), and `progress`
    shows a progress bar (default: in a terminal or a notebook; elsewhere a line is printed every half minute). Without
    `out`, the files are removed with the returned object.

    `ids` gives the examples names, for the column `name`, queries and reports: a sequence with one name per example, or
    the key of the name in each example. Datasets that know their files, such as those of torchvision, need none.
    """
    if engine not in ("processes", "ray"):
        raise ScanError(f"engine must be 'processes' or 'ray', got {engine!r}.")
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
    tasks = start_ray(source, measurement) if engine == "ray" else None
    run = ScanRun(store, source, measurement, settings, progress, tasks)
    with prepare_model(measurement, None if device is None else torch.device(device)):
        if run.start(resume, precondition.store if isinstance(precondition, Scan) else None):
            products = use_library(store.read_settings()["products"])
            with products, states.load_each() as loaded, explain_failure(source, measurement):
                for checkpoint in loaded:
                    run.scan_checkpoint(checkpoint)
            run.finish(states)
    return Scan(store, model, loss_fn, checkpoints, batch_dim=batch_dim, data=source, kept_by=temporary)
