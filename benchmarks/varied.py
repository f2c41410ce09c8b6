"""The clipped sum with shapes that change in every step, as a ratio to a plain step: `python -m benchmarks.varied`.

A GPT with 4 layers of width 128 on one thread. Three figures: the first step; steps with batch sizes of 6 to 10 and
lengths of 16 to 120, drawn anew each time; and steps with one fixed shape. Plain and recorded steps take turns.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable

import torch
import torch.fx.experimental.symbolic_shapes
import torch.nn.functional as F
from torch import Tensor

import persample
from benchmarks.output import RESULTS, write_json
from benchmarks.timing import compute_quartiles, time_call
from benchmarks.workloads import GPT

RESULT = RESULTS / "varied.json"
VOCABULARY = 1000


def measure_all(rounds: int) -> dict[str, float | str | int]:
    """Measure the three figures."""
    torch.manual_seed(0)
    model = GPT(128, 4, 128, VOCABULARY)
    generator = random.Random(0)

    def compute_loss(ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    def run_plain(ids: Tensor) -> None:
        model.zero_grad()
        compute_loss(ids).backward()

    def run_recorded(ids: Tensor) -> None:
        with persample.record(model, keep="clip", max_norm=1.0) as grads:
            compute_loss(ids).backward()
        grads.clip()

    def measure_ratio(ids: Tensor) -> float:
        plain = time_call(lambda: run_plain(ids))
        return time_call(lambda: run_recorded(ids)) / plain

    def draw(batch: int, length: int) -> Tensor:
        return torch.randint(VOCABULARY, (batch, length))

    def measure_ratios(make: Callable[[], Tensor]) -> tuple[float, float, float]:
        return compute_quartiles([measure_ratio(make()) for _ in range(rounds)])

    fixed = draw(8, 64)
    run_plain(fixed)
    first = measure_ratio(fixed)
    varied = measure_ratios(lambda: draw(generator.randint(6, 10), generator.randint(16, 120)))
    same = measure_ratios(lambda: fixed)
    return {
        "first step": round(first, 2),
        "varied shapes": round(varied[1], 2),
        "varied shapes, quartiles": f"{varied[0]:.2f} {varied[2]:.2f}",
        "fixed shape": round(same[1], 2),
        "fixed shape, quartiles": f"{same[0]:.2f} {same[2]:.2f}",
        "rounds": rounds,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write the results to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure_all(options.rounds)
    print(json.dumps(result, indent=1))
    if options.write:
        write_json(RESULT, result)


if __name__ == "__main__":
    main()
