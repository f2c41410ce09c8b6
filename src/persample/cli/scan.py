"""`persample scan`."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from persample._internal.text import format_count, format_table
from persample.cli.command import (
    Command,
    end_on_termination,
    format_json,
    format_number,
    parse_positive,
    parse_positive_or_none,
    redirect_user_output,
)
from persample.cli.task import (
    COMMAND_FILE,
    Task,
    add_task_arguments,
    convert_scan_errors,
    describe_labels,
    get_origin,
    has_data_files,
    import_scanning,
    load_data_files,
    load_task,
    quote_texts,
    read_origin,
)
from persample.cli.user_code import UsageError, join_lines

_DESCRIPTION = """\
Measure each example of a dataset: its loss, the norm of its gradient (in total and by layer), its
self-influence, and the estimated alignment of its gradient with the mean gradient. A projection of the
gradient is stored as well; `persample query` uses it to find neighbours, duplicates, outliers and influence.

The function takes no arguments and returns a model, a dataset and a loss:

    # my_model.py
    def to_scan():
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        model.load_state_dict(torch.load("model.pt"))
        return model, dataset, nn.CrossEntropyLoss()

    $ persample scan my_model:to_scan --out scans/mine --report

The data can also come from files: folders of images, one for each class, or a table with a column of text.
Then the function returns the model, or the model and a loss:

    $ persample scan my_model:net --images photos/ --image-size 64 --out scans/photos
    $ persample scan my_model:net --images photos/ --processor my_model/ --out scans/photos
    $ persample scan my_model:net --table houses.csv --target sold --out scans/houses
    $ persample scan my_model:net --text reviews.csv --label mood --tokenizer tokenizer/ --out scans/reviews

For --table, the function may take the table: its `feature_names` and `classes` say how many inputs and outputs
the model needs. Its pipeline of scikit-learn is saved in the scan as pipeline.joblib.

Labels are class numbers from 0, or names, which are numbered in the order of --classes, of the model's config,
or of the alphabet. Without labels, the loss is the loss of the next token.

After labels were corrected (persample export, apply), only the changed examples need to be measured:

    $ persample scan my_model:net --images photos-fixed/ --image-size 64 --base scans/photos --out scans/fixed

To resume a scan that was stopped, run the same command again. Several processes can share a scan:

    $ torchrun --nproc-per-node 4 -m persample scan my_model:to_scan --out scans/mine
    $ OMP_NUM_THREADS=1 persample scan my_model:to_scan --out scans/mine --engine ray
"""

_EXIT_CODES = {
    0: "done",
    1: "some examples are bad: they cannot be read, their loss is not finite, or their label or shape is wrong (the "
    "message names them; with --skip-bad all others are scanned)",
    2: "wrong arguments, or the model, the data or the loss fails",
    3: "the model is refused (the message names the place)",
    4: "the disk is full; run the command again to resume",
    130: "stopped; run the command again to resume",
    143: "stopped by SIGTERM, as schedulers send it; run the command again to resume",
}


def _add_arguments(parser: ArgumentParser) -> None:
    add_task_arguments(parser)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory or address (s3://...) of the scan, new or to be resumed"
    )
    parser.add_argument(
        "--batch-size",
        type=parse_positive,
        metavar="B",
        help="examples in a batch (default: of the loader, or 64 to 256)",
    )
    parser.add_argument(
        "--project",
        type=parse_positive_or_none,
        default=512,
        metavar="K",
        help="size of the projection of a gradient, or none (default: 512)",
    )
    parser.add_argument(
        "--projection",
        choices=["kronecker", "tensor", "sparse"],
        default="kronecker",
        help="kind of projection: the fastest, or one with smaller errors (default: kronecker)",
    )
    parser.add_argument(
        "--dtype", choices=["float16", "float32"], default="float16", help="dtype of the projection (default: float16)"
    )
    parser.add_argument(
        "--quantities", metavar="A,B", help="quantities to measure: loss,norm,... (default: all but alignment)"
    )
    _add_model_arguments(parser)
    _add_run_arguments(parser)


def _add_model_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that say what is measured of which weights."""
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        metavar="FILE",
        help="state dicts of one training, early ones too: four are enough. Names that differ in numbers are sorted",
    )
    parser.add_argument(
        "--learning-rates", nargs="+", type=float, metavar="LR", help="learning rate of each checkpoint (default: 1)"
    )
    parser.add_argument(
        "--loss-reduction", choices=["mean", "sum"], default="mean", help="reduction over the batch (default: mean)"
    )
    parser.add_argument(
        "--coupled", choices=["contributions"], help="scan samples that influence each other, as in contrastive losses"
    )


def _add_run_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that say how the scan runs, and what it writes."""
    parser.add_argument(
        "--table-format", choices=["parquet", "csv"], default="parquet", help="format of the result (default: parquet)"
    )
    parser.add_argument(
        "--nonfinite",
        choices=["raise", "keep"],
        default="raise",
        help="whether NaN and infinity are an error, or kept in the table (default: raise)",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="scan all other examples if some cannot be read or scanned, list these, and end with exit code 1",
    )
    parser.add_argument(
        "--shard-size", type=parse_positive, default=1024, metavar="N", help="examples between saves (default: 1024)"
    )
    parser.add_argument(
        "--engine",
        choices=["processes", "ray"],
        default="processes",
        help="this process or those of torchrun, or tasks of a Ray cluster (default: processes)",
    )
    parser.add_argument("--device", metavar="NAME", help="device, such as cuda:0 (default: of the model)")
    parser.add_argument("--restart", action="store_true", help="discard the results of an earlier scan in DIR")
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="earlier scan of the same model: take unchanged examples from it, and measure only the others",
    )
    parser.add_argument("--report", action="store_true", help="write DIR/report.html at the end")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with end_on_termination(), redirect_user_output(args), _join_processes() as rank, convert_scan_errors(args.target):
        _check_device(args.device)
        task = load_task(get_origin(args))
        args = Namespace(**{**vars(args), "checkpoints": sort_checkpoints(args.checkpoints, args.learning_rates)})
        for line in () if rank else (*describe_labels(task.data, task.origin), *_advise(args.checkpoints)):
            print(line)
        found = _rescan(args, scanning, task) if args.base else _scan(args, scanning, task)
        if rank:
            return 0
        found.store.write_json(COMMAND_FILE, {**task.origin, "checkpoints": args.checkpoints})
        if args.table:
            task.data.save_pipeline(found.directory / "pipeline.joblib")
        report = _write_report(args, found, task) if args.report else None
        found.store.synchronise()
    paths = {"table": found.table_path, **({"report": report} if report else {})}
    files = {"directory": found.store.address} | {name: found.store.locate(path) for name, path in paths.items()}
    answer = {**found.summary, "files": files}
    print(format_json(answer) if args.json else "\n".join(_format_summary(found, files, task.data)))
    return 1 if found.skipped else 0


_PASSED = (
    "batch_size", "shard_size", "project", "projection", "dtype", "checkpoints", "learning_rates", "loss_reduction",
    "coupled", "nonfinite", "skip_bad", "engine", "device", "out",
)  # fmt: skip


def _scan(args: Namespace, scanning: Any, task: Task) -> Any:
    return scanning.scan(
        task.model,
        task.loss_fn,
        task.data,
        table=args.table_format,
        resume=not args.restart,
        collate=task.collate,
        progress=False if args.quiet else None,
        quantities=args.quantities.split(",") if args.quantities else scanning.QUANTITIES,
        **{name: getattr(args, name) for name in _PASSED},
    )


def _write_report(args: Namespace, found: Any, task: Task) -> Path:
    from persample.scanning import load_last

    with load_last(task.model, args.checkpoints):  # tokens are measured with it
        return found.report(data=task.data, show=task.marker, origin=task.origin)


def _rescan(args: Namespace, scanning: Any, task: Task) -> Any:
    from persample.scanning import rescan

    base = scanning.Scan(args.base)
    origin = read_origin(base)
    if origin is None or not has_data_files(origin) or not has_data_files(task.origin):
        raise UsageError("--base needs data from files (--images or --text); in Python use persample.scanning.rescan")
    return rescan(
        base,
        task.model,
        task.loss_fn,
        task.data,
        before=load_data_files(origin),
        out=args.out,
        checkpoints=args.checkpoints,
        collate=task.collate,
        progress=False if args.quiet else None,
    )


def _format_summary(found: Any, files: dict[str, str], data: Any) -> Iterator[str]:
    """The summary as text."""
    from persample.scanning import say_opinion

    summary = found.summary
    again = f", {summary['measured_again']} of them measured again" if "measured_again" in summary else ""
    yield f"{summary['examples']} examples{again}"
    if found.skipped:
        yield f"{format_count(len(found.skipped), 'example')} skipped:"
        names = found.describe(found.skipped)
        for (i, reason), example in zip(found.skipped.items(), names, strict=True):
            yield "  ".join(filter(None, [f"  {i}", example.get("name"), reason]))
    if summary["columns"]:
        header = ["", "median", "99 %", "most"]
        rows = [
            [name, *(format_number(spread[key]) for key in ("median", "99%", "most"))]
            for name, spread in summary["columns"].items()
        ]
        yield format_table(rows, header, right={1, 2, 3}, indent="  ")
    if summary.get("suggested_batch_size"):
        scale = summary["noise_scale"]
        result = f"noise scale {format_number(scale)}" if scale else "the mean gradient is lost in noise"
        yield f"{result}: batches of about {summary['suggested_batch_size']} examples"
    for name, reason in summary.get("left_out", {}).items():
        yield f"no {name}: {reason}"
    if found.settings["project"] and not found.settings.get("coupled"):
        yield f"checkpoints: {found.describe_checkpoints()}"
    yield f"labels that are probably wrong: {found.estimate_wrong_labels()}"
    if (by := found.default_ranking) is not None:
        yield f"first by {by}:"
        texts = quote_texts(data, ids := found.ranked(by, 5).ids.tolist())
        for i, example in zip(ids, found.describe(ids), strict=True):
            yield "  ".join(filter(None, [f"  {i}", example.get("name"), texts.get(i), say_opinion(example)]))
    for name, path in files.items():
        yield f"{name}: {path}"


def sort_checkpoints(files: list[str] | None, rates: list[float] | None = None) -> list[str] | None:
    """Files whose names differ in numbers only, in the order of the numbers, unless they come with learning rates.

    A shell puts epoch10.pt before epoch9.pt, and the last checkpoint is the one that the table describes.

    >>> sort_checkpoints(["run/epoch10.pt", "run/epoch9.pt"]), sort_checkpoints(["last.pt", "first.pt"])
    (['run/epoch9.pt', 'run/epoch10.pt'], ['last.pt', 'first.pt'])
    """
    if files is None or rates is not None or len({re.sub(r"\d+", "0", name) for name in files}) > 1:
        return files
    return sorted(files, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def _advise(checkpoints: list[str] | None) -> Iterator[str]:
    """Which of many checkpoints to take."""
    count = len(checkpoints or ())
    if checkpoints and count >= 2 * _ENOUGH:
        chosen = [checkpoints[-(-count * (i + 1) // _ENOUGH) - 1] for i in range(_ENOUGH)]
        yield f"{count} checkpoints take as many passes. Evenly spaced ones are enough: {' '.join(chosen)}"


_ENOUGH = 4  # checkpoints; see docs/internals/scan_evidence.md


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {join_lines(error).partition('.')[0]}") from error


@contextmanager
def _join_processes() -> Iterator[int]:
    """Join the processes that torchrun has started, if any; yield the rank of this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_initialized():
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield distributed.get_rank()
    finally:
        distributed.destroy_process_group()


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
