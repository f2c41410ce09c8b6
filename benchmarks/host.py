"""Host time of the clipped sum, as a ratio to a plain step: `python -m benchmarks.host`.

The tensors are so small that only Python and the launch of kernels count: what a GPU would wait for. One thread.
Plain and recorded steps take turns. With `--versions now=src before=OTHER/src`, several versions of persample take
turns, each beside plain steps in its own process. The first is the one whose results are published.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from benchmarks.timing import compute_quartiles
from benchmarks.workloads import GPT

RESULT = RESULTS / "host.json"
STEPS_PER_TIMING = 3


class Bottleneck(nn.Module):
    """Three convolutions with group norm and a skip connection, as in ResNets."""

    def __init__(self, width: int, has_projection: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, size, padding=size // 2, bias=False) for size in (1, 3, 1))
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(3))
        self.skip = nn.Conv2d(width, width, 1) if has_projection else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inside = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            inside = norm(conv(inside))
            inside = F.relu(inside) if i < 2 else inside
        return F.relu(self.skip(x) + inside)


def make_mlp() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.randn(2, 4), torch.randint(4, (2,))


def make_resnet() -> tuple[nn.Module, Tensor, Tensor]:
    """A ResNet with 66 parameters."""
    blocks = [Bottleneck(4, has_projection=i < 4) for i in range(6)]
    stem = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4, bias=False))
    return model, torch.randn(2, 3, 4, 4), torch.randint(4, (2,))


def make_gpt() -> tuple[nn.Module, Tensor, Tensor]:
    ids = torch.randint(16, (2, 2, 4))
    return GPT(8, 12, 4, 16), ids[0], ids[1]


class Logits(nn.Module):
    """The logits of a model of Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids).logits
        return found


def make_hugging_face_gpt() -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 12, "n_head": 2}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    ids = torch.randint(16, (2, 2, 5))
    return Logits(GPT2LMHeadModel(GPT2Config(**sizes, **without, use_cache=False))), ids[0], ids[1]


def make_bert() -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    others = {"intermediate_size": 16, "max_position_embeddings": 8, "num_labels": 3}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**sizes, **others, **without))
    return Logits(model), torch.randint(16, (2, 5)), torch.randint(3, (2,))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "MLP": make_mlp,
    "ResNet, 66 parameters": make_resnet,
    "GPT, 12 layers": make_gpt,
    "Hugging Face GPT-2, 12 layers": make_hugging_face_gpt,
    "Hugging Face BERT, 4 layers": make_bert,
}

ROUNDS_IN_TURN = 7  # of one version, in a process


def make_steps(name: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """A plain and a recorded step of a model."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    model.zero_grad(set_to_none=True)

    def compute_loss() -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def run_plain() -> None:
        model.zero_grad(set_to_none=True)
        compute_loss().backward()

    def run_recorded() -> None:
        with persample.record(model, keep="clip", max_norm=1.0) as grads:
            compute_loss().backward()
        grads.clip()

    return run_plain, run_recorded


# Of each round: the ratio of a recorded to a plain step, and the time of a plain step.
Rounds = list[tuple[float, float]]


def measure(name: str, rounds: int) -> Rounds:
    """Time a model."""
    run_plain, run_recorded = make_steps(name)
    for step in (run_plain, run_recorded) * 3:
        step()
    gc.collect()
    gc.disable()
    try:
        found = []
        for _ in range(rounds):
            plain = _time_steps(run_plain)
            found.append((_time_steps(run_recorded) / plain, plain))
        return found
    finally:
        gc.enable()


def summarise(rounds: Rounds) -> dict[str, float | str]:
    """The median ratio with its quartiles, and the median time of a plain step."""
    ratios, plain = zip(*rounds, strict=True)
    low, median, high = compute_quartiles(ratios)
    quartiles = f"{low:.2f} {high:.2f}"
    return {
        "ratio": round(median, 2),
        "quartiles": quartiles,
        "plain, ms": round(1000 * compute_quartiles(plain)[1], 2),
    }


def compare(versions: dict[str, str], rounds: int) -> dict[str, dict[str, Rounds]]:
    """Time versions of persample in turns: the rounds of each model, by version. `versions` are places of sources."""
    found: dict[str, dict[str, Rounds]] = {version: {name: [] for name in MODELS} for version in versions}
    command = [sys.executable, "-m", "benchmarks.host", "--raw", "--rounds", str(ROUNDS_IN_TURN)]
    for turn in range(-(-rounds // ROUNDS_IN_TURN)):
        for version in [*versions][:: 1 if turn % 2 else -1]:
            environment = {**os.environ, "PYTHONPATH": str(Path(versions[version]).resolve())}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            for name, measured in json.loads(output.splitlines()[-1]).items():
                found[version][name] += measured
    return found


def _time_steps(step: Callable[[], None]) -> float:
    """The processor time of a step: other processes on the machine do not count."""
    start = time.process_time()
    for _ in range(STEPS_PER_TIMING):
        step()
    return (time.process_time() - start) / STEPS_PER_TIMING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    parser.add_argument("--raw", action="store_true", help="print the rounds, for a comparison of versions")
    parser.add_argument(
        "--versions", nargs="*", metavar="NAME=PATH", help="compare versions, by the places of their sources"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any]
    if options.versions:
        found = compare(dict(version.split("=") for version in options.versions), options.rounds)
        tables = {version: {name: summarise(r) for name, r in models.items()} for version, models in found.items()}
        first = next(iter(tables))
        result = {**tables.pop(first), "version": first, "other versions": tables}
    else:
        measured = {name: measure(name, options.rounds) for name in MODELS}
        if options.raw:
            print(json.dumps(measured))
            return
        result = {name: summarise(rounds) for name, rounds in measured.items()}
    print(json.dumps(result, indent=1))
    if options.write:
        write_json(RESULT, {**result, "rounds": options.rounds, "machine": describe_machine()})


if __name__ == "__main__":
    main()
