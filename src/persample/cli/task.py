"""Model, data and loss of a scan, from the arguments of a command."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from persample._internal.text import describe_value
from persample.cli.command import parse_positive
from persample.cli.user_code import (
    UsageError,
    add_target_argument,
    call_target,
    check_loss,
    check_model,
    convert_errors,
    join_lines,
    load_model_data_and_loss,
)

# File in the directory of a scan with the arguments that `load_task` needs to load its task again.
COMMAND_FILE = "command.json"

_ORIGIN = (
    "target", "images", "image_size", "channels", "text", "text_column", "label", "tokenizer", "max_length",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Model, data and loss of a scan. `origin` holds the arguments of the command line that define them."""

    model: nn.Module
    data: Any
    loss_fn: Any
    collate: Any
    origin: Mapping[str, Any]


def add_task_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `get_origin` reads."""
    add_target_argument(parser)
    data = parser.add_argument_group("data from files; the function returns the model, or (model, loss_fn)")
    data.add_argument("--images", metavar="FOLDER", help="folder with a subfolder of images for each class")
    data.add_argument(
        "--image-size", type=parse_positive, default=64, metavar="N", help="size of resized images, N x N (default: 64)"
    )
    data.add_argument("--channels", type=int, choices=[1, 3], default=3, help="1 for grey, 3 for colour (default: 3)")
    data.add_argument("--text", metavar="FILE", help="table with a column of text: .csv, .parquet or .jsonl")
    data.add_argument("--text-column", default="text", metavar="NAME", help="column of the text (default: text)")
    data.add_argument("--label", metavar="NAME", help="column of the class (default: label, if it exists)")
    data.add_argument("--tokenizer", metavar="PATH", help="saved tokenizer, or module:function that returns one")
    data.add_argument(
        "--max-length", type=parse_positive, default=128, metavar="T", help="maximum tokens of a text (default: 128)"
    )


def add_directory_argument(parser: ArgumentParser) -> None:
    """Add the argument for the directory of an existing scan."""
    parser.add_argument("directory", metavar="DIR", help="directory of a scan")


def get_origin(args: Namespace) -> dict[str, Any]:
    """The arguments that define the model and the data."""
    return {name: getattr(args, name) for name in _ORIGIN}


def load_task(origin: Mapping[str, Any]) -> Task:
    """Call the user's function, and open the files that the arguments name."""
    target = origin["target"]
    if origin["images"] and origin["text"]:
        raise UsageError("--images and --text cannot be combined")
    if not origin["images"] and not origin["text"]:
        model, data, loss_fn = load_model_data_and_loss(target, "data")
        return Task(model, data, loss_fn, None, origin)
    model, loss_fn = _load_model_and_loss(target)
    if origin["images"]:
        from persample.scanning.datasets import ImageFolder

        images = ImageFolder(origin["images"], origin["image_size"], origin["channels"])
        return Task(model, images, loss_fn or nn.CrossEntropyLoss(), None, origin)
    from persample.scanning.datasets import TextCollator, TextTable, text_losses

    texts = TextTable(origin["text"], origin["text_column"], origin["label"])
    collate = TextCollator(_load_tokenizer(origin["tokenizer"], origin["max_length"]))
    return Task(model, texts, loss_fn or text_losses, collate, origin)


def _load_model_and_loss(target: str) -> tuple[nn.Module, Any]:
    """Call a function that returns the model, or (model, loss_fn). Without a loss, the loss is None."""
    result = call_target(target)
    model, loss_fn = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    check_model(target, model)
    if loss_fn:
        check_loss(target, loss_fn)
    return model, loss_fn


def _load_tokenizer(path: str | None, max_length: int) -> Any:
    if path is None:
        raise UsageError(
            "--text requires --tokenizer: a folder with a tokenizer, its tokenizer.json, or module:function"
        )
    if ":" in path and not Path(path).exists():
        tokenizer = call_target(path)
        if not callable(tokenizer):
            raise UsageError(
                f"{path} must return a function of a list of texts, but returned {describe_value(tokenizer)}"
            )
        return tokenizer
    from persample.scanning.datasets import load_tokenizer

    return load_tokenizer(path, max_length)


def import_scanning() -> ModuleType:
    """Import `persample.scanning`, which requires the extra `scan`."""
    try:
        from persample import scanning
    except ImportError as error:
        raise UsageError(str(error)) from error
    return scanning


@contextmanager
def convert_scan_errors(subject: str) -> Iterator[None]:
    """`convert_errors`, with exit codes and options of the command line for the errors of a scan."""
    from persample.scanning.errors import DiskFull, NotFinite, ScanError

    with convert_errors(subject):
        try:
            yield
        except NotFinite as error:
            raise UsageError(join_lines(error).replace("nonfinite='keep'", "--nonfinite keep"), code=1) from error
        except DiskFull as error:
            raise UsageError(join_lines(error), code=4) from error
        except ScanError as error:
            message = join_lines(error).replace("resume=False", "--restart").replace("`out`", "--out")
            raise UsageError(message) from error
