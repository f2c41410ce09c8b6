"""Poisson sampling with empty batches, in one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.utils.data import DataLoader

_LARGE_PRIME = 2_147_483_647


class DistributedPoissonSampler(DistributedUniformWithReplacementSampler):
    """Sampler of Opacus for one of several processes, with two changes.

    It yields empty batches. Opacus leaves them out, so that some processes make fewer steps and the others wait.
    Each process draws other random numbers, even if all processes have the same seed, as they often do.
    """

    def __init__(self, *, total_size: int, sample_rate: float, generator: torch.Generator | None = None) -> None:
        generator = make_generator_of_process() if generator is None else generator
        super().__init__(total_size=total_size, sample_rate=sample_rate, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.total_size, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch))
        own = order[self.rank :: self.num_replicas]
        for _ in range(self.num_batches):
            yield own[torch.rand(len(own), generator=self.generator) < self.sample_rate].tolist()


def make_generator_of_process() -> torch.Generator:
    """A generator that differs between processes, even if all of them have the same seed."""
    seed = (torch.initial_seed() + _LARGE_PRIME * torch.distributed.get_rank()) % 2**63
    return torch.Generator().manual_seed(seed)


def replace_sampler(loader: Any) -> DataLoader[Any]:
    """A copy of a distributed loader of Opacus with `DistributedPoissonSampler`."""
    sampler = DistributedPoissonSampler(
        total_size=len(loader.dataset), sample_rate=loader.sample_rate, generator=loader.generator
    )
    return copy_loader(loader, loader.dataset, sampler, loader.collate_fn, loader.generator)


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


def prepare_empty_batches(loader: Any) -> None:
    """`show_example` for a loader of Opacus."""
    show_example(loader.collate_fn, loader.dataset)


def show_example(collate: Any, dataset: Any) -> None:
    """Give a collate function of Opacus an example batch, so that it can make an empty batch even as its first batch.

    Only shapes and types of the example are used.
    """
    if collate.first_batch is None and collate.wrapped_collator_fn is not None:
        collate.first_batch = collate.wrapped_collator_fn([dataset[0]])
