"""The one place where a way to compute norms is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Way = Literal["ghost", "dense"]
_forced: ContextVar[Way | None] = ContextVar("forced way to compute norms", default=None)


def cheaper_way(positions: int, inputs: int, outputs: int) -> Way:
    """How to get the norm of a sum of `positions` outer products of `inputs` with `outputs` numbers.

    *ghost*: from the positions' inner products on both sides, 2 t² (i + o) operations for each sample. *dense*: by
    making the sum, 2 t i o operations and i o numbers, in blocks. Measured on 2 CPU cores (float32, ms, ghost / dense
    in blocks), with the ratio of operations ghost : dense in brackets:

        batch 16, t 64,   256 x 256    0.7 / 1.1   (0.50)       batch 8,  t 512,  768 x 768     52 / 34   (1.33)
        batch 16, t 64,   256 x 4096   4.7 / 21    (0.27)       batch 8,  t 512,  768 x 3072    94 / 133  (0.83)
        batch 64, t 64,   576 x 128    3.4 / 6.3   (0.61)       batch 4,  t 512,  128 x 1024    14 / 4.2  (4.5)
        batch 8,  t 256,  768 x 768    10 / 19     (0.67)       batch 64, t 1024, 27 x 32      395 / 2.4  (70)

    The operations decide; on a GPU nothing else was measured, and the same choice is made.
    """
    forced = _forced.get()
    if forced is not None:
        return forced
    return "ghost" if positions * (inputs + outputs) <= inputs * outputs else "dense"


@contextmanager
def forced_way(way: Way) -> Iterator[None]:
    """Computes norms in this way whatever it costs; for tests."""
    token = _forced.set(way)
    try:
        yield
    finally:
        _forced.reset(token)
