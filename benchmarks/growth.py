"""Growth of time and memory with the batch, length, width and vocabulary of a small GPT, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from benchmarks.workloads import Workload, make_gpt

START = {"batch": 8, "length": 48, "width": 128, "vocabulary": 1024}
LAYERS = 2

# No length equals the batch size: an engine that confuses the two dimensions must get a wrong result.
AXES: dict[str, tuple[int, ...]] = {
    "batch": (2, 8, 32, 64),
    "length": (16, 48, 144, 432),
    "width": (32, 128, 256, 512),
    "vocabulary": (256, 1024, 4096, 16384),
}
QUICK_AXES = {axis: values[:2] for axis, values in AXES.items()}

TIME_BUDGET = 1.0  # seconds for each engine and point
QUANTITIES = ("clip",)
ENGINES = ("ExpandedWeights", "torch.func", "Opacus hooks", "Opacus ghost", "ours", "ours, 2 passes")


def list_points(axes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, Workload]]:
    """Each axis and value, with the workload of that size."""
    for axis, values in axes.items():
        for value in values:
            yield axis, value, _make_workload(*({**START, axis: value}.values()))


@cache
def _make_workload(batch: int, length: int, width: int, vocabulary: int) -> Workload:
    name = f"GPT d{width} L{LAYERS} T{length} V{vocabulary}, B {batch}"
    return Workload(name, partial(make_gpt, width, LAYERS, length, vocabulary, batch), name)
