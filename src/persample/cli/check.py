"""`persample check`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import persample
from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.user_code import add_target_argument, convert_errors, load_model_data_and_loss

_OUTCOME_CODES = {"right": 0, "wrong": 1, "refused": 3, "not compared": 3}

_DESCRIPTION = """\
Compare the per-sample gradients of a model with a loop over a few samples. The report shows for each
parameter which rule computes its gradients, how much memory they take, and whether they are right.

The function takes no arguments and returns a model, a batch and a loss:

    # my_model.py
    def to_check():
        model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
        x, y = torch.randn(32, 20), torch.randint(3, (32,))
        return model, (x, y), nn.CrossEntropyLoss()

    $ persample check my_model:to_check

A loss module, or a loss function of torch.nn.functional, requires the batch (inputs, targets). For any
other batch, the loss is a function of the model and the batch:

        return model, batch, lambda model, batch: model(**batch).loss

A complete example from the repository:

    $ persample check examples/check_model.py:language_model
"""

_EXIT_CODES = {
    0: "right: the gradients equal the gradients of the loop",
    1: "wrong: some gradients differ",
    2: "wrong arguments, or the model fails without persample",
    3: "the model is refused (the message names the place), or there is no loop to compare with",
}


def _add_arguments(parser: ArgumentParser) -> None:
    add_target_argument(parser, "returns (model, batch, loss)")
    parser.add_argument(
        "--samples", type=parse_positive, default=4, metavar="N", help="number of samples to compare (default: 4)"
    )
    parser.add_argument("--batch-dim", type=int, default=0, metavar="D", help="batch dimension (default: 0)")
    parser.add_argument(
        "--batch-size",
        type=parse_positive,
        metavar="B",
        help="samples in the batch (default: size of the batch dimension)",
    )
    parser.add_argument(
        "--loss-reduction", choices=["mean", "sum"], help="reduction over the batch (default: as found)"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="E", help="allowed relative error (default: depends on the number type)"
    )


def _run(args: Namespace) -> int:
    with redirect_user_output(args), convert_errors(args.target, refusal_code=2):
        model, batch, loss_fn = load_model_data_and_loss(args.target, "batch")
        options = ("samples", "batch_dim", "batch_size", "loss_reduction", "tolerance")
        report = persample.check(model, batch, loss_fn, **{name: getattr(args, name) for name in options})
    print(format_json(report.to_dict()) if args.json else report)
    return _OUTCOME_CODES[report.outcome]


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
