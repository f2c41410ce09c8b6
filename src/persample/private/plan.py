"""A private training as one object: sampling, clipping, noise and accounting, made together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from opacus.accountants import create_accountant
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from persample.private.accounting import Steps, make_event
from persample.private.engine import PrivacyEngine
from persample.private.errors import PrivateTrainingError
from persample.private.limit import compute_epsilon, find_noise_multiplier
from persample.private.optimizer import PrivateOptimizer
from persample.private.strategies import Strategy


class PlannedTraining(NamedTuple):
    """What `PrivacyPlan.make_private` returns."""

    module: nn.Module
    optimizer: PrivateOptimizer
    loader: Any
    engine: PrivacyEngine


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Sampling, clipping, noise and accounting of a training, before it sees data.

    All numbers are public: none is read from the data set. `make_private` makes the loader, the optimizer and the
    accountant from the same numbers, and the training cannot leave them: another noise multiplier and further steps are
    refused. Epsilon is known before the first step.

    Attributes:
        steps: the number of steps.
        sample_rate: the probability of each example to be in a batch.
        expected_batch_size: what sums are divided by: the rate times the size of the data set, which may be rounded.
        noise_multiplier: standard deviation of the noise, relative to the bound.
        delta: delta of `epsilon`.
        max_grad_norm: bound of the gradient of a sample.
        accountant: that of `PrivacyEngine`, and with it the neighbouring relation.
        strategy: that of correlated noise, for the same number of steps.

    >>> plan = PrivacyPlan.for_epsilon(3.0, 1e-5, steps=100, data_size=10_000, expected_batch_size=100)
    >>> plan.sample_rate, bool(2.98 < plan.epsilon <= 3.0)
    (0.01, True)
    """

    steps: int
    sample_rate: float
    expected_batch_size: float
    noise_multiplier: float
    delta: float
    max_grad_norm: float | Sequence[float] = 1.0
    accountant: str = "prv"
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1 or not 0 < self.sample_rate <= 1 or not 0 < self.delta < 1:
            raise PrivateTrainingError(
                "A plan needs a positive integer number of steps, a sample_rate above 0 and at most 1, and a delta "
                f"between 0 and 1, got steps={self.steps}, sample_rate={self.sample_rate} and delta={self.delta}."
            )
        if not 0 <= self.noise_multiplier < math.inf or not 0 < self.expected_batch_size < math.inf:
            raise PrivateTrainingError(
                "A plan needs a noise_multiplier of at least 0, and a positive expected_batch_size, both finite, "
                f"got noise_multiplier={self.noise_multiplier} and expected_batch_size={self.expected_batch_size}."
            )
        if self.strategy is not None and self.strategy.steps != self.steps:
            raise PrivateTrainingError(
                f"The strategy is made for {self.strategy.steps} steps, and the plan has {self.steps}."
            )

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        *,
        steps: int,
        expected_batch_size: float,
        sample_rate: float | None = None,
        data_size: int | None = None,
        **others: Any,
    ) -> PrivacyPlan:
        """The plan with the least noise that spends at most (epsilon, delta).

        Args:
            epsilon: epsilon of all steps together.
            delta: its delta.
            steps: the number of steps.
            expected_batch_size: the expected number of examples of a batch.
            sample_rate: the probability of each example to be in a batch; or
            data_size: the size of the data set, if it is public.
            **others: further attributes.
        """
        if (sample_rate is None) == (data_size is None) or data_size == 0:
            raise PrivateTrainingError("Pass either sample_rate or data_size, which must be positive.")
        rate = expected_batch_size / data_size if sample_rate is None else sample_rate  # type: ignore[operator]
        numbers: dict[str, Any] = {
            "steps": steps,
            "sample_rate": rate,
            "expected_batch_size": expected_batch_size,
            "delta": delta,
        }
        draft = cls(noise_multiplier=1.0, **numbers, **others)
        (_, entry_rate, entries), accountant = draft.history[0], create_accountant(mechanism=draft.accountant)
        noise = find_noise_multiplier(
            accountant, target_epsilon=epsilon, target_delta=delta, sample_rate=entry_rate, steps=entries
        )
        return cls(noise_multiplier=noise, **numbers, **others)

    @property
    def history(self) -> list[Steps]:
        """What the accountant will have counted after the last step."""
        rate, entries = self.sample_rate, self.steps
        if self.strategy is not None:
            rate, entries = self.strategy.get_entry_rate(rate), self.strategy.count_entries(entries)
        return [(self.noise_multiplier, rate, entries)]

    @property
    def epsilon(self) -> float:
        """Epsilon of all steps, at `delta`."""
        return compute_epsilon(create_accountant(mechanism=self.accountant), self.delta, *self.history)

    def to_dp_accounting(self) -> Any:
        """All steps as an event of dp-accounting, from which any of its accountants computes epsilon."""
        return make_event(self.history)

    def make_private(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        loader: Callable[..., DataLoader[Any]] = DataLoader,
        **options: Any,
    ) -> PlannedTraining:
        """Make the training of this plan on a data set.

        Args:
            module: the model to train; it stays as it is.
            optimizer: the optimizer to wrap.
            dataset: a data set with one item for each example.
            loader: makes a loader, to give it workers or a collate function: `partial(DataLoader, num_workers=2)`.
            **options: those of `PrivacyEngine.make_private`.
        """
        engine = PrivacyEngine(accountant=self.accountant)
        numbers = {name: value for name, value in vars(self).items() if name not in ("steps", "delta", "accountant")}
        found = engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader(dataset, batch_size=1), **numbers, **options
        )
        private, batches = found[1], found[-1]  # modes of Opacus have a criterion in between
        if not isinstance(private, PrivateOptimizer):
            raise PrivateTrainingError("A plan needs the gradients of persample: leave out grad_sample_mode.")
        check = self._make_check(engine)
        if private.mechanism is None:
            private.check_step = check
        else:
            private.mechanism.limit = check
        return PlannedTraining(module, private, batches, engine)

    def _make_check(self, engine: PrivacyEngine) -> Callable[[Any, float], None]:
        (noise, rate, entries), *_ = self.history

        def check(optimizer: Any, noise_multiplier: float) -> None:
            made = engine.accountant.history
            is_other = any(n != noise or not math.isclose(r, rate, rel_tol=1e-5) for n, r, _ in made)
            if is_other or noise_multiplier != noise:
                raise PrivateTrainingError(
                    f"The plan has noise_multiplier={noise} and the rate {rate} in all steps. This step has "
                    f"{noise_multiplier}, and the steps before have (noise, rate, number) {made}."
                )
            if sum(steps for _, _, steps in made) >= entries:
                raise PrivateTrainingError(f"All {self.steps} steps of the plan are made.")

        return check

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the plan, with its epsilon, for logs and reviews."""
        return {**asdict(self), "strategy": str(self.strategy or "independent noise"), "epsilon": self.epsilon}
