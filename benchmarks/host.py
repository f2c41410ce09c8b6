"""Host time of the clipped sum, as a ratio to a plain step: `python -m benchmarks.host`.

The tensors are so small that only Python and the launch of kernels count: what a GPU would wait for. One thread.
Plain and recorded steps take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
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


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "MLP": make_mlp,
    "ResNet, 66 parameters": make_resnet,
    "GPT, 12 layers": make_gpt,
}


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


def measure(name: str, rounds: int) -> dict[str, float | str]:
    """The ratio of a recorded to a plain step, and the time of a plain step."""
    run_plain, run_recorded = make_steps(name)
    for step in (run_plain, run_recorded) * 3:
        step()
    gc.collect()
    gc.disable()
    try:
        plain, ratios = [], []
        for _ in range(rounds):
            plain.append(_time_steps(run_plain))
            ratios.append(_time_steps(run_recorded) / plain[-1])
    finally:
        gc.enable()
    low, median, high = compute_quartiles(ratios)
    return {
        "ratio": round(median, 2),
        "quartiles": f"{low:.2f} {high:.2f}",
        "plain, ms": round(1000 * compute_quartiles(plain)[1], 2),
    }


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
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {name: measure(name, options.rounds) for name in MODELS}
    print(json.dumps(result, indent=1))
    if options.write:
        write_json(RESULT, {**result, "rounds": options.rounds, "torch": torch.__version__, "threads": 1})


if __name__ == "__main__":
    main()
