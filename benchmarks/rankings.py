"""Which ranking finds wrong labels? Flips labels of data made here, trains small models, scans them, and scores.

    python -m benchmarks.rankings [--json benchmarks/results/rankings.json] [--peers FOLDER] [--only DATASET ...]

Scores are the AUC of wrong against right labels, and the precision at the true number of wrong labels: of the first n
examples of a ranking, the share that is wrong, where n is the number of wrong labels. The estimated number of wrong
labels is compared with the true number, too. If cleanlab can be imported (from the folder `--peers`, where it was
installed), it ranks beside the scan in some cases: with out-of-sample probabilities of five more trainings, as its
authors advise, and with the probabilities of the scanned model. The cases are saved after each dataset; those that the
file has already are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn import datasets as sk
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json

COUNT = 600  # examples of a dataset
NOISE = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
SEEDS = (0, 1)
TRAININGS = ("learnt", "memorised")
CHECKPOINTS = 4
FOLDS, PEER_NOISE = 5, (0.05, 0.2)  # cleanlab ranks in the cases of the first seed with this noise


@dataclass(frozen=True)
class Dataset:
    """Data with true labels, a model for it, and the epochs after which it has learnt the task or memorised labels."""

    make: Callable[[int], tuple[Tensor, Tensor]]
    model: Callable[[int], nn.Module]
    epochs: tuple[int, int]
    rate: float = 3e-3


# ---- data and models ----


def make_digits(seed: int) -> tuple[Tensor, Tensor]:
    """Scans of digits, from scikit-learn."""
    digits = sk.load_digits()
    chosen = np.random.default_rng(seed).permutation(len(digits.target))[:COUNT]
    images = torch.tensor(digits.images[chosen], dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(digits.target[chosen])


def make_shapes(seed: int) -> tuple[Tensor, Tensor]:
    """Circles, squares, triangles and crosses of several sizes and places, with noise."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, COUNT)
    rows, columns = np.mgrid[:16, :16]
    images = np.empty((COUNT, 16, 16))
    for i, label in enumerate(labels):
        y, x, r = generator.uniform(6, 10), generator.uniform(6, 10), generator.uniform(2.5, 5)
        up, across = rows - y, columns - x
        inside = {
            0: up**2 + across**2 <= r**2,
            1: np.maximum(abs(up), abs(across)) <= 0.9 * r,
            2: (abs(across) <= (up + r) / 2) & (up <= r),
            3: np.minimum(abs(up), abs(across)) <= r / 3,
        }[label] & (np.maximum(abs(up), abs(across)) <= r)
        images[i] = inside + generator.normal(0, 0.4, (16, 16))
    return torch.tensor(images, dtype=torch.float32)[:, None], torch.tensor(labels)


def make_cancer(seed: int) -> tuple[Tensor, Tensor]:
    """Measurements of tumours, from scikit-learn."""
    data = sk.load_breast_cancer()
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    order = np.random.default_rng(seed).permutation(len(x))
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(data.target[order])


def make_clusters(seed: int) -> tuple[Tensor, Tensor]:
    """Overlapping clusters of five classes in 20 dimensions."""
    x, y = sk.make_classification(
        COUNT, 20, n_informative=10, n_redundant=4, n_classes=5, class_sep=1.5, random_state=seed
    )
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def make_moons(seed: int) -> tuple[Tensor, Tensor]:
    """Two interleaving half circles that overlap: some true labels cannot be predicted."""
    x, y = sk.make_moons(COUNT, noise=0.25, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def make_topics(seed: int, length: int = 24, topics: int = 4) -> tuple[Tensor, Tensor]:
    """Texts whose words come from a topic with probability 0.35, else from a common vocabulary."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, topics, COUNT)
    common = generator.zipf(1.5, (COUNT, length)).clip(max=100) - 1
    special = 100 + labels[:, None] * 25 + generator.integers(0, 25, (COUNT, length))
    return torch.tensor(np.where(generator.random((COUNT, length)) < 0.35, special, common)), torch.tensor(labels)


def make_orders(seed: int, length: int = 16) -> tuple[Tensor, Tensor]:
    """Texts whose class is the order of words: which of three words comes first."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(3, 60, (COUNT, length))
    labels = np.empty(COUNT, dtype=np.int64)
    for i in range(COUNT):
        places = np.sort(generator.choice(length, 3, replace=False))
        words = generator.permutation(3)
        tokens[i, places] = words
        labels[i] = words[0]
    return torch.tensor(tokens), torch.tensor(labels)


def make_cnn(classes: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveMaxPool2d(2),
        nn.Flatten(), nn.Linear(128, classes),
    )  # fmt: skip


def make_mlp(classes: int, inputs: int = 64, width: int = 128) -> nn.Module:
    """A network with two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


class Transformer(nn.Module):
    """A text classifier: embeddings, one block of attention, the mean over the words."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(200, width), nn.Parameter(torch.randn(32, width) * 0.1)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(self.block(self.words(tokens) + self.places[: tokens.shape[1]]).mean(1))


DATASETS = {
    "digits, CNN": Dataset(make_digits, lambda _: make_cnn(10), (8, 40)),
    "digits, MLP": Dataset(make_digits, lambda _: make_mlp(10), (8, 40)),
    "shapes, CNN": Dataset(make_shapes, lambda _: make_cnn(4), (20, 60)),
    "tumours, MLP": Dataset(make_cancer, lambda _: make_mlp(2, 30), (6, 40)),
    "clusters, MLP": Dataset(make_clusters, lambda _: make_mlp(5, 20), (12, 60)),
    "moons, MLP": Dataset(make_moons, lambda _: make_mlp(2, 2), (20, 60)),
    "topics, transformer": Dataset(make_topics, lambda _: Transformer(4), (5, 30)),
    "word order, transformer": Dataset(make_orders, lambda _: Transformer(3), (25, 60)),
}


def flip_labels(labels: Tensor, share: float, seed: int) -> Tensor:
    """Change the given share of labels to another class: half of them to a random one, half to the next one."""
    classes, generator = int(labels.max()) + 1, torch.Generator().manual_seed(seed + 100)
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, classes, chosen.shape, generator=generator)
    shift[: len(shift) // 2] = 1
    flipped = labels.clone()
    flipped[chosen] = (labels[chosen] + shift) % classes
    return flipped


def train(dataset: Dataset, x: Tensor, y: Tensor, epochs: int, seed: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Train a model; return it with checkpoints at equal distances."""
    torch.manual_seed(seed)
    model, states = dataset.model(seed), []
    optimizer = torch.optim.Adam(model.parameters(), lr=dataset.rate)
    for epoch in range(1, epochs + 1):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        if epoch * CHECKPOINTS // epochs > (epoch - 1) * CHECKPOINTS // epochs:
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    return model, states


# ---- scores ----


def score(values: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """AUC and precision at the true number of a ranking, with `wrong` a mask of the wrong labels."""
    first = np.argsort(-values, kind="stable")[: wrong.sum()]
    return {"auc": float(roc_auc_score(wrong, values)), "precision": float(wrong[first].mean())}


def rank_by_cleanlab(dataset: Dataset, x: Tensor, y: Tensor, epochs: int, seed: int, own: Tensor) -> dict[str, Any]:
    """Scores by cleanlab: with probabilities of five more trainings, and with those of the scanned model."""
    from cleanlab.rank import get_label_quality_scores

    outside = torch.empty(len(x), int(y.max()) + 1)
    for part in torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).chunk(FOLDS):
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[part] = False
        model, _ = train(dataset, x[rest], y[rest], epochs, seed)
        with torch.no_grad():
            outside[part] = model(x[part]).softmax(1)
    return {
        name: 1 - get_label_quality_scores(y.numpy(), probabilities.numpy(), method="normalized_margin")
        for name, probabilities in (("cleanlab, 5 more trainings", outside), ("cleanlab, scanned model", own))
    }


def measure_case(name: str, noise: float, regime: int, seed: int, with_peer: bool) -> dict[str, Any]:
    """All rankings of one case, and the estimated number of wrong labels."""
    dataset = DATASETS[name]
    x, true = dataset.make(seed)
    y = flip_labels(true, noise, seed)
    epochs = dataset.epochs[regime]
    model, states = train(dataset, x, y, epochs, seed)
    found = persample.scan(
        model, nn.CrossEntropyLoss(), (x, y), checkpoints=states, project=256, progress=False, verify=False,
        quantities=["loss", "norm", "self_influence", "predictions"],
    )  # fmt: skip
    wrong = (y != true).numpy()
    estimate = found.estimate_wrong_labels()
    with torch.no_grad():
        own = model(x).softmax(1)
    case: dict[str, Any] = {
        "dataset": name, "noise": noise, "training": TRAININGS[regime], "seed": seed,
        "accuracy on true labels": float((own.argmax(1) == true).float().mean()),
        "wrong": int(wrong.sum()), "estimate": estimate.count, "interval": [estimate.low, estimate.high],
    }  # fmt: skip
    if wrong.any():
        values = {by: found.scores_by(by) for by in found.rankings}
        if with_peer:
            values |= rank_by_cleanlab(dataset, x, y, epochs, seed, own)
        case["scores"] = {by: score(np.nan_to_num(column, nan=np.inf), wrong) for by, column in values.items()}
    return case


# ---- summary ----


def summarise(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the cases with wrong labels: of all, of each training, noise and dataset; and of the estimates."""
    scored = [case for case in cases if "scores" in case]
    groups = {"all": scored}
    for key in ("training", "noise", "dataset"):
        for case in scored:
            groups.setdefault(f"{key} {case[key]}", []).append(case)
    return {
        "rankings": {group: _average(part) for group, part in groups.items()},
        "estimates": _judge_estimates(cases),
    }


def _average(cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for by, scores in case["scores"].items():
            for key, value in scores.items():
                values[by][key].append(value)
    means = {
        by: {key: round(statistics.mean(found), 3) for key, found in parts.items()} | {"cases": len(parts["auc"])}
        for by, parts in values.items()
    }
    return dict(sorted(means.items(), key=lambda item: -item[1]["precision"]))


def _judge_estimates(cases: list[dict[str, Any]]) -> dict[str, Any]:
    judged: dict[str, Any] = {}
    for noise in NOISE:
        part = [case for case in cases if case["noise"] == noise]
        if part:
            inside = [case["interval"][0] <= case["wrong"] <= case["interval"][1] for case in part]
            sizes = [case["estimate"] / max(1, case["wrong"]) for case in part]
            judged[str(noise)] = {
                "cases": len(part), "true number inside the interval": sum(inside),
                "wrong": round(statistics.mean(case["wrong"] for case in part), 1),
                "mean estimate": round(statistics.mean(case["estimate"] for case in part), 1),
                "largest estimate": max(case["estimate"] for case in part),
                **({"median of estimate / true number": round(statistics.median(sizes), 2)} if noise else {}),
            }  # fmt: skip
    return judged


def measure_dataset(name: str, done: list[dict[str, Any]], has_peer: bool) -> Iterator[dict[str, Any]]:
    """Measure the cases of a dataset that are not done."""
    known = {(case["dataset"], case["noise"], case["training"], case["seed"]) for case in done}
    for noise, regime, seed in itertools.product(NOISE, (0, 1), SEEDS):
        if (name, noise, TRAININGS[regime], seed) in known:
            continue
        case = measure_case(name, noise, regime, seed, has_peer and seed == SEEDS[0] and noise in PEER_NOISE)
        print(_describe(case), flush=True)
        yield case


def _describe(case: dict[str, Any]) -> str:
    best = "".join(f"  {by} {s['precision']:.2f}" for by, s in case.get("scores", {}).items())
    low, high = case["interval"]
    return (
        f"{case['dataset']}, {case['noise']:.0%}, {case['training']}, accuracy {case['accuracy on true labels']:.2f}: "
        f"{case['wrong']} wrong, estimated {case['estimate']} ({low} to {high}){best}"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the comparison, and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "rankings.json")
    parser.add_argument("--peers", help="folder with cleanlab and what it needs")
    parser.add_argument("--only", nargs="+", choices=list(DATASETS), default=list(DATASETS), metavar="DATASET")
    args = parser.parse_args(argv)
    if args.peers:
        sys.path.append(args.peers)
    try:
        import cleanlab  # noqa: F401

        has_peer = True
    except ImportError:
        has_peer = False
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    cases = json.loads(args.json.read_text())["cases"] if args.json.exists() else []
    for name in args.only:
        cases += [_round(case) for case in measure_dataset(name, cases, has_peer)]
        write_json(args.json, {"machine": describe_machine(), **summarise(cases), "cases": cases})


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(part) for key, part in value.items()}
    return round(value, 3) if isinstance(value, float) and math.isfinite(value) else value


if __name__ == "__main__":
    main()
