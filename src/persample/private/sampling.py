"""Poisson sampling with empty batches, in one process or several."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from opacus.data_loader import wrap_collate_with_empty
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from persample.private.errors import PrivateTrainingError
from persample.private.turns import CyclicSampler

_LARGE_PRIME = 2_147_483_647


class DistributedPoissonSampler(DistributedUniformWithReplacementSampler):
    """Sampler of Opacus for one of several processes, with two changes.

    It yields empty batches. Opacus leaves them out, so that some processes make fewer steps and the others wait.
    Each process draws other random numbers, even if all processes have the same seed, as they often do.
    """

    def __init__(self, *, total_size: int, sample_rate: float, generator: torch.Generator | None = None) -> None:
        generator = make_secret_generator() if generator is None else generator
        super().__init__(total_size=total_size, sample_rate=sample_rate, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.total_size, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch))
        own = order[self.rank :: self.num_replicas]
        for _ in range(self.num_batches):
            yield own[torch.rand(len(own), generator=self.generator) < self.sample_rate].tolist()


def make_generator_of_process(seed: int) -> torch.Generator:
    """A generator that differs between processes, even if all of them have the same seed."""
    rank = torch.distributed.get_rank() if _count_processes() > 1 else 0
    seed = (seed + _LARGE_PRIME * rank) % 2**63
    return torch.Generator().manual_seed(seed)


def separate_processes(generator: torch.Generator) -> None:
    """Seed a generator in each process anew. From one seed, samples of several processes would be drawn together.

    The seed is drawn from the generator: one that has drawn batches before does not draw them again.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    generator.manual_seed(make_generator_of_process(seed).initial_seed())


def make_secret_generator() -> torch.Generator:
    """A generator with a seed from the entropy of the operating system."""
    return torch.Generator().manual_seed(secrets.randbits(63))


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


class PoissonSampler:
    """Poisson samples in one process, or in as many processes as there are when a loop begins.

    `batches` is the number of batches of an epoch in one process; several processes divide them.
    """

    def __init__(self, num_samples: int, batches: int, generator: torch.Generator | None = None) -> None:
        self.num_samples = num_samples
        self.generator = generator
        self._batches = batches

    def __len__(self) -> int:
        return math.ceil(self._batches / _count_processes())

    def __iter__(self) -> Iterator[list[int]]:
        options: dict[str, Any] = {"sample_rate": 1 / len(self), "generator": self.generator}
        if _count_processes() > 1:
            if self.generator is not None:  # each process may have got a copy of it
                separate_processes(self.generator)
            return iter(DistributedPoissonSampler(total_size=self.num_samples, **options))
        return iter(UniformWithReplacementSampler(num_samples=self.num_samples, **options))


def _count_processes() -> int:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_initialized else 1


def replace_sampler(loader: Any) -> DataLoader[Any]:
    """A copy of a distributed loader of Opacus with `DistributedPoissonSampler`."""
    sampler = DistributedPoissonSampler(
        total_size=len(loader.dataset), sample_rate=loader.sample_rate, generator=loader.generator
    )
    return copy_with_sampler(loader, sampler)


def copy_with_sampler(loader: Any, sampler: Any) -> DataLoader[Any]:
    """A copy of a loader with another batch sampler."""
    return copy_loader(loader, loader.dataset, sampler, loader.collate_fn, loader.generator)


def copy_with_empty(loader: Any, sampler: Any, batch_first: bool) -> DataLoader[Any]:
    """A copy of a loader with another batch sampler, whose batches may be empty."""
    collate = wrap_collate_with_empty(collate_fn=loader.collate_fn, batch_first=batch_first)
    show_example(collate, loader.dataset)
    return copy_loader(loader, loader.dataset, sampler, collate, loader.generator)


def make_uniform_sampler(loader: Any, sample_rate: float, distributed: bool) -> Any:
    """The sampler of Poisson samples with a given rate; an epoch has as many batches as fit into one."""
    if distributed:
        return DistributedPoissonSampler(
            total_size=len(loader.dataset), sample_rate=sample_rate, generator=loader.generator
        )
    return UniformWithReplacementSampler(
        num_samples=len(loader.dataset), sample_rate=sample_rate, generator=loader.generator
    )


def make_cyclic_sampler(loader: Any, distributed: bool, batches: int, **options: Any) -> CyclicSampler:
    """The sampler of bins for a loader, whose batch size is the expected number of samples of a batch."""
    rank, processes, seeds = 0, 1, [secrets.randbits(63)]
    if distributed:
        rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.distributed.broadcast_object_list(seeds)
    return CyclicSampler(
        len(loader.dataset),
        batches=batches,
        seed=seeds[0],
        generator=loader.generator,
        rank=rank,
        processes=processes,
        **options,
    )


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


def prepare_empty_batches(loader: Any) -> None:
    """`show_example` for a loader of Opacus."""
    show_example(loader.collate_fn, loader.dataset)


def show_example(collate: Any, dataset: Any) -> None:
    """Give a collate function of Opacus an example batch, so that it can make an empty batch even as its first batch.

    Only shapes and types of the example are used.
    """
    if collate.first_batch is None and collate.wrapped_collator_fn is not None:
        collate.first_batch = collate.wrapped_collator_fn([dataset[0]])
