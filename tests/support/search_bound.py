"""Search for a sample above the bound of private training: `python -m tests.support.search_bound 2000`."""

from __future__ import annotations

import random
import sys
import warnings

from tests.support.bound import DTYPES, LOSSES, MODELS, OPTIONS, measure_change


def main(tries: int, seed: int = 0) -> None:
    """Print every change above the bound, and the largest one for each dtype."""
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    largest: dict[str, tuple[float, str]] = {}
    for _ in range(tries):
        names = [rng.choice(list(options)) for options in (MODELS, LOSSES, OPTIONS, DTYPES)]
        model, loss, options, dtype = names
        sizes = {
            "scale": 10 ** rng.uniform(-3, 10 if rng.random() < 0.2 else 3),
            "target": 10 ** rng.uniform(-2, 20 if rng.random() < 0.2 else 8),
            "repeat": rng.choice([0.0, 10 ** rng.uniform(-7, 0)]),
        }
        number, others = rng.randrange(10**6), rng.choice([0, 3])
        change = measure_change(model, loss, options, dtype, number, others=others, **sizes)
        found = f"{names}, seed {number}, {others} others, {sizes}"
        if not change <= 1 + 1e-4:
            print("above the bound:", change, found)
        if not change <= largest.get(dtype, (0.0, ""))[0]:
            largest[dtype] = (change, found)
    for dtype, (change, found) in largest.items():
        print(f"{dtype}: at most {change:.7f} of the bound: {found}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
