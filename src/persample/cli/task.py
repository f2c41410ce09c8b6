"""Model, data and loss of a scan, from the arguments of a command."""

from __future__ import annotations

import inspect
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from persample._internal.text import describe_value, format_list
from persample.cli.command import parse_numbers, parse_positive
from persample.cli.user_code import (
    UsageError,
    add_target_argument,
    call_target,
    check_loss,
    check_model,
    convert_errors,
    describe_error,
    join_lines,
    load_function,
    load_model_data_and_loss,
)

if TYPE_CHECKING:
    from persample.scanning import FeatureTable

# File in the directory of a scan with the arguments of its command. The directory may come from somebody else: a
# function that is named there is never called, unless the user names it again.
COMMAND_FILE = "command.json"

_ORIGIN = (
    "target", "images", "image_size", "channels", "text", "text_column", "label", "tokenizer", "max_length",
    "id_column", "classes", "prompt_column", "completion_column", "table", "target_column", "transform",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Model, data and loss of a scan. `origin` holds the arguments of the command line that define them."""

    model: nn.Module
    data: Any
    loss_fn: Any
    collate: Any
    origin: Mapping[str, Any]
    marker: Any = None  # a TokenMarker, for texts


def add_task_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `get_origin` reads."""
    add_target_argument(parser, "returns (model, data, loss)")
    data = parser.add_argument_group("data from files; the function returns the model, or (model, loss_fn)")
    data.add_argument("--images", metavar="FOLDER", help="folder with a subfolder of images for each class")
    data.add_argument(
        "--image-size", type=parse_positive, default=64, metavar="N", help="size of resized images, N x N (default: 64)"
    )
    data.add_argument("--resize", type=parse_numbers, metavar="S|W,H", help="resize the shorter side to S, or to W x H")
    data.add_argument("--crop", type=parse_numbers, metavar="W,H", help="crop the middle of the images")
    data.add_argument("--mean", type=parse_numbers, metavar="R,G,B", help="subtract these from values from 0 to 1")
    data.add_argument("--std", type=parse_numbers, metavar="R,G,B", help="then divide by these")
    data.add_argument(
        "--processor",
        metavar="PATH",
        help="saved image processor of transformers, or config.json of timm",
    )
    data.add_argument("--channels", type=int, choices=[1, 3], default=3, help="1 for grey, 3 for colour (default: 3)")
    _add_table_arguments(data)
    data.add_argument(
        "--classes",
        metavar="A,B",
        help="names of the classes in the order of the model's outputs (default: of the model's config, or sorted)",
    )


def _add_table_arguments(data: Any) -> None:
    """Add the arguments of texts and of other columns."""
    data.add_argument(
        "--text",
        metavar="FILE",
        help="table with a column of text: .csv, .parquet, .jsonl, or the folder of a saved Hugging Face dataset",
    )
    data.add_argument("--table", metavar="FILE", help="numbers, categories and dates: .csv, .parquet or .jsonl")
    data.add_argument("--target", dest="target_column", metavar="NAME", help="column of --table to predict")
    data.add_argument("--text-column", default="text", metavar="NAME", help="column of the text (default: text)")
    data.add_argument("--label", metavar="NAME", help="column of the class (default: label, if it exists)")
    data.add_argument("--prompt-column", metavar="NAME", help="column of the prompt (default: prompt, if no text)")
    data.add_argument(
        "--completion-column",
        metavar="NAME",
        help="column of the completion, which alone counts for the loss (default: completion, if no text)",
    )
    data.add_argument("--id-column", metavar="NAME", help="column that names the rows (default: id, if it exists)")
    data.add_argument(
        "--tokenizer", metavar="PATH", help="saved tokenizer, or module:function that returns one, or a function"
    )
    data.add_argument(
        "--max-length", type=parse_positive, default=128, metavar="T", help="maximum tokens of a text (default: 128)"
    )


def add_directory_arguments(parser: ArgumentParser, purpose: str) -> None:
    """Add the arguments for the directory of an existing scan, and for the function that its command was given."""
    parser.add_argument("directory", metavar="DIR", help="directory of a scan")
    parser.add_argument("--module", metavar="module:function", help=f"function of the scan, called {purpose}")


def get_origin(args: Namespace) -> dict[str, Any]:
    """The arguments that define the model and the data, and the folder in which the command runs."""
    origin = {name: getattr(args, name) for name in _ORIGIN if name != "transform"}
    origin["transform"] = _find_transform(args)
    return origin | {"classes": args.classes.split(",") if args.classes else None, "folder": os.getcwd()}


def read_origin(found: Any) -> dict[str, Any] | None:
    """The arguments of the command that made a scan; None if it was made from Python.

    Relative paths are looked up in the folder in which the command was run, then in this one.
    """
    if not found.store.has(found.directory / COMMAND_FILE):
        return None
    origin = found.store.read_json(COMMAND_FILE)
    folder = Path(origin.get("folder", "."))
    for name in ("images", "text", "tokenizer", "table"):
        if origin.get(name) and ((folder / origin[name]).exists() or not Path(origin[name]).exists()):
            origin[name] = str(folder / origin[name])
    return origin


def _find_transform(args: Namespace) -> dict[str, Any] | None:
    """The transform of the images that the arguments describe, as JSON; None if only their size is given."""
    given = {name: getattr(args, name) for name in ("resize", "crop", "mean", "std") if getattr(args, name)}
    if not given and not args.processor:
        return None
    from persample.scanning import ImageTransform, ScanError, read_processor

    try:
        base = read_processor(args.processor) if args.processor else ImageTransform((args.image_size, args.image_size))
    except ScanError as error:
        raise UsageError(str(error)) from error
    for name in ("resize", "crop"):
        if name in given:
            given[name] = tuple(map(int, given[name]))
    if len(given.get("crop", (1, 1))) == 1:
        given["crop"] *= 2
    return asdict(replace(base, **given))


def get_data_path(origin: Mapping[str, Any]) -> str | None:
    """The file or folder of the data; None if it comes from the user's function."""
    return origin["images"] or origin["text"] or origin.get("table")


@contextmanager
def explain_folder(origin: Mapping[str, Any] | None) -> Iterator[None]:
    """Say in an error of the block in which folder the scan was run, if it was another one."""
    try:
        yield
    except UsageError as error:
        folder = (origin or {}).get("folder")
        if folder is None or folder == os.getcwd():
            raise
        raise UsageError(f"{error}; the scan was run in {folder}", error.code) from error


def load_task(origin: Mapping[str, Any]) -> Task:
    """Call the user's function, and open the files that the arguments name."""
    from persample.scanning import find_model_classes

    target = origin["target"]
    if sum(bool(origin.get(name)) for name in ("images", "text", "table")) > 1:
        raise UsageError("--images, --text and --table cannot be combined")
    if not has_data_files(origin):
        model, data, loss_fn = load_model_data_and_loss(target, "data")
        return Task(model, data, loss_fn, None, origin)
    if origin.get("table"):
        data = load_data_files(origin)
        model, loss_fn = _call_with_table(target, data)
        return Task(model, data, loss_fn, None, origin)
    model, loss_fn = load_model_and_loss(origin)
    if not origin["classes"] and (known := find_model_classes(model)) is not None:
        origin = {**origin, "classes": known}
    data, collate, marker = load_data_files(origin), None, None
    if origin["text"]:
        from persample.scanning import PretrainedTokenizer, TextCollator, TokenMarker

        tokenizer = _load_tokenizer(origin["tokenizer"], origin["max_length"])
        collate = TextCollator(tokenizer)
        if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.knows_places:
            marker = TokenMarker(model, tokenizer.tokenizer, tokenizer.max_length, loss_fn=loss_fn)
    return Task(model, data, loss_fn, collate, origin, marker)


def load_scanned_task(found: Any, target: str) -> Task:
    """The task of a scan whose data came from files, with the function that the user names."""
    origin = read_origin(found)
    if origin is None or not has_data_files(origin):
        raise UsageError(f"{found.directory} is no scan of files (scan --images, --text)")
    if origin["tokenizer"] and not Path(origin["tokenizer"]).exists():
        raise UsageError(f"there is no tokenizer {origin['tokenizer']!r}; functions named by a scan are not called")
    with explain_folder(origin):
        task = load_task({**origin, "target": target})
    check_data(found, task.data, origin)
    return task


def check_data(found: Any, data: Any, origin: Mapping[str, Any]) -> None:
    """Raise unless files are those that were scanned.

    The scan may come from somebody else. The digest shows that they knew the files, and did not only name them.
    """
    from persample.scanning import Source

    source = Source(data, skip_bad=found.settings.get("skip_bad", False))
    if source.compute_digest() != found.settings["data"]:
        raise UsageError(f"{get_data_path(origin)} is not the data of this scan, or has changed: use --no-data")


def has_data_files(origin: Mapping[str, Any]) -> bool:
    """Whether the data comes from files, and not from the user's function."""
    return get_data_path(origin) is not None


def load_data_files(origin: Mapping[str, Any]) -> Any:
    """The data that the arguments name. Calls none of the user's functions."""
    from persample.scanning import FeatureTable, ImageFolder, ImageTransform, TextTable

    classes = origin.get("classes")
    if origin["images"]:
        given = origin.get("transform")
        transform = ImageTransform(**{key: _to_tuple(value) for key, value in given.items()}) if given else None
        return ImageFolder(origin["images"], origin["image_size"], origin["channels"], classes, transform)
    if origin.get("table"):
        if not origin["target_column"]:
            raise UsageError("--table needs --target: the column to predict")
        return FeatureTable(origin["table"], origin["target_column"], origin.get("id_column"), classes)
    pairs = (origin.get("prompt_column"), origin.get("completion_column"))
    return TextTable(origin["text"], origin["text_column"], origin["label"], origin.get("id_column"), classes, *pairs)


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _call_with_table(target: str, data: FeatureTable) -> tuple[nn.Module, Any]:
    """Call the user's function with the table if it takes an argument, and return the model and the loss."""
    function = load_function(target, optional=["table"])
    try:
        result = function(data) if inspect.signature(function).parameters else function()
    except Exception as error:
        raise UsageError(f"{target} failed: {describe_error(error)}") from error
    model, loss_fn = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    check_model(target, model)
    if loss_fn is not None:
        check_loss(target, loss_fn)
    is_regression = isinstance(data[0][1], Tensor)
    return model, loss_fn or (nn.MSELoss() if is_regression else nn.CrossEntropyLoss())


def quote_texts(data: Any, ids: Sequence[int], length: int | None = 60) -> dict[int, str]:
    """The beginnings of some texts of a table, for lists in a terminal, or all of them; empty for other data."""
    from persample.scanning import TextTable

    texts = {i: data[i]["text"] for i in ids} if isinstance(data, TextTable) else {}
    return texts if length is None else {i: shorten(text, length, placeholder=" …") for i, text in texts.items()}


def find_texts(found: Any) -> Any:
    """The texts of a scan, if its files are there and have not changed; else None."""
    from persample.scanning import ScanError

    origin = read_origin(found)
    if origin is None or not origin["text"] or not Path(origin["text"]).exists():
        return None
    try:
        data = load_data_files(origin)
        check_data(found, data, origin)
    except (UsageError, ScanError):
        return None
    return data


def describe_labels(data: Any, origin: Mapping[str, Any]) -> Iterator[str]:
    """Lines that say which class has which number, and which folders are no classes."""
    if getattr(data, "classes", None):
        numbers = format_list([f"{i} {name}" for i, name in enumerate(data.classes)], most=20)
        order = "in the order of the model" if origin.get("classes") else "in alphabetical order"
        yield f"classes, {order}: {numbers}"
    if transform := getattr(data, "transform", None):
        yield f"images: {transform}"
    if features := getattr(data, "feature_names", None):
        yield f"features: {format_list(features, most=20)}"
    if left_out := getattr(data, "left_out", None):
        yield f"columns without numbers, categories or dates: {format_list(left_out)}"
    if skipped := getattr(data, "skipped", None):
        yield f"no classes, because they are hidden or have no images: {format_list(skipped)}"


def load_model_and_loss(origin: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """Call the user's function, and return the model and the loss of the scan."""
    target = origin["target"]
    if origin.get("table"):
        return _call_with_table(target, load_data_files(origin))
    if not has_data_files(origin):
        model, _, loss_fn = load_model_data_and_loss(target, "data")
        return model, loss_fn
    result = call_target(target)
    model, loss_fn = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    check_model(target, model)
    if loss_fn:
        check_loss(target, loss_fn)
        return model, loss_fn
    from persample.scanning import text_losses

    return model, nn.CrossEntropyLoss() if origin["images"] else text_losses


def _load_tokenizer(path: str | None, max_length: int) -> Any:
    if path is None:
        raise UsageError(
            "--text requires --tokenizer: a folder with a tokenizer, its tokenizer.json, or module:function"
        )
    from persample.scanning import load_tokenizer, wrap_tokenizer

    if Path(path).exists() or ":" not in path:
        return load_tokenizer(path, max_length)
    returned = call_target(path)
    tokenizer = wrap_tokenizer(returned, max_length)
    if not callable(tokenizer):
        raise UsageError(
            f"{path} must return a function of a list of texts or a tokenizer of Hugging Face, but returned "
            f"{describe_value(returned)}"
        )
    return tokenizer


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
    from persample.scanning import BadExamples, DiskFull, NotFinite, ScanError

    with convert_errors(subject):
        try:
            yield
        except NotFinite as error:
            raise UsageError(join_lines(error).replace("nonfinite='keep'", "--nonfinite keep"), code=1) from error
        except BadExamples as error:
            message = join_lines(error).replace("skip_bad=True", "--skip-bad")
            raise UsageError(f"{subject}: {message}", code=1) from error
        except DiskFull as error:
            raise UsageError(join_lines(error), code=4) from error
        except ScanError as error:
            message = join_lines(error).replace("resume=False", "--restart").replace("`out`", "--out")
            raise UsageError(message) from error
