"""Amount of noise: given directly, or derived from a privacy budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from persample.errors import PerSampleError
from persample.private.engine import PrivacyEngine


@dataclass(frozen=True)
class Budget:
    """Either `noise_multiplier` or `target_epsilon`. `target_delta` belongs to the target and to `spent()`.

    >>> Budget(noise_multiplier=1.0, target_epsilon=3.0)
    Traceback (most recent call last):
    persample.errors.PerSampleError: Pass either noise_multiplier or target_epsilon.
    """

    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_delta: float = 1e-5

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise PerSampleError("Pass either noise_multiplier or target_epsilon.")

    def make_private(self, engine: PrivacyEngine, steps: int, **options: Any) -> Any:
        """Make the private optimizer for a training of `steps` steps from now on, with batches of a trainer."""
        for name in ("sample_rate", "strategy"):
            if options.get(name) is not None:
                raise PerSampleError(
                    f"Trainers draw their batches themselves, so they do not support {name}. Use PrivacyEngine."
                )
        if self.noise_multiplier is not None:
            return engine.make_private(noise_multiplier=self.noise_multiplier, **options)[1]
        assert self.target_epsilon is not None
        return engine.make_private_with_epsilon(
            target_epsilon=self.target_epsilon, target_delta=self.target_delta, steps=steps, **options
        )[1]

    def spent(self, engine: PrivacyEngine) -> float:
        """Epsilon that the steps so far have spent, at `target_delta`."""
        return float(engine.get_epsilon(self.target_delta))
