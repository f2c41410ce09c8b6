"""Batches of bins in turn, and the order in which steps must take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from persample.private.errors import PrivateTrainingError


class Turns:
    """Refuses a step whose batch was drawn for another step.

    A strategy of correlated noise assumes that batches with one sample are a number of steps apart. The sampler draws
    for the steps from the next one on when a loop begins; so a batch that is left out would move later ones.

    Args:
        count_steps: returns the number of steps so far.
    """

    def __init__(self, count_steps: Callable[[], int]) -> None:
        self.count_steps = count_steps
        self.taken = 0  # steps for which a batch was handed out

    def check_step(self) -> None:
        """Raise if no batch was handed out for the next step."""
        if self.taken != self.count_steps() + 1:
            raise PrivateTrainingError(
                "No batch of the loader was handed out for this step. With correlated noise, each step takes the next "
                "batch of the loader that make_private returned, also if the batch is empty."
            )


class Turn:
    """The place of a loop among the steps: one for each loop over the loader."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._position = turns, turns.count_steps()

    def take(self) -> None:
        """Note that the loop hands out its next batch; raise if that batch is not for the next step."""
        if self._position != self._turns.count_steps():
            raise PrivateTrainingError(
                f"The batch was drawn for step {self._position}, and the next step is {self._turns.count_steps()}. "
                "With correlated noise, call step() once for each batch of the loader, before the next one is taken, "
                "and run one loop over the loader at a time. To go on after an error, begin a new loop."
            )
        self._position += 1
        self._turns.taken = self._position


class CyclicSampler:
    """Poisson samples of bins: step t takes each example of bin `t % bins` with the rate `bins / batches`.

    The bin of each example is drawn once, from a seed. With as many bins as batches it is "balls in bins": each example
    is in one batch of each epoch.

    Args:
        count: the number of examples.
        bins: the number of bins.
        batches: the number of batches of an epoch.
        count_steps: returns the number of steps so far.
        seed: seed of the bins.
        generator: generator of the batches.
        rank: the number of this process, which draws from its own share of the examples.
        processes: the number of processes.

    >>> sampler = CyclicSampler(6, bins=2, batches=2, count_steps=lambda: 0, seed=0)
    >>> sorted(sum(sampler, []))
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        count: int,
        *,
        bins: int,
        batches: int,
        count_steps: Callable[[], int],
        seed: int,
        generator: torch.Generator | None = None,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        if bins > batches:
            raise PrivateTrainingError(
                f"The strategy has a separation of {bins} steps, and an epoch has {batches} batches: the batches of a "
                "bin could not have their expected size. Use a smaller separation, or smaller batches."
            )
        self.count, self.bins, self.seed = count, bins, seed
        self.rate = bins / batches
        self._batches, self._count_steps, self._generator = batches, count_steps, generator
        self._share = slice(rank, None, processes)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw(self._count_steps())  # at once, not with the first batch

    def _draw(self, start: int) -> Iterator[list[int]]:
        found = torch.randint(self.bins, (self.count,), generator=torch.Generator().manual_seed(self.seed))
        own = torch.arange(self.count)[self._share]
        members = [own[found[own] == i] for i in range(self.bins)]
        for step in range(start, start + len(self)):
            examples = members[step % self.bins]
            taken = torch.rand(len(examples), generator=self._generator) < self.rate
            yield examples[taken].tolist()
