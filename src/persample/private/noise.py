"""Gaussian noise from a cryptographic generator with a key of the operating system."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from os import getpid, urandom
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from persample.errors import PerSampleError

_CHUNK = 2**17  # numbers that a thread draws at a time: 512 KB in float32
# With fewer numbers one thread is faster: the threads of torch's last product keep their cores busy for some
# milliseconds, so that another thread does not start in time.
_MIN_THREADED = 2**22
_KEY_BYTES = 32
_COUNTER_BYTES = 8
_BLOCK = 16  # bytes that the cipher encrypts at a time
_ZEROS = memoryview(bytes(8 * _CHUNK))  # encrypted in counter mode, they are the key stream itself


class SecretKey:
    """A key, by default of the operating system, and the number of draws. Forked processes and copies draw new keys."""

    def __init__(self, key: bytes | None = None) -> None:
        self._draw_key(key)

    def _draw_key(self, key: bytes | None = None) -> None:
        self._key = urandom(_KEY_BYTES) if key is None else key
        self._draws = 0
        self._process = getpid()

    def mix(self) -> None:
        """Continue with another key: a digest of the key so far and of fresh entropy of the operating system."""
        self._key = sha256(self._key + urandom(_KEY_BYTES)).digest()

    def _leave_parent(self) -> None:
        """After a fork, draw a new key: nothing may be drawn that the parent draws."""
        if self._process != getpid():
            self._draw_key()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class SecretNumbers(SecretKey):
    """Uniform numbers that no seed of the program reaches, with 53 bits: a function of a secret key of 256 bits.

    >>> numbers = SecretNumbers().rand(1000)
    >>> bool(0.4 < numbers.mean() < 0.6), bool((numbers < 1).all())
    (True, True)
    """

    def rand(self, count: int) -> Tensor:
        """`(count,)`: numbers from 0 to 1, in float64."""
        self._leave_parent()
        self._draws += 1
        words = np.frombuffer(RandomBytes(self._key, self._draws << 64).read(8 * count), dtype=np.uint64)
        return torch.from_numpy((words >> np.uint64(11)) * 2.0**-53)


class Noise(SecretKey):
    """A source of Gaussian noise that no seed of the program reaches.

    Each number is a function of a secret key, of the number of the draw, and of its place: its bits are those of
    AES-256 in counter mode. Who knows some of the noise cannot compute the rest. The key comes from the operating
    system. Results do not depend on the number of threads, and no two draws have the same noise. On other devices than
    the CPU, torch's generator draws the noise, with a new seed from AES in each draw.

    `get_state` and `set_state` save and restore the key and the number of draws. Keep the state secret: it determines
    the noise.

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

    def get_state(self) -> Tensor:
        """The key and the number of draws as bytes."""
        self._leave_parent()
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
        self._leave_parent()
        self._draws += 1  # before the draw: after an error, no number is drawn again
        self._add_draw(totals, std, self._draws)

    def _add_draw(self, totals: Sequence[Tensor], std: float, draw: int) -> None:
        """Add the numbers of a draw."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for total in totals:
            groups.setdefault((total.device, total.dtype), []).append(total)
        for i, tensors in enumerate(groups.values()):
            if tensors[0].device.type == "cpu":
                self._add_on_cpu(tensors, std, draw, i)
            else:
                self._add_on_device(tensors, std, draw, i)

    def _find_key(self, draw: int) -> bytes:
        """The key of a draw."""
        return self._key

    def _start_stream(self, draw: int, group: int, chunk: int = 0) -> RandomBytes:
        """The secret bytes of a chunk in a draw.

        The counter of the cipher has 64 bits for the draw, 16 for the group, and 48 for the block of 16 bytes, so that
        no two chunks share a block.
        """
        block = chunk * (8 * _CHUNK // _BLOCK)
        return RandomBytes(self._find_key(draw), (draw << 64) + (group << 48) + block)

    def _add_on_cpu(self, totals: list[Tensor], std: float, draw: int, group: int) -> None:
        chunks = list(enumerate(_split([total.view(-1).numpy() for total in totals])))
        jobs = iter(chunks)  # all threads take their chunks from here

        def work(_: int) -> None:
            source = Normals(totals[0].dtype)
            for chunk, pieces in jobs:
                values = source.draw(self._start_stream(draw, group, chunk), sum(map(len, pieces)), std)
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

    def _add_on_device(self, totals: list[Tensor], std: float, draw: int, group: int) -> None:
        if totals[0].is_meta:  # without values
            return
        generator = torch.Generator(totals[0].device)
        generator.manual_seed(int.from_bytes(self._start_stream(draw, group).read(8), "little", signed=True))
        for total in totals:
            total += torch.normal(0, std, total.shape, generator=generator, dtype=total.dtype, device=total.device)


class RandomBytes:
    """The key stream of AES-256 in counter mode, from block `start` of the counter on.

    >>> RandomBytes(bytes(32), start=0).read(4).hex()
    'dc95c078'
    """

    def __init__(self, key: bytes, start: int) -> None:
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(start.to_bytes(_BLOCK, "big"))).encryptor()

    def read(self, count: int) -> bytes:
        """The next bytes."""
        return self._cipher.update(bytes(count))

    def read_into(self, target: memoryview, count: int) -> None:
        """Write the next bytes to the start of `target`, which must be longer than `count` by a block."""
        self._cipher.update_into(_ZEROS[:count], target)


class Normals:
    """Turns random bytes into Gaussian numbers in float32 or float64, by the transform of Box and Muller.

    Each thread needs an object of its own.

    >>> source = Normals(torch.float32)
    >>> source.draw(RandomBytes(bytes(32), start=0), 3, std=2.0).dtype
    dtype('float32')
    """

    def __init__(self, dtype: torch.dtype) -> None:
        is_double = dtype == torch.float64
        self._float = np.dtype(np.float64 if is_double else np.float32)
        self._int = np.dtype(np.int64 if is_double else np.int32)
        self._bits = 8 * self._int.itemsize - 1  # of a word without its sign
        # Buffers of all draws: to fill memory that is fresh from the system would take longer than the arithmetic.
        self._bytes = np.empty(self._int.itemsize * _CHUNK + _BLOCK, dtype=np.uint8)
        self._normals = np.empty(_CHUNK, dtype=self._float)
        self._radii = np.empty(_CHUNK // 2, dtype=self._float)

    def draw(self, stream: RandomBytes, count: int, std: float) -> Any:
        """`(count,)`: numbers with mean 0 and standard deviation `std`, in a buffer that the next call overwrites."""
        half, unit = -(-count // 2), 2.0**-self._bits
        size = 2 * half * self._int.itemsize
        stream.read_into(self._bytes.data, size)
        words = self._bytes[:size].view(self._int)
        of_radii, of_angles = words[:half], words[half:]
        radii, first, second = self._radii[:half], self._normals[:half], self._normals[half : 2 * half]
        # Uniform in (0, 1], with all bits of a word. In float32 the smallest is 2^-32: the largest result is 6.7 `std`.
        of_radii &= self._int.type(2**self._bits - 1)
        np.copyto(radii, of_radii, casting="unsafe")
        radii += 0.5
        radii *= unit
        np.log(radii, out=radii)
        radii *= -2
        np.sqrt(radii, out=radii)
        radii *= std
        np.copyto(second, of_angles, casting="unsafe")
        second *= math.pi * unit  # in [-pi, pi]
        np.cos(second, out=first)
        np.sin(second, out=second)
        first *= radii
        second *= radii
        return self._normals[:count]


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
