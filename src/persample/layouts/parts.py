"""Each sample's part of a sum over the samples, computed when it is needed: a weight that multiplies a loss needs it.

The gradient of `s` in `exp(-s) * loss` is that of each sample's part of the loss. A loss function adds up its samples
in one kernel, so the parts are computed again, from the arguments of the calls that led to the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from persample._internal.tree import map_tensors
from persample.errors import get_op_name
from persample.layouts.call import Call
from persample.layouts.ids import add_up_samples, make_sample_ids
from persample.layouts.layout import Layout, Reduced, Scattered


class NoParts(Exception):
    """The parts of a sum cannot be computed; the message says why."""


@dataclass(frozen=True, eq=False)
class Summed:
    """A call that made a sum over the samples: of samples, or of the sums in `sources`.

    Attributes:
        versions: of the tensors, when they were called with.
        sources: for each tensor of the call how it was summed, None for samples and constants.
        made: what the call made.
    """

    call: Call
    versions: tuple[int, ...]
    sources: tuple[Summed | None, ...]
    made: Reduced | None = None

    def compute_parts(self) -> Tensor:
        """`(batch, *shape)`: the part of each sample, without what belongs to none, such as an added number."""
        call = self.call
        for tensor, source, version in zip(call.tensors, self.sources, self.versions, strict=True):
            if source is None and not tensor.is_inference() and tensor._version != version:
                raise NoParts(f"an argument of {get_op_name(call.func)} has changed since")
        is_single = [isinstance(where, Layout) and not t.dim() for t, where in call.pairs]
        if any(self.sources) or any(is_single):
            return self._follow_sums(is_single)
        if call.facts.is_plain_sum or call.facts.operator == "mean":
            return _split_sum(call)
        if call.facts.has_entries:
            return self._split_loss()
        raise NoParts(f"{get_op_name(call.func)} does not tell the parts of the samples")

    def _follow_sums(self, is_single: list[bool]) -> Tensor:
        """The parts of a linear function of sums."""
        call = self.call
        parts: list[Tensor | None] = []
        for i, tensor in enumerate(call.tensors):
            source, where = self.sources[i], call.where[i]
            own = source.compute_parts() if source is not None else None
            if own is None and is_single[i] and isinstance(where, Layout):
                own = torch.zeros(call.batch, dtype=tensor.dtype, device=tensor.device)
                own[(where.ids or (0,))[0]] = tensor
            parts.append(own)

        def run(*given: Tensor) -> Tensor:
            supply = iter(given)
            pairs = zip(call.tensors, parts, strict=True)
            return call.run([t.detach() if own is None else next(supply).clone() for t, own in pairs])[0]

        given = [own for own in parts if own is not None]
        return torch.vmap(run)(*given) - run(*(torch.zeros_like(own[0]) for own in given))

    def _split_loss(self) -> Tensor:
        """The parts of a loss function, from its entries."""
        call = self.call
        if len(call.args) > 3 or call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:
            raise NoParts(f"{get_op_name(call.func)} is called with positional or legacy options")
        args, kwargs = map_tensors(Tensor.detach, (call.args, {**call.kwargs, "reduction": "none"}))
        entries = call.func(*args, **kwargs)
        where = next((where for where in call.where if isinstance(where, (Layout, Scattered))), None)
        if where is None:
            raise NoParts("it is not known which sample each entry belongs to")
        position = next(i for i, own in enumerate(call.where) if own is where)
        if isinstance(where, Layout):  # entries have no dimension of classes, and those of broadcast tensors in front
            rank = call.tensors[position].dim()
            is_dropped = entries.dim() == rank - 1
            dim = max(0, where.dim - 1) if is_dropped else where.dim + entries.dim() - rank
            where = Layout(dim, where.inner, where.ids, loose=where.loose)
        total = add_up_samples(entries, where, call.batch)
        reduction = call.kwargs.get("reduction", "mean")
        if reduction == "sum":
            return total
        return total / (len(call.tensors[position]) if reduction == "batchmean" else self._find_divisor(entries))

    def _find_divisor(self, entries: Tensor) -> float:
        if self.made is None or not self.made.is_share:
            return entries.numel()
        counts = self.made.divisors[0].count_by_sample(self.call.batch)
        if counts is None:
            raise NoParts("the number that it is divided by is not known any more")
        return math.fsum(counts.tolist())


def _split_sum(call: Call) -> Tensor:
    """The parts of a sum or a mean of entries, or of a product that adds up entries."""
    position = next((i for i, where in enumerate(call.where) if isinstance(where, (Layout, Scattered))), None)
    if position is None:
        raise NoParts(f"{get_op_name(call.func)} adds up no samples")
    tensor, where = call.tensors[position].detach(), call.where[position]
    name = call.facts.operator
    if len(call.args) == 1 and not call.kwargs and name in ("sum", "mean"):
        total = add_up_samples(tensor, where, call.batch)
        return total / tensor.numel() if name == "mean" else total
    ids = make_sample_ids(tensor, where, call.batch)
    detached = [each.detach() for each in call.tensors]
    rows = []
    for sample in range(call.batch):
        own = torch.where(ids == sample, tensor, 0)
        rows.append(call.run([*detached[:position], own, *detached[position + 1 :]])[0])
    return torch.stack(rows)
