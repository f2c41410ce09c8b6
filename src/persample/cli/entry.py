"""The user's functions, by their names, and the user's mistakes, told in one line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

PACKAGE = Path(__file__).parents[1]


class UsageError(Exception):
    """A mistake of the user's, told in one line; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:  # 2: as argparse has it
        super().__init__(message)
        self.code = code


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
        raise UsageError(f"{target} fails: {told(error)}") from error


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
        raise UsageError(f"{name} cannot be imported: {told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"file_{path.stem}"  # it must not take another's place
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def told(error: BaseException) -> str:
    """An error in one line, with the line of the user's code that it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {in_one_line(error)}{place}"


def in_one_line(error: BaseException) -> str:
    """The message of an error."""
    return " ".join(str(error).split())


def _is_ours(filename: str) -> bool:
    """Whether a file is of this package, of what is installed, or of Python itself."""
    libraries = [PACKAGE, Path(str(nn.__file__)).parents[2], Path(os.__file__).parent]
    return filename.startswith("<") or any(library in Path(filename).parents for library in libraries)


def shown(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
