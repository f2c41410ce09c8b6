"""The command line: `python -m persample`, or `persample`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import persample
import persample.checking

BROKEN_PIPE = 141  # as of a program that the signal ends
USAGE_ERROR = 2  # as argparse has it
EXIT_CODES = {"right": 0, "wrong": 1, "refused": 3, "not compared": 3}


class UsageError(Exception):
    """A mistake of the user's, told in one line."""


@dataclass(frozen=True)
class Command:
    """A subcommand: what it is for, its arguments, and what it does, which gives the exit code."""

    summary: str
    description: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


# ---- check ----

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
    parser.add_argument("--samples", type=_positive, default=4, metavar="N", help="how many samples to compare (4)")
    parser.add_argument("--batch-dim", type=int, default=0, metavar="D", help="the dim of the samples (0)")
    parser.add_argument("--batch-size", type=_positive, metavar="B", help="the samples in the batch, if not clear")
    parser.add_argument("--loss-reduction", choices=["mean", "sum"], default="mean", help="over the batch (mean)")
    parser.add_argument("--tolerance", type=float, metavar="E", help="the relative error to allow (by the number type)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_positive.__name__ = "positive number"  # as argparse names it in its message


def _check(args: Namespace) -> int:
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # what the user's code prints is no JSON
        report = _report(args)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return EXIT_CODES[report.outcome]


def _report(args: Namespace) -> persample.checking.Report:
    model, batch, loss_fn = _subject(args.target)
    options = ("samples", "batch_dim", "batch_size", "loss_reduction", "tolerance")
    try:
        return persample.check(model, batch, loss_fn, **{name: getattr(args, name) for name in options})
    except persample.PerSampleError as error:
        raise UsageError(f"{args.target}: {_in_one_line(error)}") from error
    except Exception as error:
        raise UsageError(f"{args.target}: the model or loss fails by itself: {_told(error)}") from error


def _subject(target: str) -> tuple[nn.Module, Any, Any]:
    """The model, batch and loss that the user's function gives."""
    found = call(target)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise UsageError(f"{target} has to return (model, batch, loss_fn), and returned {_shown(found)}")
    model, batch, loss_fn = found
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} has to return an nn.Module first, and returned {_shown(model)}")
    if not callable(loss_fn):
        raise UsageError(f"{target} has to return a loss function last, and returned {_shown(loss_fn)}")
    return model, batch, loss_fn


COMMANDS: dict[str, Command] = {
    "check": Command("compare with a loop over a few samples", _CHECK, _check_arguments, _check),
}


# ---- the user's functions, by their names ----


def call(target: str) -> Any:
    """What `module:function` returns."""
    name, colon, function_name = target.rpartition(":")
    if not (name and colon and function_name.isidentifier()):
        raise UsageError(f"expected module:function, as in my_model:to_check, got '{target}'")
    module = _imported(name)
    function = getattr(module, function_name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        kind = "no function" if function is None else f"a {type(function).__name__}, and no function,"
        raise UsageError(f"{name} has {kind} '{function_name}'; it has {', '.join(there) or 'none'}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(f"{target} is called without arguments, and takes {inspect.signature(function)}") from error
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{target} fails: {_told(error)}") from error


def _imported(name: str) -> ModuleType:
    """A module by its dotted name or its file, found from the working directory."""
    path = Path(name)
    is_file = path.suffix == ".py" or os.sep in name
    if is_file and not path.is_file():
        raise UsageError(f"there is no file {name} in {os.getcwd()}")
    for directory in [str(path.parent.resolve()) if is_file else None, os.getcwd()]:
        if directory is not None and directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        return _from_file(path) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and (name == missing or name.startswith(f"{missing}.")):
            raise UsageError(f"there is no module '{missing}', looked for from {os.getcwd()}") from error
        raise UsageError(f"{name} cannot be imported: {_told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"file_{path.stem}"  # it must not take another's place
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def _told(error: BaseException) -> str:
    """An error in one line, with the line of the user's code that it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_in_one_line(error)}{place}"


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _is_ours(filename: str) -> bool:
    """Whether a file is of this package, of what is installed, or of Python itself."""
    libraries = [Path(__file__).parent, Path(str(nn.__file__)).parents[2], Path(os.__file__).parent]
    return filename.startswith("<") or any(library in Path(filename).parents for library in libraries)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


# ---- all commands ----


def _parser() -> ArgumentParser:
    parser = ArgumentParser("persample", description=persample.__doc__)
    parser.add_argument("--version", action="version", version=f"persample {persample.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name, help=command.summary, description=command.description, formatter_class=RawDescriptionHelpFormatter
        )
        command.arguments(own)
        own.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name, and gives its exit code."""
    args = _parser().parse_args(argv)
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has read enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except UsageError as error:
        if args.debug:
            raise
        print(f"persample {args.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
