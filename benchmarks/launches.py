"""Launches: how many ops a warm step needs, as a ratio to a plain step: `python -m benchmarks.launches`.

An op counts if it is no view and no allocation: a GPU would start a kernel for it, and wait for Python where the
tensors are small.
Numbers that are read from tensors count by themselves, because a GPU stops for them. So do calls of Python functions,
which are the host time on a CPU. Counts are exact and do not depend on the machine: no time is measured.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import persample
from benchmarks.output import RESULTS, write_json

RESULT = RESULTS / "launches.json"
PACKAGE = Path(persample.__file__).parent
WARM_STEPS = 4  # the first ones are audited and verified
READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # start no kernel
_VIEWS = {"_unsafe_view", "_reshape_alias", "squeeze_", "promote_types"}  # as cheap, but torch does not count them


class OpCounter(TorchDispatchMode):
    """Counts the ops that run while it is active, by name; without views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name in _VIEWS or name in _ALLOCATIONS):
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        """The number of ops."""
        return self.ops.total()

    @property
    def reads(self) -> int:
        """The number of ops that read a number, or a shape that depends on numbers."""
        return sum(self.ops[name] for name in READS)


class LanguageModel(nn.Module):
    """GPT-2 as Hugging Face has it; returns the logits."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=16, n_positions=length, n_embd=width, n_layer=12, n_head=2, bos_token_id=0, eos_token_id=0,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


Made = tuple[nn.Module, Tensor, Tensor]


def make_gpt(batch: int, length: int, width: int) -> Made:
    ids = torch.randint(16, (2, batch, length))
    return LanguageModel(width, length), ids[0], ids[1]


def make_cnn(batch: int, size: int, width: int) -> Made:
    """Nine convolutions with group norm."""
    layers: list[nn.Module] = []
    for i in range(9):
        layers += [nn.Conv2d(width if i else 3, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
    return model, torch.randn(batch, 3, size, size), torch.randint(4, (batch,))


def make_mlp(batch: int, width: int) -> Made:
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)]
    return nn.Sequential(*layers), torch.randn(batch, width), torch.randint(4, (batch,))


# Small tensors are joined to larger ones; the larger models have more entries than is joined.
MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": lambda: make_gpt(batch=2, length=4, width=8),
    "GPT-2, larger": lambda: make_gpt(batch=8, length=64, width=48),
    "CNN": lambda: make_cnn(batch=2, size=4, width=8),
    "CNN, larger": lambda: make_cnn(batch=16, size=16, width=16),
    "MLP": lambda: make_mlp(batch=2, width=4),
    "MLP, larger": lambda: make_mlp(batch=256, width=512),
}

# The ratio of launches that is wanted.
BARS = {name: 2.0 if name.startswith("MLP") else 1.5 for name in MODELS}

# What is recorded, and what is asked for.
ANSWERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "norms": ({}, lambda grads: grads.norms()),
    "clip": ({}, lambda grads: grads.clip(1.0)),
    'keep="norms"': ({"keep": "norms"}, lambda grads: grads.norms()),
    'keep="clip"': ({"keep": "clip", "max_norm": 1.0}, lambda grads: grads.clip()),
}


def make_steps(name: str) -> dict[str, Callable[[], None]]:
    """A plain step of a model, and a recorded one for each answer."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()

    def compute_loss() -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def run_plain() -> None:
        model.zero_grad(set_to_none=True)
        compute_loss().backward()

    def make_recorded(options: dict[str, Any], ask: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            with persample.record(model, **options) as grads:
                compute_loss().backward()
            ask(grads)

        return run

    return {"plain": run_plain, **{answer: make_recorded(*asked) for answer, asked in ANSWERS.items()}}


def count_ops(step: Callable[[], None]) -> OpCounter:
    """The ops of a warm step."""
    for _ in range(WARM_STEPS):
        step()
    with OpCounter() as counter:
        step()
    return counter


def count_calls(step: Callable[[], None]) -> dict[str, int]:
    """The calls of functions, of Python and of C, in a step; and those of functions of persample among them."""
    profile = cProfile.Profile()
    profile.runcall(step)
    stats: Any = pstats.Stats(profile)
    own = sum(found[1] for (file, _, _), found in stats.stats.items() if Path(file).is_relative_to(PACKAGE))
    return {"calls": stats.total_calls, "own calls": own}


def measure(name: str) -> dict[str, dict[str, float]]:
    """The counts of a model's steps, with the ratios to the plain one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found: dict[str, dict[str, float]] = {}
        for kind, step in make_steps(name).items():
            counter = count_ops(step)
            found[kind] = {"launches": counter.launches, "reads": counter.reads, **count_calls(step)}
    finally:
        torch.set_num_threads(threads)
    plain = found["plain"]
    for counts in found.values():
        counts["ratio"] = round(counts["launches"] / plain["launches"], 2)
        counts["calls ratio"] = round(counts["calls"] / plain["calls"], 2)
    return found


def describe(result: dict[str, dict[str, dict[str, float]]]) -> str:
    """The counts as a table."""
    lines = [f"{'model':14} {'step':13} {'launches':>8} {'ratio':>6} {'bar':>5} {'reads':>5} {'calls':>7} {'ratio':>6}"]
    for name, steps in result.items():
        for kind, counts in steps.items():
            lines.append(
                f"{name:14} {kind:13} {counts['launches']:8} {counts['ratio']:6} {BARS[name]:5} {counts['reads']:5} "
                f"{counts['calls']:7} {counts['calls ratio']:6}"
            )
    return "\n".join(lines)


def show_ops(name: str) -> str:
    """The ops of each step of a model, the most frequent first."""
    lines = []
    for kind, step in make_steps(name).items():
        ops = count_ops(step).ops.most_common()
        lines.append(f"{kind}: " + ", ".join(f"{op} {count}" for op, count in ops))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only models with TEXT in their name")
    parser.add_argument("--ops", action="store_true", help="show the ops of each step by name")
    parser.add_argument("--write", action="store_true", help=f"write the counts to {RESULT.name}")
    options = parser.parse_args()
    names = [name for name in MODELS if options.only in name]
    result = {name: measure(name) for name in names}
    print(describe(result))
    for name in names if options.ops else ():
        print(f"\n{name}\n{show_ops(name)}")
    if options.write:
        before = json.loads(RESULT.read_text())["models"] if RESULT.exists() else {}
        write_json(RESULT, {"torch": torch.__version__, "models": {**before, **result}})


if __name__ == "__main__":
    main()
