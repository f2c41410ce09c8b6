"""Strategy of hypothesis for attempts to exceed the bound of private training."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.support.bound import AUTOCAST, DTYPES, LOSSES, MODELS, OPTIONS, PATTERNS, SIZES, Attempt

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def _powers(low: float, high: float) -> SearchStrategy[float]:
    """Powers of ten with exponents of all sizes: hypothesis prefers round numbers, which round to few digits."""
    return st.integers(0, 2**31).map(lambda number: 10.0 ** (low + (high - low) * (number * _GOLDEN_RATIO % 1)))


def _often(ordinary: SearchStrategy[float], extreme: SearchStrategy[float]) -> SearchStrategy[float]:
    return st.sampled_from([ordinary, ordinary, ordinary, extreme]).flatmap(lambda chosen: chosen)


ATTEMPTS: SearchStrategy[Attempt] = st.builds(
    Attempt,
    model=st.sampled_from(sorted(MODELS)),
    loss=st.sampled_from(sorted(LOSSES)),
    options=st.sampled_from(sorted(OPTIONS)),
    dtype=st.sampled_from([*sorted(DTYPES), AUTOCAST, "float32"]),
    seed=st.integers(0, 10**6),
    scale=_often(_powers(-3, 3), _powers(-30, 25)),
    target=_often(_powers(-2, 8), _powers(-20, 30)),
    repeat=st.one_of(st.just(0.0), _powers(-8, 0)),
    others=st.sampled_from([0, 3]),
    size=st.sampled_from(sorted(SIZES)),
    inputs=st.sampled_from([*PATTERNS, "equal"]),
    targets=st.sampled_from([*PATTERNS, "alternating", "alternating"]),
    bound=_often(st.just(1.0), _powers(-6, 6)),
)
