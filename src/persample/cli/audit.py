"""`persample audit`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample.cli.command import Command, format_json, parse_positive, redirect_user_output
from persample.cli.user_code import UsageError, add_target_argument, convert_errors, load_function

_DESCRIPTION = """\
Test whether a private training does what it claims, and measure how much it reveals about single samples.

Direct tests look at the noise of each step, the change of a step by an outlier, the batches and the accounting.
Then canaries are added to the training, and what they leave behind in the released gradients gives a lower
bound of epsilon, to compare with the claim.

The function takes a run, trains a model privately, and returns the engine:

    # my_training.py
    def train(run):
        model, engine = make_model(), PrivacyEngine()
        loader = DataLoader(run.add_canaries(dataset), batch_size=64)
        model, optimizer, loader = engine.make_private(module=model, ..., data_loader=loader)
        run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.cross_entropy)
        ...                                               # the ordinary loop
        return engine

    $ persample audit my_training:train                                         # one run, 1,000 gradients
    $ persample audit my_training:train --canaries input --runs 300             # 300 runs, one sample

The result says which tests were made, with their p-values, and which were not. Gradient canaries test noise and
accounting. Input canaries, samples of noise with random labels, test clipping as well. A bound below the claim
is no proof of privacy; a failed test or a bound above the claim shows a leak.
"""

_EXIT_CODES = {
    0: "no test has failed, and no bound is above the claim",
    1: "a test has failed, or a bound is above the claim: the training leaks more than it claims",
    2: "wrong arguments, or the training fails",
    3: "the model is refused (the message names the place)",
}


def _add_arguments(parser: ArgumentParser) -> None:
    add_target_argument(parser, "trains privately and returns the engine")
    parser.add_argument(
        "--canaries", choices=["gradient", "input"], default="gradient", help="kind of canaries (default: gradient)"
    )
    parser.add_argument("--count", type=parse_positive, metavar="N", help="canaries in one run (default: 1000 or 100)")
    parser.add_argument(
        "--runs",
        type=parse_positive,
        default=1,
        metavar="N",
        help="1, or runs with and without a canary (default: 1)",
    )
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="delta of epsilon (default: 1e-5)")
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="P",
        help="confidence of the lower bound of epsilon (default: 0.95)",
    )
    parser.add_argument(
        "--false-alarm",
        type=float,
        default=1e-4,
        metavar="P",
        help="probability that the direct tests accuse a right training (default: 1e-4)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of canaries and coins (default: a new one)")
    parser.add_argument("--plot", metavar="FILE", help="write a plot as SVG")


def _run(args: Namespace) -> int:
    try:
        from persample.private import audit
    except ImportError as error:
        raise UsageError(str(error)) from error
    with redirect_user_output(args), convert_errors(args.target):
        train = load_function(args.target, ["run"])
        options = ("canaries", "count", "runs", "delta", "confidence", "false_alarm", "seed")
        result = audit(train, **{name: getattr(args, name) for name in options})
        if args.plot:
            result.plot(args.plot)
    print(format_json(result.to_dict()) if args.json else result)
    return int(result.exceeds)


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
