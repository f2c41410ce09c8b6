"""Poisson sampling with empty batches, in one process or several."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import pairwise
from os import urandom
from typing import Any

import numpy as np
import torch
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from persample.private.errors import PrivateTrainingError
from persample.private.noise import SecretNumbers

_LARGE_PRIME = 2_147_483_647
_STATE_WORDS = 624  # of torch's generator on a CPU, each with 32 bits

# Where batches are drawn from; None: torch's own generator.
Source = SecretNumbers | torch.Generator | None


def draw_numbers(source: Source, count: int) -> Tensor:
    """`(count,)`: uniform numbers from 0 to 1."""
    return source.rand(count) if isinstance(source, SecretNumbers) else torch.rand(count, generator=source)


def renew(source: SecretNumbers | torch.Generator) -> None:
    """Let a source draw other numbers from now on, which nobody can know."""
    if isinstance(source, SecretNumbers):
        source.mix()
        return
    seed = secrets.randbits(63)
    source.manual_seed(seed)
    if source.device.type == "cpu":  # it takes 32 bits of a seed
        state = source.get_state()
        words = state[24 : 24 + 8 * _STATE_WORDS].view(torch.int64)
        assert int(words[0]) == seed & 0xFFFFFFFF, "torch has changed the state of its generator"
        words.copy_(torch.from_numpy(np.frombuffer(urandom(4 * _STATE_WORDS), np.uint32).astype(np.int64)))
        source.set_state(state)


def make_secret_generator() -> torch.Generator:
    """A generator whose whole state is from the entropy of the operating system."""
    generator = torch.Generator()
    renew(generator)
    return generator


def make_generator_of_process(seed: int) -> torch.Generator:
    """A generator that differs between processes, even if all of them have the same seed."""
    rank = torch.distributed.get_rank() if count_processes() > 1 else 0
    seed = (seed + _LARGE_PRIME * rank) % 2**63
    return torch.Generator().manual_seed(seed)


def separate_processes(generator: torch.Generator) -> None:
    """Seed a generator in each process anew. From one seed, samples of several processes would be drawn together.

    The seed is drawn from the generator: one that has drawn batches before does not draw them again.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    generator.manual_seed(make_generator_of_process(seed).initial_seed())


def count_processes() -> int:
    """The number of processes that train together."""
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_initialized else 1


class PoissonSampler(Sampler[list[int]]):
    """Poisson samples: each unit is in a batch with the probability `rate`, independently. Batches may be empty.

    Args:
        count: the number of units; here a unit is an example.
        batches: the number of batches of an epoch.
        source: where the batches are drawn from.
        rate: by default one divided by the number of batches.
        rank: the number of this process, which draws from its own share of the units.
        processes: the number of processes. By default those that there are when a loop begins, which divide the
            batches.

    >>> sizes = [len(batch) for batch in PoissonSampler(1000, 10, SecretNumbers())]
    >>> len(sizes), 800 < sum(sizes) < 1200
    (10, True)
    """

    def __init__(
        self,
        count: int,
        batches: int,
        source: Source = None,
        *,
        rate: float | None = None,
        rank: int = 0,
        processes: int | None = None,
    ) -> None:
        self.count = count
        self._batches, self._source, self._rate = batches, source, rate
        self._rank, self._processes = rank, processes

    def __len__(self) -> int:
        return math.ceil(self._batches / count_processes()) if self._processes is None else self._batches

    @property
    def rate(self) -> float:
        """The probability of each unit to be in a batch, if it can be."""
        return 1 / len(self) if self._rate is None else self._rate

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw(self._find_share(), self.rate)  # at once, not with the first batch

    def _find_share(self) -> Tensor:
        """The units of this process: random, but the same in each loop."""
        rank, processes = self._rank, self._processes
        if processes is None and (processes := count_processes()) > 1:
            rank = torch.distributed.get_rank()
            if isinstance(self._source, torch.Generator):  # each process may have got a copy of it
                separate_processes(self._source)
        units = torch.arange(self.count)
        if processes == 1:
            return units
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(0))[rank::processes]

    def _draw(self, own: Tensor, rate: float) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield self._choose(own, rate)

    def _choose(self, own: Tensor, rate: float) -> list[int]:
        """A batch of these units."""
        return own[draw_numbers(self._source, len(own)) < rate].tolist()


class CyclicSampler(PoissonSampler):
    """Poisson samples of bins: step t takes each example of bin `t % bins` with the rate `bins / batches`.

    The bin of each example is drawn once, from a key. With as many bins as batches it is "balls in bins": each example
    is in one batch of each epoch.

    Args:
        count: the number of examples.
        batches: the number of batches of an epoch.
        bins: the number of bins.
        count_steps: returns the number of steps so far.
        seed: key of the bins.
        **others: the arguments of `PoissonSampler`.

    >>> sampler = CyclicSampler(6, 2, bins=2, count_steps=lambda: 0, seed="0")
    >>> sorted(sum(sampler, []))
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self, count: int, batches: int, *, bins: int, count_steps: Callable[[], int], seed: str, **others: Any
    ) -> None:
        if bins > batches:
            raise PrivateTrainingError(
                f"The strategy has a separation of {bins} steps, and an epoch has {batches} batches: the batches of a "
                "bin could not have their expected size. Use a smaller separation, or smaller batches."
            )
        super().__init__(count, batches, rate=bins / batches, **{"processes": 1, **others})
        self.bins, self.seed = bins, seed
        self._count_steps = count_steps

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw_bins(self._find_share(), self._count_steps())

    def _draw_bins(self, own: Tensor, start: int) -> Iterator[list[int]]:
        numbers = SecretNumbers(sha256(str(self.seed).encode()).digest()).rand(self.count)
        found = (numbers * self.bins).long()[own]
        members = [own[found == i] for i in range(self.bins)]
        for step in range(start, start + len(self)):
            yield self._choose(members[step % self.bins], self.rate)


class PartSampler:
    """The batches of a sampler, each divided into `parts` batches of almost the same size, of which some may be empty.

    >>> list(PartSampler([[0, 1, 2, 3, 4], [5]], parts=2))
    [[0, 1], [2, 3, 4], [], [5]]
    """

    def __init__(self, sampler: Any, parts: int) -> None:
        self.sampler, self.parts = sampler, parts

    def __len__(self) -> int:
        return len(self.sampler) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            cuts = [len(batch) * i // self.parts for i in range(self.parts + 1)]
            for start, stop in pairwise(cuts):
                yield batch[start:stop]


class WithAttributes:
    """A loader with some other attributes, or another number of batches, for Poisson sampling."""

    def __init__(self, loader: Any, length: int | None = None, **attributes: Any) -> None:
        self._loader, self._length = loader, len(loader) if length is None else length
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def find_source(loader: Any, secure_generator: Any, noise_generator: torch.Generator | None) -> Source:
    """Where the batches of a loader are drawn from: a generator that was given, or a secret key."""
    if secure_generator is not None or loader.generator is not None:
        return loader.generator if secure_generator is None else secure_generator
    return SecretNumbers() if noise_generator is None else None


def find_place(distributed: bool) -> dict[str, int]:
    """The number of this process, and of all, as arguments of a sampler."""
    if not distributed:
        return {"rank": 0, "processes": 1}
    return {"rank": torch.distributed.get_rank(), "processes": torch.distributed.get_world_size()}


def draw_seed(distributed: bool) -> str:
    """A secret that all processes have in common."""
    seeds = [secrets.token_hex(32)]
    if distributed:
        torch.distributed.broadcast_object_list(seeds)
    return seeds[0]


def copy_with_sampler(loader: Any, sampler: Any) -> DataLoader[Any]:
    """A copy of a loader with another batch sampler."""
    return copy_loader(loader, loader.dataset, sampler, loader.collate_fn, loader.generator)


def put_sampler(loader: DPDataLoader, sampler: Any) -> DPDataLoader:
    """Let a loader of Opacus take its batches from another sampler, also if its first batch is empty."""
    vars(loader)["batch_sampler"] = sampler  # not setattr, which a loader refuses
    show_example(loader.collate_fn, loader.dataset)
    return loader


def copy_loader(loader: Any, dataset: Any, batch_sampler: Any, collate: Any, generator: Any) -> DataLoader[Any]:
    """A loader with other data, batches, collation and random numbers, and the other settings of `loader`."""
    return DataLoader(
        dataset=dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


_WHOLE = (SequentialSampler, DistributedSampler)


def check_loader(loader: Any) -> None:
    """Refuse loaders whose examples are not those of their dataset, each once: Poisson sampling draws from all."""
    if not hasattr(loader, "dataset") or not hasattr(loader, "batch_sampler"):
        raise PrivateTrainingError(
            f"data_loader must be a DataLoader, from whose dataset the batches are drawn, got {type(loader).__name__}."
        )
    if loader.batch_sampler is None:
        raise PrivateTrainingError(
            "The loader has batch_size=None, so that its dataset returns whole batches. Private training samples "
            "single examples: pass a dataset of examples and a batch_size."
        )
    kind, sampler = type(loader.batch_sampler), getattr(loader.batch_sampler, "sampler", None)
    if kind.__module__.partition(".")[0] in ("persample", "opacus"):
        return
    is_whole = isinstance(sampler, _WHOLE)
    if isinstance(sampler, RandomSampler):
        is_whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)
    if kind is not BatchSampler or not is_whole:
        name = kind.__name__ if kind is not BatchSampler else type(sampler).__name__
        raise PrivateTrainingError(
            f"The {name} of the loader selects examples, and Poisson sampling would replace it: the training would use "
            "examples that it leaves out. Pass a loader of torch.utils.data.Subset(dataset, indices), or set "
            "poisson_sampling=False."
        )


def show_example(collate: Any, dataset: Any) -> None:
    """Give a collate function of Opacus an example batch, so that it can make an empty batch even as its first batch.

    Only shapes and types of the example are used.
    """
    if collate.first_batch is None and collate.wrapped_collator_fn is not None:
        collate.first_batch = collate.wrapped_collator_fn([dataset[0]])
