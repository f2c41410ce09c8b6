"""Import and call the user's functions, and report their errors in one line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from persample._internal.text import describe_value
from persample.errors import PerSampleError

PACKAGE = Path(__file__).parents[1]


class UsageError(Exception):
    """An error that the user can fix, reported in one line; `code` is the exit code of the command."""

    def __init__(self, message: str, code: int = 2) -> None:  # argparse uses 2 as well
        super().__init__(message)
        self.code = code


def add_target_argument(parser: ArgumentParser, task: str, **options: Any) -> None:
    """Add the argument `module:function`. `task` says what the function does, such as "returns the model"."""
    parser.add_argument(
        "target",
        metavar="module:function",
        help=f"function that {task}: my.module:function or path/to/file.py:function",
        **options,
    )


# ---- calls ----


def call_target(target: str) -> Any:
    """Call `module:function` without arguments and return its result."""
    function = load_function(target)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{target} failed: {describe_error(error)}") from error


def load_function(target: str, arguments: Sequence[str] = (), optional: Sequence[str] = ()) -> Any:
    """Import `module:function`, which must be callable with as many arguments as there are names in `arguments`.

    It may also take those of `optional`.
    """
    name, colon, function_name = target.rpartition(":")
    if not (name and colon and function_name.isidentifier()):
        raise UsageError(f"expected module:function, such as my_model:to_check, got '{target}'")
    module = _import_module(name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        available = f"it has {', '.join(names)}" if names else "it has no functions"
        if function is None:
            raise UsageError(f"{name} has no function '{function_name}'; {available}")
        raise UsageError(f"'{function_name}' in {name} is {describe_value(function)}, not a function; {available}")
    try:
        takes_more = len(inspect.signature(function).parameters) > len(arguments)
        inspect.signature(function).bind(*arguments, *(optional if takes_more else ()))
    except TypeError as error:
        wanted = f"as {function_name}({', '.join(arguments)})" if arguments else "without arguments"
        raise UsageError(f"{target} must be callable {wanted}, but takes {inspect.signature(function)}") from error
    return function


def load_model_data_and_loss(target: str, data_name: str) -> tuple[nn.Module, Any, Any]:
    """Call a function that must return (model, data, loss_fn). `data_name` is the word for the data in messages."""
    result = call_target(target)
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise UsageError(f"{target} must return (model, {data_name}, loss_fn), but returned {describe_value(result)}")
    model, data, loss_fn = result
    check_model(target, model)
    check_loss(target, loss_fn)
    return model, data, loss_fn


def check_model(target: str, model: Any) -> None:
    """Raise unless the function `target` returned a module as the model."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} must return an nn.Module as the model, but returned {describe_value(model)}")


def check_loss(target: str, loss_fn: Any) -> None:
    """Raise unless the function `target` returned a function as the loss."""
    if not callable(loss_fn):
        raise UsageError(f"{target} must return a function as the loss, but returned {describe_value(loss_fn)}")


def _import_module(name: str) -> ModuleType:
    """Import a module by its dotted name or its file, relative to the working directory."""
    path = Path(name)
    is_file = path.suffix == ".py" or os.sep in name
    if is_file and not path.is_file():
        raise UsageError(f"there is no file {name} in {os.getcwd()}")
    for directory in [str(path.parent.resolve()) if is_file else None, os.getcwd()]:
        if directory is not None and directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        return _import_file(path) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and (name == missing or name.startswith(f"{missing}.")):
            raise UsageError(f"there is no module '{missing}' in {os.getcwd()} or on the path of Python") from error
        raise UsageError(f"{name} cannot be imported: {describe_error(error)}") from error


def _import_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"file_{path.stem}"  # do not replace an imported module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


# ---- errors ----


@contextmanager
def convert_errors(subject: str, refusal_code: int = 3) -> Iterator[None]:
    """Convert errors in the block to a `UsageError` with one line that starts with `subject`.

    `refusal_code` is the exit code for a `PerSampleError`; the exit code for other errors is 2.
    """
    try:
        yield
    except UsageError:
        raise
    except PerSampleError as error:
        raise UsageError(f"{subject}: {join_lines(error)}", code=refusal_code) from error
    except Exception as error:
        raise UsageError(f"{subject}: the model, the data or the loss failed: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Type and message of an error in one line, with the line of the user's code that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {join_lines(error)}{place}"


def join_lines(error: BaseException) -> str:
    """Message of an error in one line."""
    return " ".join(str(error).split())


def _is_library(filename: str) -> bool:
    """Whether a file belongs to this package, to an installed package or to Python."""
    libraries = [PACKAGE, Path(str(nn.__file__)).parents[2], Path(os.__file__).parent]
    return filename.startswith("<") or any(library in Path(filename).parents for library in libraries)
