"""`persample demo`: find wrong labels in the digits of scikit-learn."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.text import format_table
from persample.cli.command import Command, format_json, redirect_user_output
from persample.cli.task import convert_scan_errors, import_scanning
from persample.cli.user_code import UsageError

_DESCRIPTION = """\
Flip 5 % of the labels of the digits of scikit-learn, train a small convolutional net on them, scan the images
with checkpoints of the training, and count how many flipped labels the scan finds. Writes a report.

    $ persample demo --out demo
"""

_EXIT_CODES = {0: "done", 2: "wrong arguments, or scikit-learn is missing", 4: "the disk is full"}

FLIPPED = 0.05  # fraction of the labels
INSPECTED = 0.10  # fraction of the images that a user would look at, from the top of a ranking
EPOCHS, EPOCHS_PER_CHECKPOINT = 12, 3
BEST = "mean_loss"  # the default ranking
SCORES = {
    BEST: "mean loss of the checkpoints",
    "self_influence": "squared gradient norm, summed over the checkpoints",
    "norm": "gradient norm of the trained net",
    "loss": "loss of the trained net: the usual baseline",
}


@dataclass(frozen=True)
class FlippedDigits:
    """Images with labels, some of which were flipped; `true` holds the original labels."""

    images: Tensor
    labels: Tensor
    true: Tensor

    @property
    def ids(self) -> list[int]:
        """Indices of the images with flipped labels."""
        return (self.labels != self.true).nonzero().flatten().tolist()


def load_flipped_digits(seed: int = 0, part: float = FLIPPED) -> FlippedDigits:
    """Load the 1797 images, shape (N, 1, 8, 8) in [0, 1], and flip a part of the labels to other classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the demo needs scikit-learn: pip install 'persample[demo]'") from error
    digits = load_digits()
    true = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(true), generator=generator)[: round(part * len(true))]
    labels = true.clone()
    labels[chosen] = (true[chosen] + torch.randint(1, 10, chosen.shape, generator=generator)) % 10
    return FlippedDigits(torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, labels, true)


def make_net() -> nn.Module:
    """Two convolutions with group norm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, images: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    """Train a model; return the state dicts of its checkpoints."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    checkpoints = []
    for epoch in range(1, EPOCHS + 1):
        for index in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
        if epoch % EPOCHS_PER_CHECKPOINT == 0:
            checkpoints.append({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.zero_grad()
    return checkpoints


def score_ranking(ranked: list[int], wrong: list[int]) -> dict[str, float]:
    """Precision and recall of the first tenth of a ranking, and recall of its first `len(wrong)` entries.

    >>> score_ranking([7, 3, 1, 0, 2, 4, 5, 6, 8, 9], wrong=[7, 2])
    {'recall_in_top_tenth': 0.5, 'precision_in_top_tenth': 1.0, 'recall_in_as_many': 0.5}
    """
    tenth, shortest = set(ranked[: round(INSPECTED * len(ranked))]), set(ranked[: len(wrong)])
    hits = len(tenth & set(wrong))
    return {
        "recall_in_top_tenth": hits / len(wrong),
        "precision_in_top_tenth": hits / len(tenth),
        "recall_in_as_many": len(shortest & set(wrong)) / len(wrong),
    }


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="demo", metavar="DIR", help="directory of the scan and its report (default: demo)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of flips and training (default: 0)")


def _run(args: Namespace) -> int:
    scanning = import_scanning()
    with redirect_user_output(args), convert_scan_errors("demo"):
        answer = _run_demo(args, scanning)
    if args.json:
        print(format_json(answer))
    return 0


def _run_demo(args: Namespace, scanning: Any) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    data, model, start = load_flipped_digits(args.seed), make_net(), time.perf_counter()
    print(f"{len(data.images)} digits, {len(data.ids)} of them with a wrong label")
    checkpoints = train(model, data.images, data.labels)
    with torch.no_grad():
        accuracy = float((model(data.images).argmax(1) == data.true).float().mean())
    seconds = time.perf_counter() - start
    print(f"trained for {EPOCHS} epochs in {seconds:.0f} s: accuracy {accuracy:.1%} on the true labels")

    start = time.perf_counter()
    found = scanning.scan(
        model, nn.CrossEntropyLoss(), (data.images, data.labels), out=args.out, checkpoints=checkpoints, resume=False
    )
    print(f"scanned with {len(checkpoints)} checkpoints in {time.perf_counter() - start:.0f} s")

    scores = {name: score_ranking(found.ranked(name).ids.tolist(), data.ids) for name in SCORES}
    print(_format_scores(scores, len(data.ids)))
    print(f"estimated number of wrong labels: {found.estimate_wrong_labels()}")
    best, loss = ([f"{part:.0%}" for part in scores[name].values()] for name in (BEST, "loss"))
    path = found.report(
        data=(data.images, data.labels),
        title="Digits with flipped labels",
        notes={i: f"label flipped by the demo: it is a {int(data.true[i])}" for i in data.ids},
        remarks=[
            f"The demo flipped {len(data.ids)} labels. Ranked by {BEST}, {best[0]} of them are in the first tenth of "
            f"the images, and {best[2]} in the first {len(data.ids)} images. Ranked by the loss of the trained net, "
            f"the numbers are {loss[0]} and {loss[2]}."
        ],
    )
    print(f"\nreport      {path.resolve()}")
    print(f"next query  persample query {args.out} neighbours {int(found.ranked(BEST, 1).ids)}")
    return {"flipped": len(data.ids), "scores": scores, "report": str(Path(path).resolve())}


def _format_scores(scores: dict[str, dict[str, float]], flips: int) -> str:
    header = [f"of the {flips} flips, found in", "the first tenth", f"the first {flips}", ""]
    keys = ("recall_in_top_tenth", "recall_in_as_many")
    rows = [
        [f"  ranked by {name}", *(f"{found[key]:.0%}" for key in keys), SCORES[name]] for name, found in scores.items()
    ]
    precision = f"{scores[BEST]['precision_in_top_tenth']:.0%}"
    note = f"({precision} of the first tenth by {BEST} are flips; no ranking could have more than half)"
    return f"\n{format_table(rows, header, right={1, 2})}\n{note}"


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
