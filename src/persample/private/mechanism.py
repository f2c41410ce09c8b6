"""Correlated noise with its batches and its accounting, made together so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from persample.private.correlated import make_noise
from persample.private.errors import PrivateTrainingError
from persample.private.sampling import CyclicSampler
from persample.private.strategies import Strategy
from persample.private.turns import Turns

_STATE = "persample_correlated"


class CorrelatedMechanism:
    """The noise of a strategy, the sampler of its bins, and what the accountant counts.

    With a banded matrix C, the steps of each bin are DP-SGD on the samples of the bin: an entry with the sample rate of
    the bin for each cycle over the bins. With any other C, all steps are one Gaussian mechanism with the sensitivity of
    C: one entry, before the first step.

    Attributes:
        noise: the source of the noise; its number of draws is the number of steps.
        turns: the order in which steps take batches.
        rate: the sample rate of an entry.
        scale: what the noise multiplier is multiplied by: the sensitivity of what an entry counts.
        limit: called before a step that has an entry; raises if the step is not allowed.
    """

    def __init__(self, strategy: Strategy, make_sampler: Callable[..., CyclicSampler]) -> None:
        self.strategy = strategy
        self.noise = make_noise(strategy)
        self.turns = Turns(lambda: self.noise.draws)
        self.sampler = make_sampler(bins=strategy.separation, count_steps=self.turns.count_steps)
        self.rate = strategy.get_entry_rate(1 / len(self.sampler))
        self.scale = strategy.column_norm if strategy.is_amplified else strategy.sensitivity
        self.limit: Callable[[Any, float], None] | None = None
        self._noise_multiplier: float | None = None
        self._counted = 0  # entries of the steps so far

    def _is_due(self, steps: int) -> bool:
        """Whether the first steps have an entry that is not counted, also if their draw or its counting has failed."""
        return self.strategy.count_entries(steps) > self._counted

    def check(self, optimizer: Any, noise_multiplier: float) -> None:
        """Raise if the next step is not one that the strategy was made for."""
        step = self.noise.draws
        self.turns.check_step()
        if step >= self.strategy.steps:
            raise PrivateTrainingError(
                f"The strategy of the correlated noise was made for {self.strategy.steps} steps, and all are made."
            )
        if self._noise_multiplier not in (None, noise_multiplier):
            raise PrivateTrainingError(
                f"The noise multiplier was {self._noise_multiplier} and is now {noise_multiplier}. With correlated "
                "noise it is the same in all steps, because each step takes back noise of earlier ones."
            )
        if self.limit is not None and self._is_due(step + 1):
            self.limit(optimizer, noise_multiplier)
        self._noise_multiplier = noise_multiplier

    def make_hook(self, accountant: Any) -> Callable[[Any], None]:
        """The hook that counts a step after its noise was drawn."""

        def count(optimizer: Any) -> None:
            while self._is_due(self.noise.draws):
                accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=self.rate)
                self._counted += 1

        return count

    def compute_growth(self) -> float:
        """The deviation of the noise of the last step, relative to its part that was new."""
        weights = self.strategy.noise_coefficients[: self.noise.draws]
        return float((weights**2).sum() ** 0.5)

    def describe(self) -> dict[str, str]:
        """The mechanism and the sampler in words."""
        strategy, bins = self.strategy, self.strategy.separation
        name = f"Gaussian mechanism with correlated noise ({strategy.name}, {strategy})"
        counted = (
            f"the steps of each of {bins} bins are counted as DP-SGD on that bin"
            if strategy.is_amplified
            else f"all {strategy.steps} steps are counted as one Gaussian mechanism on all data"
        )
        return {
            "mechanism": f"{name}; {counted}",
            "sampler": f"each unit is in one of {bins} bins, drawn once; step t is a Poisson sample of bin t % {bins} "
            f"with the rate {self.sampler.rate:.6g}",
            "noise": f"noise multiplier times the bound times {self.scale:.6g}, in each real coordinate of the sum, "
            "minus parts of the noise of earlier steps",
        }

    # ---- checkpoints ----

    def get_state(self, noise_multiplier: float) -> dict[str, Any]:
        """Entries of a checkpoint. They are secret: they determine the noise of the steps so far."""
        made = self._describe_made(noise_multiplier)
        return {_STATE: {"noise": self.noise.get_state(), "bins": self.sampler.seed, "made": made}}

    def _describe_made(self, noise_multiplier: float) -> str:
        sampler = f"{self.sampler.count} examples, sample rate {self.sampler.rate / self.sampler.bins}"
        return f"{self.strategy}, noise multiplier {noise_multiplier}, {sampler}"

    def set_state(self, checkpoint: dict[str, Any], noise_multiplier: float) -> None:
        """Continue where `get_state` was called, with a new key for further steps; take out the state."""
        state = checkpoint.pop(_STATE, None)
        if state is None:
            raise PrivateTrainingError("The checkpoint has no state of correlated noise: it is of another training.")
        if self.noise.draws:
            raise PrivateTrainingError(
                "This optimizer has made steps since, or before, the checkpoint. Their correlated noise would be used "
                "twice. Load the checkpoint into a new optimizer, and release nothing of the steps after it."
            )
        made = self._describe_made(noise_multiplier)
        if state["made"] != made:
            raise PrivateTrainingError(
                f"The checkpoint is of a training with {state['made']}, and this one has {made}."
            )
        self._noise_multiplier = noise_multiplier
        self.noise.set_state(state["noise"])
        self._counted = self.strategy.count_entries(self.noise.draws)
        self.noise.mix()
        self.sampler.seed = str(state["bins"])
