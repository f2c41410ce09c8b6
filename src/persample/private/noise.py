"""Gaussian noise from the entropy of the operating system, drawn by several threads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from os import getpid, urandom
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persample.errors import PerSampleError

_CHUNK = 2**16  # numbers that a thread draws at a time: 256 KB in float32
# With fewer numbers one thread is faster: the threads of torch's last product keep their cores busy for some
# milliseconds, so that another thread does not start in time.
_MIN_THREADED = 2**22
_KEY_BYTES = 32
_COUNTER_BYTES = 8
_STATE_BYTES = 24  # three of the four words of the generator; the fourth is a counter


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
            source = Normals(totals[0].dtype)
            for number, pieces in jobs:
                source.seed(self._derive(_STATE_BYTES, group, number))
                values = source.draw(sum(map(len, pieces)), std)
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


class Normals:
    """Gaussian numbers in float32 or float64, for one thread.

    The transform of Box and Muller, of the words of a generator with 256 bits of state (SFC64). That takes two
    thirds to three quarters of the time of torch's `normal_`, whose Mersenne twister is slow.

    >>> source = Normals(torch.float32)
    >>> source.seed(bytes(range(24)))
    >>> source.draw(3, std=2.0).dtype
    dtype('float32')
    """

    def __init__(self, dtype: torch.dtype) -> None:
        is_double = dtype == torch.float64
        self._float = np.dtype(np.float64 if is_double else np.float32)
        self._int = np.dtype(np.int64 if is_double else np.int32)
        self._bits = 8 * self._int.itemsize - 1  # of a word without its sign
        self._generator = np.random.SFC64(0)

    def seed(self, numbers: bytes) -> None:
        """Start from 24 bytes. All of them are used, in contrast to the seed of a generator."""
        words = np.array([*np.frombuffer(numbers, dtype=np.uint64), 1], dtype=np.uint64)
        self._generator.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}

    def draw(self, count: int, std: float) -> Any:
        """`(count,)`: numbers with mean 0 and standard deviation `std`."""
        half, unit = -(-count // 2), 2.0**-self._bits
        words = self._generator.random_raw(half * self._int.itemsize // 4).view(self._int)
        sizes, angles = words[:half], words[half:]
        found = np.empty(2 * half, dtype=self._float)
        first, second = found[:half], found[half:]
        # Uniform in (0, 1], with all bits of a word: the smallest is 2^-32, so that the largest result is 6.7 `std`.
        sizes &= self._int.type(2**self._bits - 1)
        radii = np.add(sizes, 0.5, dtype=self._float, casting="unsafe")
        radii *= unit
        np.log(radii, out=radii)
        radii *= -2
        np.sqrt(radii, out=radii)
        radii *= std
        np.multiply(angles, math.pi * unit, out=second, dtype=self._float, casting="unsafe")  # in [-pi, pi]
        np.cos(second, out=first)
        np.sin(second, out=second)
        first *= radii
        second *= radii
        return found[:count]


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
