"""The model, the data and the loss that a command is about, from what the user types."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from persample.cli.command import positive
from persample.cli.entry import UsageError, call, in_one_line, shown, told
from persample.errors import PerSampleError

# What a scan was made of, in its directory, so that it can be made again.
COMMAND_FILE = "command.json"

_ORIGIN = (
    "target", "images", "image_size", "channels", "text", "text_column", "label", "tokenizer", "max_length",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What a scan takes; `origin` is what the user typed for it."""

    model: nn.Module
    data: Any
    loss_fn: Any
    collate: Any
    origin: Mapping[str, Any]


def add_task_arguments(parser: ArgumentParser) -> None:
    """The arguments that `origin_of` reads."""
    parser.add_argument("target", metavar="module:function", help="a module (my.module) or a file (path/to/file.py)")
    data = parser.add_argument_group("data from files, with a function that returns the model, or (model, loss)")
    data.add_argument("--images", metavar="FOLDER", help="images, in a folder for each class")
    data.add_argument("--image-size", type=positive, default=64, metavar="N", help="they are resized to N x N (64)")
    data.add_argument("--channels", type=int, choices=[1, 3], default=3, help="grey or in colours (3)")
    data.add_argument("--text", metavar="FILE", help="a table with a column of text: .csv, .parquet or .jsonl")
    data.add_argument("--text-column", default="text", metavar="NAME", help="the column of the text (text)")
    data.add_argument("--label", metavar="NAME", help="the column of the class (label, if there is one)")
    data.add_argument("--tokenizer", metavar="PATH", help="a saved tokenizer, or module:function that returns one")
    data.add_argument("--max-length", type=positive, default=128, metavar="T", help="of a text, in tokens (128)")


def origin_of(args: Namespace) -> dict[str, Any]:
    """What of the arguments tells the model and the data."""
    return {name: getattr(args, name) for name in _ORIGIN}


def task_from(origin: Mapping[str, Any]) -> Task:
    """The user's model, data and loss."""
    target = origin["target"]
    if origin["images"] and origin["text"]:
        raise UsageError("--images and --text do not go together")
    if not origin["images"] and not origin["text"]:
        model, data, loss_fn = _three(target)
        return Task(model, data, loss_fn, None, origin)
    model, loss_fn = _two(target)
    if origin["images"]:
        from persample.scanning.files import ImageFolder

        images = ImageFolder(origin["images"], origin["image_size"], origin["channels"])
        return Task(model, images, loss_fn or nn.CrossEntropyLoss(), None, origin)
    from persample.scanning.files import TextTable, Tokenized, text_losses

    texts = TextTable(origin["text"], origin["text_column"], origin["label"])
    collate = Tokenized(_tokenizer(origin["tokenizer"], origin["max_length"]))
    return Task(model, texts, loss_fn or text_losses, collate, origin)


def _three(target: str) -> tuple[nn.Module, Any, Any]:
    found = call(target)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise UsageError(f"{target} has to return (model, data, loss_fn), and returned {shown(found)}")
    model, data, loss_fn = found
    _check(target, model, loss_fn)
    return model, data, loss_fn


def _two(target: str) -> tuple[nn.Module, Any]:
    found = call(target)
    model, loss_fn = found if isinstance(found, (tuple, list)) and len(found) == 2 else (found, None)
    _check(target, model, loss_fn or len)
    return model, loss_fn


def _check(target: str, model: Any, loss_fn: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} has to return an nn.Module first, and returned {shown(model)}")
    if not callable(loss_fn):
        raise UsageError(f"{target} has to return a loss function last, and returned {shown(loss_fn)}")


def _tokenizer(given: str | None, max_length: int) -> Any:
    if given is None:
        raise UsageError("--text needs a --tokenizer: a folder that holds one, its tokenizer.json, or module:function")
    if ":" in given and not Path(given).exists():
        tokenizer = call(given)
        if not callable(tokenizer):
            raise UsageError(f"{given} has to return a function of a list of texts, and returned {shown(tokenizer)}")
        return tokenizer
    from persample.scanning.files import loaded_tokenizer

    return loaded_tokenizer(given, max_length)


def needed() -> ModuleType:
    """The part of the library that takes an extra."""
    try:
        from persample import scanning
    except ImportError as error:
        raise UsageError(str(error)) from error
    return scanning


@contextmanager
def one_line(subject: str) -> Iterator[None]:
    """Tells errors in one line, each kind with its exit code."""
    from persample.scanning.errors import NoRoom, NotFinite, ScanError

    try:
        yield
    except UsageError:
        raise
    except NotFinite as error:
        raise UsageError(in_one_line(error).replace("nonfinite='keep'", "--nonfinite keep"), code=1) from error
    except NoRoom as error:
        raise UsageError(in_one_line(error), code=4) from error
    except ScanError as error:
        raise UsageError(in_one_line(error).replace("resume=False", "--restart").replace("`out`", "--out")) from error
    except PerSampleError as error:
        raise UsageError(f"{subject}: {in_one_line(error)}", code=3) from error
    except Exception as error:
        raise UsageError(f"{subject}: the model, the data or the loss fails by itself: {told(error)}") from error
