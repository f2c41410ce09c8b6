"""`persample query`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from persample.cli.command import Command, apart, as_json, number, positive
from persample.cli.entry import UsageError, call
from persample.cli.task import COMMAND_FILE, needed, one_line, task_from

_QUERY = """\
Ask a scan. Examples are known by their numbers, from 0, in the order of the dataset.

    $ persample query scans/mine top --by loss              the examples with the largest losses
    $ persample query scans/mine neighbours 17              those that do to the model what example 17 does
    $ persample query scans/mine duplicates                 groups of examples that do the same
    $ persample query scans/mine outliers                   those that do what few others do
    $ persample query scans/mine influence my_model:test    those that push these predictions, for and against

For `influence` the function gives a batch as the loss takes it, and the model is made as it was for the scan.
"""

Answer = list[dict[str, Any]]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the directory of a scan")
    parser.add_argument("question", choices=list(_QUESTIONS), help="what to ask")
    parser.add_argument("subject", nargs="?", metavar="OF", help="neighbours: an example; influence: module:function")
    parser.add_argument("-k", type=positive, default=10, metavar="N", help="how many to tell (10)")
    parser.add_argument("--by", default="self_influence", metavar="COLUMN", help="what top ranks by (self_influence)")
    parser.add_argument("--tolerance", type=float, default=0.1, metavar="T", help="how different duplicates are (0.1)")
    parser.add_argument("--method", choices=["tracin", "whitened"], default="tracin", help="of influence (tracin)")


def _run(args: Namespace) -> int:
    scanning = needed()
    with apart(args), one_line(args.directory):
        if (args.subject is None) == (args.question in ("neighbours", "influence")):
            wanted = {"neighbours": "the number of an example", "influence": "a module:function that gives a batch"}
            raise UsageError(f"{args.question} takes {wanted.get(args.question, 'no subject')}")
        answer = _QUESTIONS[args.question](args, scanning)
    print(as_json(answer) if args.json else _as_text(answer))
    return 0


def _top(args: Namespace, scanning: Any) -> Answer:
    found = scanning.Scan(args.directory).ranked(args.by, args.k)
    return _pairs(found, args.by)


def _neighbours(args: Namespace, scanning: Any) -> Answer:
    if not args.subject.isdecimal():
        raise UsageError(f"neighbours takes the number of an example, got '{args.subject}'")
    return _pairs(scanning.Scan(args.directory).neighbours(int(args.subject), args.k), "cosine")


def _outliers(args: Namespace, scanning: Any) -> Answer:
    return _pairs(scanning.Scan(args.directory).outliers(args.k), "leverage")


def _duplicates(args: Namespace, scanning: Any) -> Answer:
    groups = scanning.Scan(args.directory).duplicates(args.tolerance)
    return [{"size": len(group), "examples": group} for group in groups[: args.k]]


def _influence(args: Namespace, scanning: Any) -> Answer:
    found = scanning.Scan(args.directory)
    if not (found.directory / COMMAND_FILE).is_file():
        raise UsageError(f"{args.directory} does not tell its model, as it was scanned in Python: use Scan(...) there")
    origin = found.store.read_json(COMMAND_FILE)
    task = task_from(origin)
    batch = call(args.subject)
    answer = scanning.Scan(args.directory, task.model, task.loss_fn, origin["checkpoints"]).influence(
        batch, args.k, args.method
    )
    return [
        {"sample": sample, "pushes": way, "example": int(i), "score": float(score)}
        for sample in range(len(answer.for_ids))
        for way, ids, scores in (
            ("for", answer.for_ids, answer.for_scores),
            ("against", answer.against_ids, answer.against_scores),
        )
        for i, score in zip(ids[sample], scores[sample], strict=True)
    ]


_QUESTIONS: dict[str, Callable[[Namespace, Any], Answer]] = {
    "top": _top,
    "neighbours": _neighbours,
    "duplicates": _duplicates,
    "outliers": _outliers,
    "influence": _influence,
}


def _pairs(found: Any, score: str) -> Answer:
    pairs = zip(found.ids.tolist(), found.scores.tolist(), strict=True)
    return [{"example": i, score: value} for i, value in pairs]


def _as_text(answer: Answer) -> str:
    """A table with a line for each entry."""
    if not answer:
        return "none"
    lines = [list(answer[0])] + [[_cell(value) for value in entry.values()] for entry in answer]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value[:12])) + (" ..." if len(value) > 12 else "")
    return number(value) if isinstance(value, float) else str(value)


COMMAND = Command("ask a scan for examples", _QUERY, _arguments, _run)
