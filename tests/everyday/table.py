"""The page of the docs that lists the loops, made from their declarations."""

from __future__ import annotations

from tests.everyday import lightning_guides, post_training
from tests.everyday.detection import detection
from tests.everyday.habits import habits
from tests.everyday.hugging_face import tasks
from tests.everyday.loop import ROWS, Loop, Origin
from tests.everyday.objectives import losses
from tests.everyday.pytorch_examples import examples
from tests.support.paths import ROOT

ORIGINS: list[Origin] = [examples, tasks, lightning_guides.guides, post_training.guides, losses, detection, habits]
LOOPS: list[Loop] = [loop for origin in ORIGINS for loop in origin.loops]
PAGE = ROOT / "docs/reference/everyday.md"

INTRODUCTION = """# What works unchanged

{count} training loops as people write them, on tiny random models and data. `tests/everyday` runs each of them
through the front ends that are listed, in float64 and over several steps with batches of different sizes. This page is
made from the declarations there by `python -m tests.everyday --write`.

- **right**: the rows are those of a loop over the samples, each alone, with the random numbers of the batch.
- **right, penalty apart**: the same for the part of the loss that belongs to samples. `grads.shared()` is the gradient
  of the other part, such as a penalty on the weights.
- **share**: the divisor of the loss counts targets, tokens or weights. It is held constant. A row is the batch size
  times the gradient of the sample's share of the loss, and the mean of the rows is the gradient of the batch.
- **contributions**: the samples are coupled, and `coupled="contributions"` was asked for. The rows add up to the
  gradient of the batch; nothing else is promised.
- **refused**: no sample has a loss that is its own, or, in private training, a sample changes the part of another. The
  error names the cause.
- **needs `persample.rows`**: `record` refuses the loop. `persample.rows(losses, model)` takes the vector of losses and
  makes a backward pass for each sample.
"""


def describe_result(loop: Loop, front_end: str) -> str:
    """The cell of a front end: what is expected of it."""
    if front_end not in loop.front_ends:
        return ""
    if loop.get_refusal(front_end):
        return "needs `persample.rows`" if ROWS in loop.front_ends else "refused"
    if loop.contributions:
        return "contributions"
    if loop.count is not None or loop.share is not None:
        return "share"
    return "right" if loop.own is None else "right, penalty apart"


def make_page() -> str:
    """The page: one table for each origin."""
    parts = [INTRODUCTION.format(count=len(LOOPS))]
    front_ends = ("record", "watch", "monitor", "scan", "private", "rows")
    for origin in ORIGINS:
        used = [name for name in front_ends if any(name in loop.front_ends for loop in origin.loops)]
        rows = [[loop.name, *(describe_result(loop, name) for name in used)] for loop in origin.loops]
        table = [["loop", *(f"`{name}`" for name in used)], ["---"] * (len(used) + 1), *rows]
        parts.append(f"## {origin.name}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n")
    return "\n".join(parts)
