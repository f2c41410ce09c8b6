"""`persample check`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from torch import nn

import persample
import persample.checking
from persample.cli.command import Command, apart, as_json, positive
from persample.cli.entry import UsageError, call, in_one_line, shown, told

EXIT_CODES = {"right": 0, "wrong": 1, "refused": 3, "not compared": 3}

_CHECK = """\
Compare the per-sample gradients of a model with a loop over a few samples, and tell for each
parameter which rule its gradients come by, what they cost, and whether they are right.

The function takes no arguments and returns a model, a batch and a loss:

    # my_model.py
    def to_check():
        model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
        x, y = torch.randn(32, 20), torch.randint(3, (32,))
        return model, (x, y), nn.CrossEntropyLoss()

    $ python -m persample check my_model:to_check

A loss module, or a loss of torch.nn.functional, goes with (inputs, targets). In general the loss is
a function of model and batch, whatever the batch is:

        return model, batch, lambda model, batch: model(**batch).loss

A whole example, in the repository:

    $ python -m persample check examples/check_model.py:language_model
"""

_EXIT_CODES = """\
exit codes: 0 right, 1 wrong numbers, 2 an error in what was asked, 3 refused (the message names the
place in the model), or nothing to compare with"""


def _check_arguments(parser: ArgumentParser) -> None:
    parser.epilog = _EXIT_CODES
    parser.add_argument("target", metavar="module:function", help="a module (my.module) or a file (path/to/file.py)")
    parser.add_argument("--samples", type=positive, default=4, metavar="N", help="how many samples to compare (4)")
    parser.add_argument("--batch-dim", type=int, default=0, metavar="D", help="the dim of the samples (0)")
    parser.add_argument("--batch-size", type=positive, metavar="B", help="the samples in the batch, if not clear")
    parser.add_argument("--loss-reduction", choices=["mean", "sum"], default="mean", help="over the batch (mean)")
    parser.add_argument("--tolerance", type=float, metavar="E", help="the relative error to allow (by the number type)")


def _check(args: Namespace) -> int:
    with apart(args):
        report = _report(args)
    print(as_json(report.to_dict()) if args.json else report)
    return EXIT_CODES[report.outcome]


def _report(args: Namespace) -> persample.checking.Report:
    model, batch, loss_fn = subject_of(args.target)
    options = ("samples", "batch_dim", "batch_size", "loss_reduction", "tolerance")
    try:
        return persample.check(model, batch, loss_fn, **{name: getattr(args, name) for name in options})
    except persample.PerSampleError as error:
        raise UsageError(f"{args.target}: {in_one_line(error)}") from error
    except Exception as error:
        raise UsageError(f"{args.target}: the model or loss fails by itself: {told(error)}") from error


def subject_of(target: str) -> tuple[nn.Module, Any, Any]:
    """The model, batch and loss that the user's function gives."""
    found = call(target)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise UsageError(f"{target} has to return (model, batch, loss_fn), and returned {shown(found)}")
    model, batch, loss_fn = found
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} has to return an nn.Module first, and returned {shown(model)}")
    if not callable(loss_fn):
        raise UsageError(f"{target} has to return a loss function last, and returned {shown(loss_fn)}")
    return model, batch, loss_fn


COMMAND = Command("compare with a loop over a few samples", _CHECK, _check_arguments, _check)
