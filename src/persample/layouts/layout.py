"""Where the samples of a batch lie in a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from persample.layouts.divisors import Divisor

# How a loss combines the samples.
Reduction = Literal["sum", "mean", "unclear", "mixed", "root"]


@dataclass(frozen=True)
class Layout:
    """The samples lie along one dimension of a tensor.

    Index j along `dim` belongs to sample `(j // inner) % batch`. This covers a batch dimension that was moved
    (`x.transpose(0, 1)`), merged with another one (`(B*T, D)` has inner T, `(T*B, D)` has inner 1), or repeated
    (`torch.cat([x, y])`). If the rows follow no such pattern (packed sequences, permutations), `ids` holds the sample
    of each index, -1 for a row that belongs to no sample.

    A tensor without dimensions has dim 0. If it belongs to one sample, `ids` holds that sample.

    Attributes:
        alternatives: other layouts that the shape of an input allows too. Only functions that know the batch dimension
            of their arguments use them.
        loose: the order of the rows depends on all samples (rows selected by a mask, or sorted), so no row may be
            selected by its index. `ids` is always given.
        loose_index: the values of the tensor are indices of loose rows. The tensor may only be used as an index of
            loose rows.
        by_rank: a loose row that was selected by its index, or a tensor that is partly filled with such rows: other
            ops refuse it until all rows are written.
    """

    dim: int
    inner: int = 1
    ids: tuple[int, ...] | None = None
    alternatives: tuple[Layout, ...] = ()
    loose: bool = False
    loose_index: bool = False
    by_rank: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a layout is part of the key of every call, and `ids` may be long
        return hash((self.dim, self.inner, self.ids, self.alternatives, self.loose, self.loose_index, self.by_rank))

    @cached_property
    def is_pattern(self) -> bool:
        """Whether the rows follow the pattern (dim, inner), and nothing else is known about them."""
        is_marked = self.loose or self.loose_index or self.by_rank
        return self.ids is None and not self.alternatives and not is_marked

    @cached_property
    def token(self) -> object | None:
        """An object that stands for the pattern in keys and is hashed by identity; None if there is no pattern."""
        return _TOKENS.setdefault((self.dim, self.inner), object()) if self.is_pattern else None

    def get_ids(self, size: int, batch: int) -> tuple[int, ...]:
        """The sample of each of the `size` indices along `dim`, -1 for none."""
        if self.ids is not None:
            return self.ids
        return tuple((j // self.inner) % batch for j in range(size))


# By dim and inner. A pattern has always the same token.
_TOKENS: dict[tuple[int, int], object] = {}


@cache
def make_pattern(dim: int, inner: int = 1) -> Layout:
    """The layout with this pattern, always the same object: keys are compared by identity first."""
    return Layout(dim, inner)


@dataclass(frozen=True)
class Reduced:
    """A sum over the samples, such as a loss: it belongs to no single sample, but no samples are mixed yet.

    Attributes:
        cause: the function that added up the samples, as part of an error message.
        place: the module where it happened, in words.
        kind: "sum", or "mean" if the sum was divided by the batch size; "unclear" if it may be either; "mixed" if it is
            a sum in one part and a mean in another; "root" if only its square is a sum: a norm. `cause` says why.
        is_assumed: the sum was scaled by a number of which nothing is known, so that other parts of the loss may show
            that `kind` is the other one.
        entries: the number of entries that were added up for each entry of the tensor, 0 if it is not known.
        sizes: the sizes of what was added up, without that of the dimension of the samples.
        uneven: if samples had different numbers of rows in the sum: each sample's number of rows, and of entries.
        counts: nothing that was added up requires grad: a number of targets, the sum of a mask or of weights, or a
            function of such numbers. It may be the divisor of a loss.
        is_inverse: with `counts`: the tensor is the inverse of such a number.
        divisors: the numbers by which a mean was divided, if the samples may have different parts of them; those that
            `counts` holds; or those by which a sum may be divided: the targets that a loss does not ignore.
    """

    cause: str
    place: str = ""
    kind: Reduction = "sum"
    entries: int = 0
    sizes: tuple[int, ...] = ()
    uneven: tuple[tuple[int, ...], ...] = ()
    counts: bool = False
    is_inverse: bool = False
    divisors: tuple[Divisor, ...] = field(default=(), compare=False)
    is_assumed: bool = False

    @property
    def is_clear(self) -> bool:
        """Whether it is known how the samples were combined."""
        return self.kind in ("sum", "mean")

    @property
    def is_share(self) -> bool:
        """Whether the sum was divided by the numbers in `divisors`."""
        return self.kind != "sum" and not self.counts and bool(self.divisors)


@dataclass(frozen=True)
class Lost:
    """It is not known which sample an entry belongs to.

    Attributes:
        cause: the reason, as part of an error message.
        place: the module where it happened, in words.
        listing: the tensor lists the values that occur in the batch (the experts that any token is sent to). A loop
            over such a list is control flow, so each of its elements is a constant.
        sized: only the size of the tensor depends on the batch: `arange(lengths.max())`, padding to the longest. Each
            entry is a constant beside samples, but a sum of the entries is not.
        imported: the tensor was made from Python numbers or by numpy. As an index it is a constant, which selects
            rows whose samples are known.
    """

    cause: str
    place: str = ""
    listing: bool = False
    sized: bool = False
    imported: bool = False


class _KnownEntries(Lost):
    """Samples are mixed, but something is known about the entries. Compared by identity."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, eq=False)
class Scattered(_KnownEntries):
    """The entries of one sample do not lie along one dimension, but the sample of each entry is known.

    Attributes:
        ids: the sample of each entry, -1 for none.
        loose, loose_index: as for a `Layout`.
    """

    ids: Tensor = field(default_factory=lambda: torch.empty(0))
    loose: bool = False
    loose_index: bool = False


@dataclass(frozen=True, eq=False)
class Divided(_KnownEntries):
    """A tensor of samples that was divided by a number of all samples: weights that add up to one.

    In a sum over the samples that number is a divisor of the loss; elsewhere it mixes the samples.
    """

    layout: Layout = field(default_factory=lambda: Layout(0))
    divisors: tuple[Divisor, ...] = ()


@dataclass(frozen=True)
class Crossed(Lost):
    """Each entry combines a row of one tensor with a row of another, along two dimensions: a matrix of all pairs.

    The entries that combine two rows of one sample, such as those on the diagonal, belong to that sample.

    Attributes:
        rows: where the samples lie in the rows of both tensors.
    """

    rows: tuple[Layout, Layout] = (Layout(0), Layout(1))


def lose_entries(where: Where | None) -> Where | None:
    """A plain `Lost` for a tensor of which entries are known; anything else as it is."""
    return Lost(where.cause, where.place) if isinstance(where, (Scattered, Divided, Crossed)) else where


# What is known about a tensor that depends on the batch; None instead of it: the tensor does not depend on the batch.
Where = Layout | Reduced | Lost
