"""`persample evaluate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from persample._internal.text import describe_value
from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.task import convert_scan_errors, import_scanning
from persample.cli.user_code import UsageError, add_target_argument, call_target, check_loss

_DESCRIPTION = """\
Measure how well influence scores and rankings work for your model, by training it again and again.

The function takes no arguments and returns a training function, the data, a batch of test samples, and the loss:

    # my_model.py
    def to_evaluate():
        def train(data, seed):
            model = make_model()
            ...                  # train on data, which has the form of the data below
            return model         # or: model, list of checkpoints
        return train, (images, labels), (test_images, test_labels), nn.CrossEntropyLoss()

    $ persample evaluate my_model:to_evaluate --subsets 32

For the linear datamodeling score (LDS), models are trained on random halves of the data: 0 is random, 1 is perfect. For
the area under the ROC curve, a part of the labels is flipped: 0.5 is random, 1 is perfect. A method whose interval
includes random is marked.
"""

_EXIT_CODES = {0: "done", 2: "wrong arguments, or the training fails", 3: "the model is refused"}


def _add_arguments(parser: ArgumentParser) -> None:
    add_target_argument(parser, "returns (train, data, test batch, loss)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="methods of influence (default: all)")
    parser.add_argument(
        "--subsets",
        type=parse_positive,
        default=32,
        metavar="N",
        help="random subsets of the data to train on (default: 32)",
    )
    parser.add_argument(
        "--part", type=float, default=0.5, metavar="P", help="part of the data in a subset (default: 0.5)"
    )
    parser.add_argument(
        "--repeats", type=parse_positive, default=1, metavar="N", help="trainings for each subset (default: 1)"
    )
    parser.add_argument(
        "--models", type=parse_positive, default=1, metavar="N", help="models that are scanned (default: 1)"
    )
    parser.add_argument(
        "--flipped", type=float, default=0.1, metavar="P", help="part of the labels to flip, or 0 (default: 0.1)"
    )
    parser.add_argument(
        "--project", type=parse_positive, default=512, metavar="K", help="size of a projected gradient (default: 512)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of subsets, flips and trainings (default: 0)",
    )
    parser.add_argument("--quiet", action="store_true", help="do not show progress")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors(args.target):
        train, data, test_batch, loss_fn = _load(args.target)
        found = scanning.evaluate(
            train,
            data,
            test_batch,
            loss_fn,
            **({"methods": args.methods} if args.methods else {}),
            subsets=args.subsets,
            part=args.part,
            repeats=args.repeats,
            models=args.models,
            flipped=args.flipped,
            seed=args.seed,
            progress=False if args.quiet else None,
            project=args.project,
        )
    print(format_json(_make_answer(found)) if args.json else repr(found))
    return 0


def _load(target: str) -> tuple[Any, Any, Any, Any]:
    """Call the user's function, which must return (train, data, test_batch, loss_fn)."""
    result = call_target(target)
    if not isinstance(result, (tuple, list)) or len(result) != 4 or not callable(result[0]):
        raise UsageError(
            f"{target} must return (train, data, test_batch, loss_fn) with a function train(data, seed), but returned "
            f"{describe_value(result)}"
        )
    train, data, test_batch, loss_fn = result
    check_loss(target, loss_fn)
    return train, data, test_batch, loss_fn


def _make_answer(found: Any) -> dict[str, Any]:
    return {
        **{
            part: {name: vars(estimate) for name, estimate in getattr(found, part).items()}
            for part in ("lds", "mislabel_auc")
        },
        "ceiling": found.ceiling,
        "seconds": found.seconds,
    }


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
