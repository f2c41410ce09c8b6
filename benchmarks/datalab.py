"""Issues of data beside cleanlab's Datalab: plants wrong labels, outliers and near duplicates, and scores both.

    python -m benchmarks.datalab [--peers FOLDER] [--write]

Each dataset has 5 % wrong labels, 3 % outliers and 5 % copies with small changes. A scan of four checkpoints of one
training finds issues; the copies of images are looked for in the images, too. Datalab gets what its authors advise: the
out-of-sample probabilities of five trainings, and the last features of the first model. Reported are the area under the
ROC curve of the scores, and precision and recall of the flags, as means over the seeds. cleanlab is imported from
`--peers`, a folder where it was installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.rankings import DATASETS, FOLDS, flip_labels, train
from persample._internal.text import format_table

RESULT = RESULTS / "datalab.json"
CHOSEN = ("digits, CNN", "shapes, CNN", "clusters, MLP", "topics, transformer")
SEEDS = (0, 1, 2)
WRONG, OUTLIERS, COPIES = 0.05, 0.03, 0.05
WORDS = (175, 200)  # words that no topic has, for texts that are outliers

Found = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by issue: flags, and scores that are low for bad examples


@dataclass(frozen=True)
class Planted:
    """Data with issues: a mask of the examples for each issue."""

    inputs: Tensor
    labels: Tensor
    masks: Mapping[str, np.ndarray]


def plant(name: str, seed: int) -> Planted:
    """A dataset with issues, each of other examples."""
    x, y = DATASETS[name].make(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(len(x), generator=generator)
    outliers, copied = order[: round(OUTLIERS * len(x))], order[round(OUTLIERS * len(x)) :][: round(COPIES * len(x))]
    x = x.clone()
    x[outliers] = _draw_outliers(x, outliers, generator)
    wrong = flip_labels(y, WRONG, seed)
    wrong[outliers], wrong[copied] = y[outliers], y[copied]
    size = len(x) + len(copied)
    masks = {kind: np.zeros(size, dtype=bool) for kind in ("label", "outlier", "near_duplicate")}
    masks["label"][: len(x)] = (wrong != y).numpy()
    masks["outlier"][outliers.numpy()] = True
    masks["near_duplicate"][copied.numpy()] = masks["near_duplicate"][len(x) :] = True
    inputs = torch.cat([x, _change_slightly(x[copied], generator)])
    return Planted(inputs, torch.cat([wrong, y[copied]]), masks)


def _draw_outliers(x: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs of no class: noise, or words that are rare."""
    shape = (len(chosen), *x.shape[1:])
    if not x.is_floating_point():
        return torch.randint(*WORDS, shape, generator=generator)
    if x.dim() > 2:
        return torch.rand(shape, generator=generator)
    return x.mean(0) + 3 * x.std(0) * torch.randn(shape, generator=generator)


def _change_slightly(x: Tensor, generator: torch.Generator) -> Tensor:
    """Copies with a little noise, or with one other word."""
    if x.is_floating_point():
        return x + 0.02 * x.std() * torch.randn(x.shape, generator=generator)
    changed = x.clone()
    places = torch.randint(x.shape[1], (len(x),), generator=generator)
    changed[torch.arange(len(x)), places] = torch.randint(100, (len(x),), generator=generator)
    return changed


# ---- who finds ----


def find_by_scan(planted: Planted, model: nn.Module, states: Sequence[Any]) -> Found:
    """The issues of a scan of four checkpoints."""
    data = planted.inputs, planted.labels
    options = {"checkpoints": states, "progress": False, "verify": False}
    found = persample.scan(model, nn.CrossEntropyLoss(), data, **options).find_issues(data)
    return {name: (issue.flags, issue.scores) for name, issue in found.items()}


def find_by_datalab(planted: Planted, probabilities: Tensor, features: Tensor) -> Found:
    """The issues of Datalab."""
    from cleanlab import Datalab

    with contextlib.redirect_stdout(io.StringIO()):
        lab = Datalab({"y": planted.labels.numpy()}, label_name="y", verbosity=0)
        lab.find_issues(
            pred_probs=probabilities.numpy(),
            features=features.numpy(),
            issue_types={"label": {}, "outlier": {}, "near_duplicate": {}},
        )
    table = lab.get_issues()
    return {kind: (table[f"is_{kind}_issue"].to_numpy(), table[f"{kind}_score"].to_numpy()) for kind in planted.masks}


def predict_outside(name: str, planted: Planted, epochs: int, seed: int) -> Tensor:
    """The probabilities of each example by a model that was trained without it."""
    x, y = planted.inputs, planted.labels
    outside = torch.empty(len(x), int(y.max()) + 1)
    for part in torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).chunk(FOLDS):
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[part] = False
        model, _ = train(DATASETS[name], x[rest], y[rest], epochs, seed)
        with torch.no_grad():
            outside[part] = model(x[part]).softmax(1)
    return outside


def compute_features(model: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs of the last linear layer."""
    kept: list[Tensor] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        model(inputs)
    hook.remove()
    return kept[0]


# ---- results ----


def judge(found: Found, masks: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """AUC of the scores, precision and recall of the flags, by issue."""
    judged = {}
    for kind, mask in masks.items():
        flags, scores = found[kind]
        hits = int((flags & mask).sum())
        judged[kind] = {
            "auc": float(roc_auc_score(mask, -scores)),
            "precision": hits / max(1, int(flags.sum())),
            "recall": hits / int(mask.sum()),
        }
    return judged


def measure_case(name: str, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """What both find in one dataset, and the seconds that they take, the trainings included."""
    planted, epochs = plant(name, seed), DATASETS[name].epochs[0]
    start = time.process_time()
    model, states = train(DATASETS[name], planted.inputs, planted.labels, epochs, seed)
    trained = time.process_time()
    ours = judge(find_by_scan(planted, model, states), planted.masks)
    scanned = time.process_time()
    probabilities = predict_outside(name, planted, epochs, seed)
    theirs = judge(find_by_datalab(planted, probabilities, compute_features(model, planted.inputs)), planted.masks)
    ours["all"] = {"seconds": scanned - start}
    theirs["all"] = {"seconds": time.process_time() - scanned + trained - start}
    return {"persample": ours, "Datalab": theirs}


def measure(names: Sequence[str]) -> dict[str, Any]:
    """The mean over the seeds for each dataset, and over all."""
    values: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for name in names:
        for seed in SEEDS:
            for who, kinds in measure_case(name, seed).items():
                for kind, numbers in kinds.items():
                    for key, value in numbers.items():
                        values[name, kind, who, key].append(value)
                        values["all", kind, who, key].append(value)
            print(f"{name}, seed {seed}", flush=True)
    results: dict[str, Any] = {}
    for (name, kind, who, key), found in values.items():
        results.setdefault(name, {}).setdefault(kind, {}).setdefault(who, {})[key] = round(statistics.mean(found), 3)
    return results


def main(argv: list[str] | None = None) -> None:
    """Run the comparison, print it, and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="folder with cleanlab and what it needs")
    parser.add_argument("--only", nargs="+", choices=CHOSEN, default=CHOSEN, metavar="DATASET")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args(argv)
    if args.peers:
        sys.path.append(args.peers)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results = measure(args.only)
    rows = [
        [name, kind, who, *(f"{numbers[key]:.2f}" if key in numbers else "" for key in KEYS)]
        for name, kinds in results.items()
        for kind, peers in kinds.items()
        for who, numbers in peers.items()
    ]
    print(format_table(rows, ["dataset", "issue", "", *KEYS], right={3, 4, 5, 6}))
    if args.write:
        write_json(RESULT, {"machine": describe_machine(), "seeds": len(SEEDS), "results": results})


KEYS = ("auc", "precision", "recall", "seconds")

if __name__ == "__main__":
    main()
