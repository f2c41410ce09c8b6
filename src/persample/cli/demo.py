"""`persample demo`: finds wrong labels among scikit-learn's digits."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from persample.cli.command import Command, apart, as_json
from persample.cli.entry import UsageError
from persample.cli.task import needed, one_line

_DEMO = """\
Flip 5 % of the labels of scikit-learn's digits, train a small convolutional net on them, scan the images with
the checkpoints of the training, and see how many of the flips are found. Writes a report.
"""

FLIPPED = 0.05
LOOKED_AT = 0.10  # of the images, the most suspicious ones
EPOCHS, EVERY = 12, 3  # and a checkpoint after every few
BEST = "self_influence"
SCORES = {
    BEST: "gradient norms, squared and summed over the checkpoints",
    "mean_loss": "losses over the checkpoints",
    "norm": "gradient norm of the trained net",
    "loss": "loss of the trained net: the usual baseline",
}


@dataclass(frozen=True)
class Flipped:
    """Images with labels, some of which we changed; `true` are those that were right."""

    images: Tensor
    labels: Tensor
    true: Tensor

    @property
    def ids(self) -> list[int]:
        """The images whose labels are wrong."""
        return (self.labels != self.true).nonzero().flatten().tolist()


def flipped_digits(seed: int = 0, part: float = FLIPPED) -> Flipped:
    """The 1797 images as (N, 1, 8, 8) in [0, 1], with some of their labels changed to another class."""
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
    return Flipped(torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, labels, true)


def small_net() -> nn.Module:
    """Two convolutions with group norm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def trained(model: nn.Module, images: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    """Ordinary training; gives the checkpoints."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    checkpoints = []
    for epoch in range(1, EPOCHS + 1):
        for index in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
        if epoch % EVERY == 0:
            checkpoints.append({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.zero_grad()
    return checkpoints


def found_among(ranked: list[int], wrong: list[int]) -> dict[str, float]:
    """How good a ranking is: of the first ones, how many are wrong (precision), and how many of the wrong (recall).

    >>> found_among([7, 3, 1, 0, 2, 4, 5, 6, 8, 9], wrong=[7, 2])
    {'recall_in_top_tenth': 0.5, 'precision_in_top_tenth': 1.0, 'recall_in_as_many': 0.5}
    """
    first = set(ranked[: round(LOOKED_AT * len(ranked))])
    hits, as_many = len(first & set(wrong)), len(set(ranked[: len(wrong)]) & set(wrong))
    return {
        "recall_in_top_tenth": hits / len(wrong),
        "precision_in_top_tenth": hits / len(first),
        "recall_in_as_many": as_many / len(wrong),
    }


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", default="demo", metavar="DIR", help="the directory of the scan and its report (demo)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the flips and the training (0)")


def _run(args: Namespace) -> int:
    scanning = needed()
    with apart(args), one_line("demo"):
        answer = _shown(args, scanning)
    if args.json:
        print(as_json(answer))
    return 0


def _shown(args: Namespace, scanning: Any) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    data, model, start = flipped_digits(args.seed), small_net(), time.perf_counter()
    print(f"{len(data.images)} digits, {len(data.ids)} of them with a wrong label")
    checkpoints = trained(model, data.images, data.labels)
    with torch.no_grad():
        right = float((model(data.images).argmax(1) == data.true).float().mean())
    print(f"trained for {EPOCHS} epochs in {time.perf_counter() - start:.0f} s: tells {right:.1%} of them right")

    start = time.perf_counter()
    found = scanning.scan(
        model, nn.CrossEntropyLoss(), (data.images, data.labels), out=args.out, checkpoints=checkpoints, resume=False
    )
    print(f"scanned with {len(checkpoints)} checkpoints in {time.perf_counter() - start:.0f} s")

    scores = {name: found_among(found.ranked(name).ids.tolist(), data.ids) for name in SCORES}
    lines = _table(scores, len(data.ids))
    print("\n".join(lines))
    best, loss = ([f"{part:.0%}" for part in scores[name].values()] for name in (BEST, "loss"))
    path = found.report(
        data=(data.images, data.labels),
        title="Digits with flipped labels",
        notes={i: f"flipped by us: it is a {int(data.true[i])}" for i in data.ids},
        remarks=[
            f"We flipped {len(data.ids)} labels. Ranked by {BEST}, {best[0]} of them are in the first tenth of the "
            f"images, and {best[2]} among the first {len(data.ids)}; by the trained net's loss {loss[0]} and {loss[2]}."
        ],
    )
    print(f"\nlook at   {path.resolve()}")
    print(f"ask       persample query {args.out} neighbours {int(found.ranked(BEST, 1).ids)}")
    return {"flipped": len(data.ids), "scores": scores, "report": str(Path(path).resolve())}


def _table(scores: dict[str, dict[str, float]], flips: int) -> list[str]:
    width = max(map(len, scores))
    lines = [f"\nof the {flips} flips, found in{'':{width - 12}}the first tenth  the first {flips}"]
    for name, found in scores.items():
        tenth, as_many = f"{found['recall_in_top_tenth']:.0%}", f"{found['recall_in_as_many']:.0%}"
        lines.append(f"  ranked by {name:{width}}  {tenth:>15}  {as_many:>12}   {SCORES[name]}")
    precision = f"{scores[BEST]['precision_in_top_tenth']:.0%}"
    lines.append(f"({precision} of the first tenth by {BEST} are flips; no ranking could have more than half)")
    return lines


COMMAND = Command("find wrong labels among digits", _DEMO, _arguments, _run)
