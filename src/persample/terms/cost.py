"""Choose the cheapest algorithm for an answer.

The costs are counts of operations and of copied entries, checked against measurements on 2 CPU cores. No GPU was
available for measurements. Letters in the docstrings are counts: t of positions, i of inputs, c of input channels, k of
offsets in the kernel, o of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

Algorithm = Literal["ghost", "pixels", "dense", "gemm", "groups", "correlation"]
_forced: ContextVar[Algorithm | None] = ContextVar("forced algorithm", default=None)


def choose_norm_algorithm(positions: int, inputs: int, outputs: int) -> Algorithm:
    """Choose how to compute the norms of sums of `positions` outer products of `inputs` and `outputs` numbers.

    *ghost*: from the inner products of all pairs of positions on both sides; 2 t² (i + o) operations for each sample.
    *dense*: from the dense form, in blocks; 2 t i o operations and i o entries. Measured (float32, ms, ghost / dense),
    with the ratio of operations ghost : dense in brackets:

        batch 16, t 64,   256 x 256    0.7 / 1.1   (0.50)       batch 8,  t 512,  768 x 768     52 / 34   (1.33)
        batch 16, t 64,   256 x 4096   4.7 / 21    (0.27)       batch 8,  t 512,  768 x 3072    94 / 133  (0.83)
        batch 64, t 64,   576 x 128    3.4 / 6.3   (0.61)       batch 4,  t 512,  128 x 1024    14 / 4.2  (4.5)
        batch 8,  t 256,  768 x 768    10 / 19     (0.67)       batch 64, t 1024, 27 x 32      395 / 2.4  (70)

    The algorithm with fewer operations is chosen, on every device.
    """
    return _choose_cheapest({"ghost": positions * (inputs + outputs), "dense": inputs * outputs})


def choose_sketch_algorithm(positions: int, size: int, outputs: int, inputs: int) -> Algorithm:
    """Choose how to compute the tensor sketch of sums of outer products.

    *ghost*: from the sketches of both sides; two Fourier transforms of `size` numbers for each position. *dense*: from
    the dense form; each entry is added to its bucket. Measured (ms, ghost / dense, for a size of 1024):

        batch 16, t 64,  256 x 256     109 / 27        batch 32, t 1,   512 x 512     1.1 / 119
        batch 16, t 64,  4096 x 256     63 / 889       batch 32, t 16,  256 x 256     9.5 / 31
        batch 4,  t 512, 128 x 512      59 / 9         batch 32, t 50,  512 x 128      50 / 25

    The same choice is made on every device.
    """
    return _choose_cheapest({"ghost": positions * (size + inputs + outputs), "dense": inputs * outputs})


def choose_patch_norm_algorithm(pixels: int, positions: int, channels: int, kernel: int, outputs: int) -> Algorithm:
    """Choose how to compute the norms of a convolution's gradients. All counts are for one sample and one group.

    *ghost* and *dense*: as in `choose_norm_algorithm`; the inputs are patches of c k numbers. *pixels*: like ghost, but
    the inner product of two patches is summed from inner products of pixels, one for each offset in the kernel. That
    takes p² c operations for p pixels, and no patches. Moving an entry, of the patches or of the p² products, counts as
    32 operations. Measured (float32, ms, pixels / ghost / dense, with the cost from the formulas below in millions in
    brackets), for `batch, channels -> outputs, side, kernel`:

        64, 64 -> 128, 8, 3    1.7 / 4.2 / 7.3 (0.9 / 4.1 / 4.7)   64, 32 -> 64, 16, 3   18 / 29 / 9.2 (8.4 / 25 / 4.7)
        32, 128 -> 128, 8, 3   1.2 / 3.6 / 7.6 (1.2 / 7.6 / 9.4)   32, 64 -> 64, 16, 3   9.8 / 22 / 8.5 (10 / 47 / 9.4)
        32, 256 -> 256, 4, 3   0.5 / 4.7 / 34 (0.1 / 1.8 / 9.4)    16, 128 -> 128, 14, 3   3.9 / 14 / 11 (11 / 56 / 29)
        32, 64 -> 64, 8, 5     1.5 / 6.4 / 8.7 (0.7 / 10 / 6.6)

    and with a stride of 2:

        32, 64 -> 128, 16, 3   3.7 / 2.4 / 4.3 (6.8 / 4.1 / 4.7)  32, 128 -> 256, 8, 3  1.2 / 1.8 / 11 (0.7 / 0.9 / 4.7)

    The same choice is made on every device.
    """
    move_cost = 32
    return _choose_cheapest(
        {
            "ghost": positions**2 * (channels * kernel + outputs) + move_cost * positions * channels * kernel,
            "pixels": pixels**2 * (channels + move_cost) + positions**2 * outputs,
            "dense": positions * channels * kernel * outputs,
        }
    )


def choose_patch_dense_algorithm(
    positions: int, channels: int, kernel: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> Algorithm:
    """Choose how to compute the dense gradients of a convolution. All counts are for one sample and one group.

    *gemm*: a product of the output's gradients with the patches, which are a copy of t c k entries. *groups*: one call
    of the library's weight gradient, with each sample as a group of channels; it reorders c k o entries.
    *correlation*, for groups of one channel: the input convolved with the output's gradient, with each channel of each
    sample as a group. All take the same number of operations besides. Measured (float32, ms, gemm / groups, with the
    library's gradient of the whole batch in brackets), for `batch, channels -> outputs, side, kernel`:

        64, 3 -> 32, 32, 3     2.7 / 2.7 (1.8)      64, 32 -> 32, 8, 3      1.7 / 1.3 (1.2)
        63, 16 -> 16, 32, 3    5.6 / 3.4 (3.4)      56, 32 -> 64, 8, 3      1.6 / 2.0 (1.5)
        15, 32 -> 32, 32, 3    4.3 / 2.6 (2.7)      14, 64 -> 128, 8, 3     1.5 / 2.1 (1.5)
        15, 64 -> 64, 16, 3    4.5 / 3.6 (3.2)      22, 16 -> 16, 32, 5     4.7 / 2.3 (2.4)
        7, 64 -> 128, 16, 3    2.4 / 2.7 (2.4)      32, 4 groups of 16 -> 16, 16, 3    3.5 / 1.8 (1.6)
        5, 128 -> 128, 14, 3   2.6 / 3.1 (2.7)      8, 32 groups of 4 -> 4, 56, 3      9.7 / 33 (29)

    and for groups of one channel, as gemm / groups / correlation, for `batch, groups, side, kernel`:

        16, 64, 28, 3    2.3 / 0.5 / 0.6 (0.5)      16, 256, 7, 7    6.8 / 5.2 / 0.5 (5.3)
        16, 64, 16, 5    2.7 / 5.3 / 0.5 (5.2)      16, 16, 112, 7    54 / 89 / 7.0 (116)

    So the cost is the number of copied entries. The library is fast only in float32 and for multiples of 8 channels. On
    a GPU the choice is gemm, as large products are known to run well there, or correlation, which copies nothing. Tried
    and rejected: a product for each offset in the kernel with shifted pixels, without patches (5 to 10 % faster than
    groups for 3x3, 20 to 60 % slower for 5x5); a library call for each sample.
    """
    on_cpu = device.type == "cpu"
    costs: dict[Algorithm, int] = {"gemm": 0 if kernel == 1 else positions * channels * kernel}
    if on_cpu and dtype == torch.float32 and channels % 8 == outputs % 8 == 0:
        costs["groups"] = 2 * channels * kernel * outputs
    if channels == outputs == 1 and (dtype == torch.float32 if on_cpu else dtype.is_floating_point):
        costs["correlation"] = 0
    return _choose_cheapest(costs)


def _choose_cheapest(costs: Mapping[Algorithm, int]) -> Algorithm:
    forced = _forced.get()
    return forced if forced is not None and forced in costs else min(costs, key=lambda algorithm: costs[algorithm])


@contextmanager
def force_algorithm(algorithm: Algorithm) -> Iterator[None]:
    """Choose this algorithm, regardless of its cost, in every choice that offers it; for tests."""
    token = _forced.set(algorithm)
    try:
        yield
    finally:
        _forced.reset(token)
