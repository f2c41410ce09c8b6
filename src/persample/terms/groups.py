"""Groups of samples whose gradients are added up to one row, such as all examples of one user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample._internal.precision import promote, widen
from persample.terms.base import Term, find_factors, iterate_samples
from persample.terms.dense import Dense
from persample.terms.joined import Joined

# Padding to more than this many times the samples is avoided.
_MAX_PADDING = 1.5


@dataclass(frozen=True)
class Groups:
    """Which samples are added up to which row.

    A group is like a sample with more positions: `gather` puts the positions of its samples side by side, so that a
    term keeps its structure. Groups with fewer samples than others are padded with zeros. If that takes much more than
    the samples themselves, groups of similar sizes are merged apart from the others (`parts`).

    Attributes:
        rows: `(batch,)`, the row of each sample; -1 if it has none.
        count: the number of rows.
        slots: `(count, largest group)`, the samples of each row; None if each row has `largest` consecutive samples.
        is_padding: the slots without a sample; None if there are none.
        largest: the size of the largest group.
        weights: `(batch,)`, a factor for each sample; None: 1.
        parts: groups of similar sizes, with their rows among all; empty if there is no need.
    """

    rows: Tensor
    count: int
    slots: Tensor | None
    is_padding: Tensor | None
    largest: int
    weights: Tensor | None = None
    parts: Sequence[tuple[Tensor, Groups]] = ()
    has_others: bool = False  # whether there are samples without a row

    def count_samples(self) -> Tensor:
        """`(count,)`: the number of samples of each row."""
        return torch.bincount(self.rows, minlength=self.count)

    def to(self, device: torch.device) -> Groups:
        """The groups on a device."""
        if self.rows.device == device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved, parts=[(rows.to(device), part.to(device)) for rows, part in self.parts])

    def repeat(self, times: int) -> Groups:
        """The groups of a term that has the samples of several weights, one after the other."""
        if times == 1:
            return self
        batch = len(self.rows)
        slots = None if self.slots is None else torch.cat([self.slots + i * batch for i in range(times)])
        return Groups(
            rows=torch.cat([torch.where(self.rows < 0, -1, self.rows + i * self.count) for i in range(times)]),
            count=times * self.count,
            slots=slots,
            is_padding=None if self.is_padding is None else self.is_padding.repeat(times, 1),
            largest=self.largest,
            weights=None if self.weights is None else self.weights.repeat(times),
            parts=[
                (torch.cat([rows + i * self.count for i in range(times)]), part.repeat(times))
                for rows, part in self.parts
            ],
        )

    def scale(self, factor: float) -> Groups:
        """The groups with all samples multiplied by a number."""
        if factor == 1:
            return self
        weights = torch.ones_like(self.rows, dtype=torch.float64) if self.weights is None else self.weights
        weights = weights * factor
        return replace(self, weights=weights, parts=[(rows, replace(p, weights=weights)) for rows, p in self.parts])

    def gather(self, factor: Tensor) -> Tensor:
        """`(batch, t, ...)` to `(count, largest * t, ...)`; padding is zero."""
        if self.slots is None:
            return factor.unflatten(0, (self.count, self.largest)).flatten(1, 2)
        gathered = factor[self.slots]
        if self.is_padding is not None:
            gathered = gathered.masked_fill(self.is_padding.view(*self.slots.shape, *[1] * (factor.dim() - 1)), 0)
        return gathered.flatten(1, 2)

    def gather_weighted(self, factor: Tensor) -> Tensor:
        """`gather`, with each sample multiplied by its weight. A term scales one of its factors."""
        return self.gather(self._multiply(factor))

    def add_up(self, values: Tensor, samples: slice | None = None) -> Tensor:
        """`(batch, ...)` to `(count, ...)`, in float32 or wider: the sum over the samples of each row.

        Args:
            samples: the range of samples that `values` has; all by default.
        """
        rows = self.rows if samples is None else self.rows[samples]
        values = self._multiply(widen(values), samples)
        if self.has_others:
            is_own = rows >= 0
            rows, values = rows[is_own], values[is_own]
        return values.new_zeros(self.count, *values.shape[1:]).index_add_(0, rows, values)

    def _multiply(self, values: Tensor, samples: slice | None = None) -> Tensor:
        if self.weights is None:
            return values
        weights = self.weights if samples is None else self.weights[samples]
        values, weights = promote(widen(values), weights.to(widen(values).abs().dtype))
        return values * weights.view(-1, *[1] * (values.dim() - 1))


def add_samples(term: Term, batch: int) -> Term:
    """The term with samples that have no gradient after its own, so that there are `batch` in all."""
    if term.batch == batch:
        return term
    device = next(find_factors(term)).device
    return merge_samples(term, make_groups(torch.arange(term.batch, device=device), batch))


def make_groups(rows: Tensor, count: int, weights: Tensor | None = None) -> Groups:
    """Groups from the row of each sample; -1: the sample has none.

    >>> groups = make_groups(torch.tensor([2, 0, 2]), count=3)
    >>> groups.gather(torch.tensor([[1.0], [2.0], [3.0]]))
    tensor([[2., 0.],
            [0., 0.],
            [1., 3.]])
    """
    is_own = rows >= 0
    sizes = torch.bincount(rows[is_own], minlength=count)
    largest = int(sizes.max()) if count and len(rows) else 0
    own = int(is_own.sum())
    if own == len(rows) == count * largest and bool((rows.diff() >= 0).all()):
        return Groups(rows, count, None, None, largest, weights)
    order = rows.argsort(stable=True)[len(rows) - own :]
    starts = sizes.cumsum(0) - sizes
    places = torch.arange(own, device=rows.device) - starts[rows[order]]
    slots = rows.new_zeros(count, largest)
    slots[rows[order], places] = order
    is_padding = torch.arange(largest, device=rows.device) >= sizes[:, None]
    padding = is_padding if bool(is_padding.any()) else None
    whole = Groups(rows, count, slots, padding, largest, weights, has_others=own < len(rows))
    if count * largest <= _MAX_PADDING * own:
        return whole
    return replace(whole, parts=_split_by_size(whole, slots, is_padding, sizes))


def _split_by_size(whole: Groups, slots: Tensor, is_padding: Tensor, sizes: Tensor) -> list[tuple[Tensor, Groups]]:
    """Groups with at most 1, 2, 4, 8, ... samples, which are padded to less than twice their samples."""
    found, limit, is_left = [], 1, torch.ones_like(sizes, dtype=torch.bool)
    while bool(is_left.any()):
        own = (is_left & (sizes <= limit)).nonzero().squeeze(1)
        if len(own):
            largest = int(sizes[own].max())
            numbers = torch.full_like(sizes, -1)
            numbers[own] = torch.arange(len(own), device=own.device)
            part = Groups(
                rows=torch.where(whole.rows < 0, -1, numbers[whole.rows]),
                count=len(own),
                slots=slots[own, :largest],
                is_padding=is_padding[own, :largest],
                largest=largest,
                weights=whole.weights,
                has_others=True,
            )
            found.append((own, part))
            is_left[own] = False
        limit *= 2
    return found


def merge_samples(term: Term, groups: Groups) -> Term:
    """The term with one row for each group: the sum of the gradients of its samples."""
    if groups.parts and not isinstance(term, Dense):
        return Joined([merge_samples(term, part) for _, part in groups.parts], [rows for rows, _ in groups.parts])
    merged = term.merge_samples(groups)
    if merged is not None:
        return merged
    total: Tensor | None = None
    for samples, (block,) in iterate_samples(term):
        part = groups.add_up(block, samples)
        total = part if total is None else total.add_(part)
    assert total is not None
    return Dense(total)


def merge_each(terms: Sequence[Term], groups: Groups) -> list[Term]:
    """`merge_samples` of several terms."""
    return [merge_samples(term, groups) for term in terms]
