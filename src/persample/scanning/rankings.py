"""Rankings of examples: which labels are probably wrong, by several scores.

`benchmarks/rankings.py` compares them on data with known wrong labels, and is the reason for `choose_ranking`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from persample.scanning.errors import ScanError
from persample.scanning.influence import compute_self_influence, load_models
from persample.scanning.store import Array, Store
from persample.scanning.suggestions import compute_confidence
from persample.scanning.table import get_column_names, read_column, read_opinion

_DAMPING = 0.1  # of the mean eigenvalues, as in `benchmarks/results/rankings.json`

# The order of preference of the default ranking, from `benchmarks/results/rankings.json`.
_PREFERRED = ("mean_loss", "loss", "self_influence", "norm")

# Columns in which the smallest value is the most suspicious.
SMALLEST_FIRST = ("alignment", "estimated_alignment", "aum", "confidence", "correctness", "coherence")


@dataclass(frozen=True)
class _Method:
    """A score that is computed from the stored columns or gradients: large for examples that are probably wrong."""

    compute: Callable[[Store], Array]
    is_possible: Callable[[Store], bool]


def _has(*names: str) -> Callable[[Store], bool]:
    return lambda store: set(names) <= set(get_column_names(store))


def _compute_normalised_self_influence(store: Store) -> Array:
    """The squared gradient norm as a multiple of its mean, averaged over the checkpoints.

    No checkpoint outweighs the others, as one with large gradients does in the plain sum.
    """
    squares = [norms**2 for norms in _read_each_checkpoint(store, "norm")]
    return np.mean([square / max(_mean_of_finite(square), np.finfo(np.float64).tiny) for square in squares], axis=0)


def _compute_whitened_self_influence(store: Store) -> Array:
    """The squared length of the projected gradient after whitening with the second moment of all gradients."""
    settings = store.read_settings()
    return compute_self_influence(load_models(store), settings["learning_rates"], "whitened", _DAMPING).numpy()


def _compute_confident(store: Store) -> Array:
    """How much more probable another class is than the given label, each compared with the usual confidence of its
    class, with all checkpoints (confident learning)."""
    found = read_opinion(store)
    assert found is not None
    labels, opinion, _ = found
    confidence = compute_confidence(labels, opinion.given_probability)
    given, other = (_look_up(confidence, classes) for classes in (labels, opinion.other))
    return (opinion.other_probability - other) - (opinion.given_probability - given)


METHODS: Mapping[str, _Method] = {
    "normalised_self_influence": _Method(_compute_normalised_self_influence, _has("self_influence")),
    "whitened_self_influence": _Method(
        _compute_whitened_self_influence,
        lambda store: store.read_settings()["project"] is not None and "coupled" not in store.read_settings(),
    ),
    "confident": _Method(_compute_confident, _has("suggested")),
}


def list_rankings(store: Store, columns: Sequence[str]) -> list[str]:
    """The names that `compute_scores` accepts: measured columns, and methods that the scan has the numbers for."""
    return [*columns, *(name for name, method in METHODS.items() if method.is_possible(store))]


def choose_ranking(names: Sequence[str]) -> str | None:
    """The default ranking: the mean loss over the checkpoints if there are several, else the loss."""
    return next((name for name in (*_PREFERRED, *names) if name in names), None)


def compute_scores(store: Store, name: str, columns: Sequence[str]) -> Array:
    """`(examples,)`: scores that are large for the examples that come first."""
    if name in columns:
        values = read_column(store, name).astype(np.float64)
        return -values if name in SMALLEST_FIRST else values
    possible = list_rankings(store, columns)
    if name not in possible:
        raise ScanError(f"The scan has no column '{name}' to rank by. Choose from {', '.join(possible)}.")
    return METHODS[name].compute(store)


def _read_each_checkpoint(store: Store, name: str) -> list[Array]:
    found = []
    for checkpoint in range(len(store.read_settings()["checkpoints"])):
        shards = range(store.count_shards(checkpoint))
        parts = [store.read_columns(checkpoint, shard, [name])[name] for shard in shards]
        found.append(np.concatenate(parts).astype(np.float64))
    return found


def _mean_of_finite(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0


def _look_up(confidence: Mapping[int, float], classes: Array) -> Array:
    """The confidence of the class of each example; 1 for a class that is nowhere given."""
    found = np.ones(len(classes))
    for label, value in confidence.items():
        found[classes == label] = value
    return found
