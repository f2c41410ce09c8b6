"""Noise for a privacy budget, and a limit of the steps that the budget allows."""

from __future__ import annotations

from typing import Any

from opacus.accountants import IAccountant, create_accountant
from opacus.accountants.utils import MAX_SIGMA, get_noise_multiplier

from persample.errors import PerSampleError

EPSILON_TOLERANCE = 0.01  # of epsilon in the search for the noise, as in Opacus

Steps = tuple[float, float, int]  # noise multiplier, sample rate, number of steps


def compute_epsilon(accountant: IAccountant, delta: float, *more: Steps) -> float:
    """Epsilon of the steps that an accountant has counted, and of further ones."""
    history: list[Steps] = list(accountant.history)
    for noise_multiplier, sample_rate, steps in more:
        if noise_multiplier <= 0:
            return float("inf")
        if history and history[-1][:2] == (noise_multiplier, sample_rate):
            steps += history.pop()[2]
        history.append((noise_multiplier, sample_rate, steps))
    if not history:
        return 0.0
    trial = create_accountant(mechanism=accountant.mechanism())
    trial.history = history
    return float(trial.get_epsilon(delta=delta))


def find_noise_multiplier(
    accountant: IAccountant,
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    tolerance: float = EPSILON_TOLERANCE,
) -> float:
    """Smallest noise multiplier for further steps with which the total stays within the target, up to `tolerance`.

    Steps that the accountant has already counted are part of the total. Without them it is the noise of Opacus.
    """
    if not accountant.history:
        return get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant=accountant.mechanism(),
            epsilon_tolerance=tolerance,
        )
    spent = compute_epsilon(accountant, target_delta)
    if spent >= target_epsilon - tolerance:
        raise PerSampleError(
            f"The privacy budget is spent: the steps so far have epsilon {spent:.3f}, and target_epsilon is "
            f"{target_epsilon}. Use a larger target_epsilon, or a new PrivacyEngine for other data."
        )

    def measure(noise_multiplier: float) -> float:
        return compute_epsilon(accountant, target_delta, (noise_multiplier, sample_rate, steps))

    last = accountant.history[-1][0]  # of a training that is continued
    if accountant.history[-1][1] == sample_rate and 0 <= target_epsilon - measure(last) <= tolerance:
        return last
    if accountant.mechanism() == "gdp":
        raise PerSampleError(
            "The accountant 'gdp' needs the same noise in all steps, so a budget cannot be divided over several "
            "trainings. Use the accountant 'rdp' or 'prv'."
        )
    low, high = 0.0, 10.0
    while (epsilon := measure(high)) > target_epsilon:
        low, high = high, 2 * high
        if high > MAX_SIGMA:
            raise PerSampleError(
                "The privacy budget that is left is too low: the steps so far have epsilon "
                f"{spent:.3f} of {target_epsilon}."
            )
    while target_epsilon - epsilon > tolerance and high - low > 1e-6 * high:
        middle = (low + high) / 2
        if (found := measure(middle)) <= target_epsilon:
            high, epsilon = middle, found
        else:
            low = middle
    return high


class StepLimit:
    """Refuses steps that would exceed a privacy budget. A private optimizer calls it before each step.

    The planned steps are known to fit. Epsilon is computed only for other steps: further ones, or steps with another
    noise multiplier or sample rate, or after steps that were made elsewhere.
    """

    def __init__(
        self,
        accountant: IAccountant,
        *,
        target_epsilon: float,
        target_delta: float,
        sample_rate: float,
        noise_multiplier: float,
        steps: int,
    ) -> None:
        self._accountant = accountant
        self._epsilon = target_epsilon
        self._delta = target_delta
        self._sample_rate = sample_rate
        self._kind = (noise_multiplier, sample_rate)  # of the steps that are known to fit
        self._made = self._count_made()
        self._planned = self._made + steps
        self.allowed = steps

    def __call__(self, optimizer: Any, noise_multiplier: float) -> None:
        """Raise if one more step would exceed the budget."""
        kind = (noise_multiplier, self._sample_rate * optimizer.accumulated_iterations)
        made = self._count_made()
        if kind != self._kind or made != self._made or not self.allowed:
            self._kind, self._made = kind, made
            self.allowed = self._count_allowed(kind)
        if not self.allowed:
            spent = compute_epsilon(self._accountant, self._delta)
            raise PerSampleError(
                f"The privacy budget is spent after {made} steps: epsilon is {spent:.3f}, and with one more step it "
                f"would exceed target_epsilon={self._epsilon}. Plan for more steps (epochs, steps or max_steps), or "
                "end the training here. This step was not made."
            )
        self.allowed -= 1
        self._made += 1

    def _count_made(self) -> int:
        return sum(steps for _, _, steps in self._accountant.history)

    def _count_allowed(self, kind: tuple[float, float]) -> int:
        """A number of further steps of this kind that fit into the budget: the most, or those planned."""
        few, many = 0, max(1, self._planned - self._made)
        if self._fits(kind, many):
            return many
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if self._fits(kind, middle) else (few, middle)
        return few

    def _fits(self, kind: tuple[float, float], steps: int) -> bool:
        return compute_epsilon(self._accountant, self._delta, (*kind, steps)) <= self._epsilon
