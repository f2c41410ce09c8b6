"""Gaussian noise from the entropy of the operating system, drawn by several threads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from os import getpid, urandom
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample.errors import PerSampleError

_CHUNK = 2**17  # numbers that a thread draws at a time: 512 KB in float32
# With fewer numbers one thread is faster: the threads of torch's last product keep their cores busy for some
# milliseconds, so that another thread does not start in time (2.0 ms instead of 1.75 ms for 670,000 numbers).
_MIN_THREADED = 2**22
_KEY_BYTES = 32
_COUNTER_BYTES = 8
_STATE_BYTES = 2496  # words of the Mersenne twister


class Noise:
    """A source of Gaussian noise that no seed of the program reaches.

    Each number is a function of a secret key, of the number of the draw, and of its place. The key comes from the
    operating system. Results do not depend on the number of threads, and no two draws have the same noise.
    `get_state` and `set_state` save and restore the key and the number of draws.

    >>> noise = Noise()
    >>> state, total = noise.get_state(), torch.zeros(1000)
    >>> noise.add_to([total], std=2.0)
    >>> bool(1.5 < total.std() < 2.5)
    True
    >>> noise.set_state(state)
    >>> again = torch.zeros(1000)
    >>> noise.add_to([again], std=2.0)
    >>> torch.equal(total, again)
    True
    """

    def __init__(self) -> None:
        self._draw_key()

    def _draw_key(self) -> None:
        self._key = urandom(_KEY_BYTES)
        self._draws = 0
        self._process = getpid()

    def get_state(self) -> Tensor:
        """The key and the number of draws as bytes."""
        numbers = self._key + self._draws.to_bytes(_COUNTER_BYTES, "little")
        return torch.tensor(list(numbers), dtype=torch.uint8, device="cpu")

    def set_state(self, state: Tensor) -> None:
        """Continue where `get_state` was called."""
        numbers = bytes(state.tolist())
        if len(numbers) != _KEY_BYTES + _COUNTER_BYTES:
            raise PerSampleError(
                f"A state of the noise has {_KEY_BYTES + _COUNTER_BYTES} bytes, got {len(numbers)}: it is the state of "
                "another generator. Pass the noise_generator that the checkpoint was made with."
            )
        self._key = numbers[:_KEY_BYTES]
        self._draws = int.from_bytes(numbers[_KEY_BYTES:], "little")
        self._process = getpid()

    def skip(self) -> None:
        """Count a draw without making it, as processes do that leave it to another one."""
        self._draws += 1

    @torch.no_grad()
    def add_to(self, totals: Sequence[Tensor], std: float) -> None:
        """Add noise with standard deviation `std` to contiguous real tensors, in place."""
        if self._process != getpid():  # a fork must not draw the noise of its parent
            self._draw_key()
        for i, (_, group) in enumerate(groupby(totals, lambda total: (total.device, total.dtype))):
            tensors = list(group)
            if tensors[0].device.type == "cpu":
                self._add_on_cpu(tensors, std, i)
            else:
                self._add_on_device(tensors, std, i)
        self._draws += 1

    def _derive(self, count: int, *place: int) -> bytes:
        """Secret bytes for a place of the current draw."""
        numbers = (self._draws, *place)
        return hashlib.shake_256(self._key + b"".join(n.to_bytes(8, "little") for n in numbers)).digest(count)

    def _add_on_cpu(self, totals: list[Tensor], std: float, group: int) -> None:
        chunks = list(enumerate(_split([total.view(-1).numpy() for total in totals])))
        jobs = iter(chunks)  # all threads take their chunks from here

        def work(_: int) -> None:
            generator, drawn = torch.Generator(), torch.empty(_CHUNK, dtype=totals[0].dtype, device="cpu")
            for number, pieces in jobs:
                generator.set_state(_torch.make_generator_state(self._derive(_STATE_BYTES, group, number)))
                values = drawn[: sum(map(len, pieces))].normal_(0, std, generator=generator).numpy()
                start = 0
                for piece in pieces:  # numpy adds in this thread, torch would start further ones
                    piece += values[start : start + len(piece)]
                    start += len(piece)

        is_large = len(chunks) * _CHUNK >= _MIN_THREADED
        threads = min(torch.get_num_threads(), len(chunks)) if is_large else 1
        if threads < 2:
            work(0)
            return
        with ThreadPoolExecutor(threads - 1) as pool:
            others = pool.map(work, range(1, threads))
            work(0)
            list(others)  # raises the errors of the other threads

    def _add_on_device(self, totals: list[Tensor], std: float, group: int) -> None:
        generator = torch.Generator(totals[0].device)
        generator.manual_seed(int.from_bytes(self._derive(8, group, 0), "little", signed=True))
        for total in totals:
            total += torch.normal(0, std, total.shape, generator=generator, dtype=total.dtype, device=total.device)


def add_noise_of(generator: torch.Generator | None, total: Tensor, std: float) -> None:
    """Add noise of a given generator to a contiguous real tensor, in place: the numbers that `torch.normal` draws."""
    numbers = total.view(-1)
    blocks = max(1, len(numbers) // _CHUNK)
    drawn = torch.empty(min(len(numbers), 2 * _CHUNK), dtype=total.dtype, device=total.device)
    for i in range(blocks):  # the last block includes the remainder
        block = numbers[i * _CHUNK : (i + 1) * _CHUNK if i < blocks - 1 else None]
        block += drawn[: len(block)].normal_(0, std, generator=generator)


def _split(arrays: Iterable[Any]) -> Iterator[list[Any]]:
    """Cut arrays into lists of pieces with `_CHUNK` numbers each; the last one may have fewer."""
    pieces: list[Any] = []
    free = _CHUNK
    for array in arrays:
        start = 0
        while start < len(array):
            piece = array[start : start + free]
            pieces.append(piece)
            start, free = start + len(piece), free - len(piece)
            if not free:
                yield pieces
                pieces, free = [], _CHUNK
    if pieces:
        yield pieces
