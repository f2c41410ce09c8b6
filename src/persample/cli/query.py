"""`persample query`."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from persample._internal.text import format_table, format_values
from persample.cli.command import Command, format_json, format_number, parse_positive, redirect_user_output
from persample.cli.report import load_contents
from persample.cli.task import (
    add_directory_arguments,
    convert_scan_errors,
    explain_folder,
    find_texts,
    import_scanning,
    load_model_and_loss,
    load_scanned_task,
    quote_texts,
    read_origin,
)
from persample.cli.user_code import UsageError, call_target, load_function

if TYPE_CHECKING:
    from persample.scanning import Scan

_DESCRIPTION = """\
Find examples in a scan. Examples are numbered from 0 in the order of the dataset.

    $ persample query scans/mine top                        # the examples whose labels are probably wrong
    $ persample query scans/mine top --by norm              # the examples with the largest gradients
    $ persample query scans/mine rankings                   # how much other rankings agree with that of top
    $ persample query scans/mine neighbours 17              # the examples with gradients most similar to example 17
    $ persample query scans/mine duplicates                 # groups of examples with the same gradient
    $ persample query scans/mine issues                     # how many examples have which issue; issues dark lists them
    $ persample query scans/mine outliers                   # the examples with the most unusual gradients
    $ persample query scans/mine self-influence             # the examples with the most influence on their own loss

The examples that support or oppose the predictions for a batch:

    $ persample query scans/mine influence my_model:test --module my_model:to_scan

The tokens of a text of a scan with --text that are behind its gradient, and their losses:

    $ persample query scans/reviews tokens 17 --module my_model:net

For `influence`, the first function takes no arguments and returns a batch for the loss. The function of --module is the
function of the scan; it is called again for the model and the loss. --measure names a function of the model and the
batch that returns one number per sample, to ask for the examples that lower this number instead of the loss.
"""

_EXIT_CODES = {0: "answered", 2: "wrong arguments, or no finished scan", 3: "the model is refused (influence)"}

# For the questions that take a subject: the kind of subject.
_SUBJECTS = {
    "neighbours": "the number of an example",
    "influence": "a module:function that returns a batch",
    "tokens": "the number of an example",
    "issues": "nothing, or a type of issue",
}

Rows = list[dict[str, Any]]


def _add_arguments(parser: ArgumentParser) -> None:
    add_directory_arguments(parser, "for the model and the loss of influence")
    parser.add_argument("question", choices=list(_QUESTIONS), help="kind of question")
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="OF",
        help="number of an example (neighbours, tokens), module:function (influence), or an issue (issues)",
    )
    parser.add_argument(
        "-k", type=parse_positive, default=10, metavar="N", help="number of results to print (default: 10)"
    )
    parser.add_argument("--by", metavar="COLUMN", help="column or score that ranks top (default: mean_loss or loss)")
    parser.add_argument(
        "--tolerance", type=float, default=0.1, metavar="T", help="allowed distance of duplicates (default: 0.1)"
    )
    parser.add_argument(
        "--method",
        choices=["whitened", "trak", "tracin", "cosine"],
        default="whitened",
        help="method of influence and self-influence (default: whitened)",
    )
    parser.add_argument(
        "--damping",
        type=_parse_damping,
        default="auto",
        metavar="D",
        help="damping of whitened, trak and outliers, relative to the mean eigenvalue, or auto (default: auto)",
    )
    parser.add_argument("--measure", metavar="module:function", help="function of model and batch instead of the loss")
    parser.add_argument(
        "--parameters", nargs="+", metavar="PATTERN", help="only these parameters of influence, such as 'head.*'"
    )


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.directory):
        if args.question != "issues" and (args.subject is None) == (args.question in _SUBJECTS):
            raise UsageError(f"{args.question} takes {_SUBJECTS.get(args.question, 'no subject')}")
        rows = _QUESTIONS[args.question](args, scanning.Scan(args.directory))
    print(format_json(rows) if args.json else _format_result(rows))
    return 0


def _find_top(args: Namespace, scan: Scan) -> Rows:
    by = args.by or scan.default_ranking
    return _make_rows(scan, scan.ranked(by, args.k), str(by))


def _compare_rankings(args: Namespace, scan: Scan) -> Rows:
    return [{"ranking": name, "shared": share} for name, share in scan.compare_rankings().items()]


def _find_neighbours(args: Namespace, scan: Scan) -> Rows:
    return _make_rows(scan, scan.neighbours(_parse_example(args), args.k), "cosine")


def _parse_example(args: Namespace) -> int:
    """The number of an example in the arguments."""
    if not args.subject.isdecimal():
        raise UsageError(f"{args.question} takes {_SUBJECTS[args.question]}, got '{args.subject}'")
    return int(args.subject)


def _find_outliers(args: Namespace, scan: Scan) -> Rows:
    return _make_rows(scan, scan.outliers(args.k, args.damping), "leverage")


def _find_self_influence(args: Namespace, scan: Scan) -> Rows:
    return _make_rows(scan, scan.self_influence(args.method, args.k, args.damping), "self-influence")


def _find_duplicates(args: Namespace, scan: Scan) -> Rows:
    groups = scan.duplicates(args.tolerance, progress=True)
    return [{"size": len(group), "examples": group} for group in groups[: args.k]]


def _find_issues(args: Namespace, scan: Scan) -> Rows:
    with ExitStack() as stack:
        contents = load_contents(args, import_scanning(), stack)
        found = contents.scan.find_issues(contents.data)
    if contents.note:
        print(f"persample query: issues of the inputs were not looked for: {contents.note}", file=sys.stderr)
    if args.subject is None:
        return found.summary()
    if (issue := found.get(args.subject)) is None:
        raise UsageError(f"there is no issue '{args.subject}'; it has {', '.join(found)}")
    known = zip(ids := issue.worst[: args.k], contents.scan.describe(ids), strict=True)
    return [{"example": i, "score": float(issue.scores[i]), **_select(example)} for i, example in known]


def _find_influence(args: Namespace, found: Scan) -> Rows:
    origin = read_origin(found)
    if origin is None:
        raise UsageError(
            f"{args.directory} was scanned from Python, so its model is unknown here: use persample.Scan(...) in Python"
        )
    if not args.module:
        raise UsageError(
            "influence calls the function of the scan again for the model and the loss. If you trust it, add --module "
            f"{origin['target']!r}"
        )
    with explain_folder(origin):
        model, loss_fn = load_model_and_loss({**origin, "target": args.module})
    batch = call_target(args.subject)
    scan = type(found)(found.store, model, loss_fn, origin["checkpoints"])
    patterns = args.parameters
    answer = scan.influence(
        batch,
        args.k,
        args.method,
        damping=args.damping,
        measure=load_function(args.measure, ["model", "batch"]) if args.measure else None,
        parameters=patterns and (lambda name, _: any(fnmatchcase(name, pattern) for pattern in patterns)),
    )
    rows: Rows = answer.list_rows()
    return rows


def _find_tokens(args: Namespace, found: Scan) -> Rows:
    i = _parse_example(args)
    found.describe([i])  # raises if there is no such example
    if not args.module:
        raise UsageError("tokens calls the function of the scan again for the model: add --module module:function")
    task = load_scanned_task(found, args.module)
    if task.marker is None:
        raise UsageError("tokens needs a scan of texts, with a saved tokenizer that knows where its tokens are")
    with type(found)(found.store, task.model, task.loss_fn, task.origin["checkpoints"]).load_model():
        tokens = task.marker.measure(task.data[i])
    if tokens.reason:
        print(f"persample query: no parts of the gradient: {tokens.reason}", file=sys.stderr)
    names = {"token_gradient": "gradient", "token_loss": "loss"}
    values = {names[kind]: column.tolist() for kind, column in tokens.values.items()}
    rows: Rows = [
        {
            "token": tokens.text[start:end],
            "start": start,
            **{name: column[t] if math.isfinite(column[t]) else None for name, column in values.items()},
        }
        for t, (start, end) in enumerate(tokens.places)
    ]
    by = next(iter(values), "start")
    return sorted(rows, key=lambda row: -math.inf if row[by] is None else row[by], reverse=True)[: args.k]


_QUESTIONS: dict[str, Callable[[Namespace, Scan], Rows]] = {
    "top": _find_top,
    "neighbours": _find_neighbours,
    "duplicates": _find_duplicates,
    "outliers": _find_outliers,
    "self-influence": _find_self_influence,
    "rankings": _compare_rankings,
    "issues": _find_issues,
    "influence": _find_influence,
    "tokens": _find_tokens,
}


def _parse_damping(text: str) -> float | str:
    """Parse a positive number or 'auto'."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if text != "auto" and not 0 < number < math.inf:
        raise ArgumentTypeError(f"expected a positive number or 'auto', got '{text}'")
    return text if text == "auto" else number


def _make_rows(scan: Scan, found: Any, score: str) -> Rows:
    ids = found.ids.tolist()
    rows = zip(ids, found.scores.tolist(), scan.describe(ids), strict=True)
    texts = {i: {"text": text} for i, text in quote_texts(find_texts(scan), ids).items()}
    return [{"example": i, score: value, **_select(example), **texts.get(i, {})} for i, value, example in rows]


def _select(example: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in example.items() if name in _SHOWN}


_SHOWN = ("name", "label", "predicted", "probability", "suggested", "prediction", "target")


def _format_result(answer: Rows) -> str:
    """A table with a line for each entry."""
    if not answer:
        return "none"
    header = list(answer[0])
    rows = [[_format_cell(value) for value in entry.values()] for entry in answer]
    return format_table(rows, header, right=range(len(header)))


def _format_cell(value: Any) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return format_values(value)
    if isinstance(value, list):
        return " ".join(map(str, value[:12])) + (" ..." if len(value) > 12 else "")
    if value is None:
        return ""
    return format_number(value) if isinstance(value, float) else str(value)


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
