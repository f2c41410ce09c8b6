"""`persample scan`."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from persample.cli.command import Command, apart, as_json, number, number_or_none, positive
from persample.cli.entry import UsageError, in_one_line
from persample.cli.task import COMMAND_FILE, add_task_arguments, needed, one_line, origin_of, task_from

_SCAN = """\
Go through a dataset and measure what each example does to the model: its loss, the norm of its gradient
(whole and by layer), its influence on itself, how it points against the mean gradient, and a projection
of its gradient, to ask for neighbours, duplicates, outliers and influence with `persample query`.

The function takes no arguments and returns a model, a dataset and a loss:

    # my_model.py
    def to_scan():
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        model.load_state_dict(torch.load("model.pt"))
        return model, dataset, nn.CrossEntropyLoss()

    $ persample scan my_model:to_scan --out scans/mine --report

Images in a folder for each class, or a table with a column of text; then the function returns the model,
or the model and a loss:

    $ persample scan my_model:net --images photos/ --image-size 64 --out scans/photos
    $ persample scan my_model:net --text reviews.csv --label mood --tokenizer tokenizer/ --out scans/reviews

A label that is a number is taken as it is, from 0; names are numbered in alphabetical order. Without a
label the loss is that of the next tokens.

A scan that was stopped goes on when the same command is run again. Several processes share it:

    $ torchrun --nproc-per-node 4 -m persample scan my_model:to_scan --out scans/mine
"""

_EXIT_CODES = """\
exit codes: 0 done, 1 examples whose loss or gradient is not a number (the message tells which), 2 an
error in what was asked, 3 the model is refused (the message names the place), 4 the disk is full,
130 stopped; after 4 and 130 the same command goes on"""


def _arguments(parser: ArgumentParser) -> None:
    parser.epilog = _EXIT_CODES
    add_task_arguments(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the directory of the scan, new or gone on with")
    parser.add_argument("--batch-size", type=positive, metavar="B", help="examples at a time (64, or the loader's)")
    parser.add_argument(
        "--project", type=number_or_none, default=512, metavar="K", help="numbers to keep of a gradient, or none (512)"
    )
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16", help="of those numbers (float16)")
    parser.add_argument("--quantities", metavar="A,B", help="what to measure: loss,norm,... (all)")
    parser.add_argument("--checkpoints", nargs="+", metavar="FILE", help="states of the model to sum influences over")
    parser.add_argument("--learning-rates", nargs="+", type=float, metavar="LR", help="one for each checkpoint (1)")
    parser.add_argument("--loss-reduction", choices=["mean", "sum"], default="mean", help="over the batch (mean)")
    parser.add_argument("--table", choices=["parquet", "csv"], default="parquet", help="the table's kind (parquet)")
    parser.add_argument("--nonfinite", choices=["raise", "keep"], default="raise", help="what to do with NaN (raise)")
    parser.add_argument("--shard-size", type=positive, default=1024, metavar="N", help="examples between saves (1024)")
    parser.add_argument("--device", metavar="NAME", help="where to compute, as in cuda:0 (where the model is)")
    parser.add_argument("--restart", action="store_true", help="throw away what a scan in DIR has done")
    parser.add_argument("--report", action="store_true", help="write DIR/report.html when it is done")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _run(args: Namespace) -> int:
    scanning = needed()
    with apart(args), _processes() as rank, one_line(args.target):
        _check_device(args.device)
        task = task_from(origin_of(args))
        found = scanning.scan(
            task.model,
            task.loss_fn,
            task.data,
            out=args.out,
            batch_size=args.batch_size,
            shard_size=args.shard_size,
            project=args.project,
            dtype=args.dtype,
            checkpoints=args.checkpoints,
            learning_rates=args.learning_rates,
            loss_reduction=args.loss_reduction,
            table=args.table,
            nonfinite=args.nonfinite,
            device=args.device,
            resume=not args.restart,
            collate=task.collate,
            progress=False if args.quiet else None,
            quantities=args.quantities.split(",") if args.quantities else scanning.QUANTITIES,
        )
        if rank:
            return 0
        found.store.write_json(COMMAND_FILE, {**task.origin, "checkpoints": args.checkpoints})
        report = found.report(data=task.data) if args.report else None
    files = {"directory": found.directory, "table": found.table_path, **({"report": report} if report else {})}
    answer = {**found.summary, "files": {name: str(path) for name, path in files.items()}}
    print(as_json(answer) if args.json else "\n".join(_lines(found, files)))
    return 0


def _lines(found: Any, files: dict[str, Any]) -> Iterator[str]:
    """The summary, for people."""
    summary = found.summary
    yield f"{summary['examples']} examples"
    width = max(map(len, summary["columns"]), default=0)
    if width:
        yield f"  {'':{width}}  {'median':>10}  {'99 %':>10}  {'most':>10}"
    for name, spread in summary["columns"].items():
        yield f"  {name:{width}}  " + "  ".join(f"{number(spread[key]):>10}" for key in ("median", "99%", "most"))
    if summary.get("suggested_batch_size"):
        scale = summary["noise_scale"]
        said = f"noise scale {number(scale)}" if scale else "the mean gradient is lost in noise"
        yield f"{said}: batches of about {summary['suggested_batch_size']} examples"
    for by in [name for name in ("self_influence", "norm", "loss") if name in summary["columns"]][:1]:
        yield f"largest {by}: examples {', '.join(map(str, found.ranked(by, 10).ids.tolist()))}"
    for name, path in files.items():
        yield f"{name}: {path}"


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {in_one_line(error).partition('.')[0]}") from error


@contextmanager
def _processes() -> Iterator[int]:
    """This process's rank among those that torchrun has started."""
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


COMMAND = Command("measure what each example of a dataset does to a model", _SCAN, _arguments, _run)
