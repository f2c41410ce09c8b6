"""The one place where a way to compute something is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

Way = Literal["ghost", "pixels", "dense", "gemm", "groups", "correlation"]
_forced: ContextVar[Way | None] = ContextVar("forced way", default=None)


def choose_norm_algorithm(positions: int, inputs: int, outputs: int) -> Way:
    """How to get the norm of a sum of `positions` outer products of `inputs` with `outputs` numbers.

    *ghost*: from the positions' inner products on both sides, 2 t² (i + o) operations for each sample. *dense*: by
    making the sum, 2 t i o operations and i o numbers, in blocks. Measured on 2 CPU cores (float32, ms, ghost / dense
    in blocks), with the ratio of operations ghost : dense in brackets:

        batch 16, t 64,   256 x 256    0.7 / 1.1   (0.50)       batch 8,  t 512,  768 x 768     52 / 34   (1.33)
        batch 16, t 64,   256 x 4096   4.7 / 21    (0.27)       batch 8,  t 512,  768 x 3072    94 / 133  (0.83)
        batch 64, t 64,   576 x 128    3.4 / 6.3   (0.61)       batch 4,  t 512,  128 x 1024    14 / 4.2  (4.5)
        batch 8,  t 256,  768 x 768    10 / 19     (0.67)       batch 64, t 1024, 27 x 32      395 / 2.4  (70)

    The operations decide; on a GPU nothing else was measured, and the same choice is made.
    """
    return _cheapest({"ghost": positions * (inputs + outputs), "dense": inputs * outputs})


def way_of_sketch(positions: int, size: int, outputs: int, inputs: int) -> Way:
    """How to get the tensor sketch of a sum of outer products.

    *ghost*: from the sketches of both sides, two transforms of `size` numbers for each position. *dense*: by making the
    sum, and adding each of its numbers to its place. Measured on 2 CPU cores (ms, ghost / dense, for 1024 numbers):

        batch 16, t 64,  256 x 256     109 / 27        batch 32, t 1,   512 x 512     1.1 / 119
        batch 16, t 64,  4096 x 256     63 / 889       batch 32, t 16,  256 x 256     9.5 / 31
        batch 4,  t 512, 128 x 512      59 / 9         batch 32, t 50,  512 x 128      50 / 25

    On a GPU nothing was measured, and the same choice is made.
    """
    return _cheapest({"ghost": positions * (size + inputs + outputs), "dense": inputs * outputs})


def norms_of_patches(pixels: int, positions: int, channels: int, kernel: int, outputs: int) -> Way:
    """How to get the norms of a convolution's gradients; all numbers are those of one sample and one group of channels.

    *ghost* and *dense* as above, with patches of c k numbers for inputs. *pixels*: ghost, where the inner product of
    two patches is the sum of those of the pixels at each place of the kernel: p² c operations for p pixels, and no
    patches. A number that has to be moved, of the patches or of the p² products, counts as 32 operations. Measured on 2
    CPU cores (float32, ms, pixels / ghost / dense; in brackets what the formulas below say, in millions), for
    `batch, channels -> outputs, side, kernel`:

        64, 64 -> 128, 8, 3    1.7 / 4.2 / 7.3 (0.9 / 4.1 / 4.7)   64, 32 -> 64, 16, 3   18 / 29 / 9.2 (8.4 / 25 / 4.7)
        32, 128 -> 128, 8, 3   1.2 / 3.6 / 7.6 (1.2 / 7.6 / 9.4)   32, 64 -> 64, 16, 3   9.8 / 22 / 8.5 (10 / 47 / 9.4)
        32, 256 -> 256, 4, 3   0.5 / 4.7 / 34 (0.1 / 1.8 / 9.4)    16, 128 -> 128, 14, 3   3.9 / 14 / 11 (11 / 56 / 29)
        32, 64 -> 64, 8, 5     1.5 / 6.4 / 8.7 (0.7 / 10 / 6.6)

    and by steps of two:

        32, 64 -> 128, 16, 3   3.7 / 2.4 / 4.3 (6.8 / 4.1 / 4.7)  32, 128 -> 256, 8, 3  1.2 / 1.8 / 11 (0.7 / 0.9 / 4.7)

    On a GPU nothing was measured, and the same choice is made.
    """
    moved = 32
    return _cheapest(
        {
            "ghost": positions**2 * (channels * kernel + outputs) + moved * positions * channels * kernel,
            "pixels": pixels**2 * (channels + moved) + positions**2 * outputs,
            "dense": positions * channels * kernel * outputs,
        }
    )


def dense_of_patches(
    positions: int, channels: int, kernel: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> Way:
    """How to make a convolution's gradients; all numbers are those of one sample and one group of channels.

    *gemm*: a product of the gradients with the patches, which takes a copy of t c k numbers. *groups*: the library's
    own weight gradient, in one call where every sample is a group of channels by itself; it rearranges c k o numbers.
    *correlation*, for one channel in each group: the input convolved with the gradient, a sample and channel being a
    group. The rest is the same number of operations. Measured on 2 CPU cores (float32, ms, gemm / groups, and the
    library's gradient of the whole batch in brackets), for `batch, channels -> outputs, side, kernel`:

        64, 3 -> 32, 32, 3     2.7 / 2.7 (1.8)      64, 32 -> 32, 8, 3      1.7 / 1.3 (1.2)
        63, 16 -> 16, 32, 3    5.6 / 3.4 (3.4)      56, 32 -> 64, 8, 3      1.6 / 2.0 (1.5)
        15, 32 -> 32, 32, 3    4.3 / 2.6 (2.7)      14, 64 -> 128, 8, 3     1.5 / 2.1 (1.5)
        15, 64 -> 64, 16, 3    4.5 / 3.6 (3.2)      22, 16 -> 16, 32, 5     4.7 / 2.3 (2.4)
        7, 64 -> 128, 16, 3    2.4 / 2.7 (2.4)      32, 4 groups of 16 -> 16, 16, 3    3.5 / 1.8 (1.6)
        5, 128 -> 128, 14, 3   2.6 / 3.1 (2.7)      8, 32 groups of 4 -> 4, 56, 3      9.7 / 33 (29)

    and for groups of one channel, `batch, groups, side, kernel`, gemm / groups / correlation:

        16, 64, 28, 3    2.3 / 0.5 / 0.6 (0.5)      16, 256, 7, 7    6.8 / 5.2 / 0.5 (5.3)
        16, 64, 16, 5    2.7 / 5.3 / 0.5 (5.2)      16, 16, 112, 7    54 / 89 / 7.0 (116)

    So the copies decide, and that the library works on channels by eights. It is quick in float32 only; on a GPU, where
    nothing was measured, patches and products are what is known to run well, and a depthwise convolution what takes
    no memory. Tried and left: a product for each place of the kernel with the pixels moved there, which needs no
    patches (5 to 10 % quicker than groups for 3x3, 20 to 60 % slower for 5x5); a library call for each sample.
    """
    on_cpu = device.type == "cpu"
    costs: dict[Way, int] = {"gemm": 0 if kernel == 1 else positions * channels * kernel}
    if on_cpu and dtype == torch.float32 and channels % 8 == outputs % 8 == 0:
        costs["groups"] = 2 * channels * kernel * outputs
    if channels == outputs == 1 and (dtype == torch.float32 if on_cpu else dtype.is_floating_point):
        costs["correlation"] = 0
    return _cheapest(costs)


def _cheapest(costs: Mapping[Way, int]) -> Way:
    forced = _forced.get()
    return forced if forced is not None and forced in costs else min(costs, key=lambda way: costs[way])


@contextmanager
def forced_way(way: Way) -> Iterator[None]:
    """Computes things in this way whatever it costs, where it is one of the ways; for tests."""
    token = _forced.set(way)
    try:
        yield
    finally:
        _forced.reset(token)
