"""Coupled samples: who owns the rows of a tensor in which samples are mixed, with `coupled="contributions"`.

Row n is then what the gradient of the batch receives through sample n's own activations at each use of a weight. So the
tracker need not keep samples apart. It needs one owner for each row of an activation, and any choice of owners adds up
to the gradient of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import _torch
from persample.errors import ROWS_ADVICE, SamplesMixed, get_op_name
from persample.forward.sums import mark_statistic
from persample.layouts import (
    Call,
    Crossed,
    Divided,
    Layout,
    Lost,
    Motion,
    Reduced,
    Scattered,
    Where,
    find_motion,
    get_argument,
    lose_entries,
    make_reduced,
    move_layout,
)
from persample.rules import batch_norm_of_batch

CONTRIBUTIONS = (
    "contributions: what the batch's gradient receives through the activations of each sample. The samples may "
    "influence each other, so a row need not be the gradient of a sample's own loss"
)

_KEEP_SEPARATE = (
    "Keep the samples separate (GroupNorm or LayerNorm instead of BatchNorm, or BatchNorm in eval(); statistics and "
    "attention within a sample), or say where the samples lie with "
)

# What helps where samples influence each other: part of refusals, except in private training.
COUPLED_ADVICE = f"Or ask for each sample's contribution to the gradient: coupled='contributions'. {ROWS_ADVICE}"

# The same if that was asked for, and does not help.
_ADVICE = f"Apply weights to the samples' rows in calls that do not combine these rows. {ROWS_ADVICE}"


def make_advice(layout_options: str = "batch_dim and batch_size", coupled: bool | None = None) -> str:
    """What to do about samples that are mixed, for errors.

    Args:
        layout_options: the options by which the user can say where the samples lie.
        coupled: whether samples may influence each other; None if there is no such option.
    """
    advice = f"{_KEEP_SEPARATE}{layout_options}."
    return advice if coupled is None else _ADVICE if coupled else f"{advice} {COUPLED_ADVICE}"


# The advice of a recording, by the argument `coupled`.
ADVICE = {coupled: make_advice(coupled=coupled) for coupled in (None, False, True)}


@dataclass(frozen=True)
class Statistic(Reduced):
    """A tensor in which samples are mixed, and that belongs to none: it has no parts that add up to it."""


class FirstLoss:
    """Selects the loss that a backward pass starts from. What it reaches later are statistics of the batch.

    A sum in one part and a mean in another is taken as a mean: all parts together have one gradient, that of the batch.
    """

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._last_pass = -1

    def select(self, loss: Reduced) -> Reduced | None:
        """The loss as it counts, None if the running backward pass starts from another one."""
        current = _torch.get_backward_pass()
        if current == self._last_pass:
            return None
        self._last_pass = current
        return replace(loss, kind="mean") if not loss.is_clear and self._given is None else loss


def find_coupled_motion(call: Call, results: Sequence[Tensor]) -> Motion:
    """How a call without weights moves the rows of the samples."""
    call, motion = find_owners(call, results)
    if not any(map(_is_mixed, motion.results)):
        return motion
    return Motion(tuple(_place(result, where, call) for result, where in zip(results, motion.results, strict=True)))


def find_owners(call: Call, results: Sequence[Tensor]) -> tuple[Call, Motion]:
    """How a call moves the rows of the samples, and the call with the arguments whose rows own those of the results.

    If the call combines rows of different samples, but computes row by row of one argument, the rows of that argument
    own those of the results, and its other arguments are constants. Else samples are mixed in the results.
    """
    call = own_rows(call)
    if any(isinstance(where, Layout) for where in call.where):
        _mark_statistics(call)
    if call.func is batch_norm_of_batch:
        return call, Motion((call.where[0],))
    motion = find_motion(call, results)
    if not any(map(_is_mixed, motion.results)):
        return call, _own_motion(motion)
    call = _undivide(call)
    for i, where in enumerate(call.where):
        if isinstance(where, (Layout, Scattered)):
            alone = replace(call, where=tuple(where if j == i else None for j in range(len(call.where))))
            moved = find_motion(alone, results)
            if all(isinstance(each, (Layout, Scattered)) for each in moved.results):
                return alone, _own_motion(moved)
    return call, motion


def _own_motion(motion: Motion) -> Motion:
    found = tuple(_own_loose_rows(where) for where in motion.results)
    return motion if found == motion.results else replace(motion, results=found)


def _own_loose_rows(where: Where | None) -> Where | None:
    """A layout whose rows may be selected by position: their order matters only where samples are kept apart."""
    if isinstance(where, Layout) and (where.loose or where.loose_index or where.by_rank):
        return replace(where, loose=False, loose_index=False, by_rank=False)
    return where


def own_rows(call: Call) -> Call:
    """The call with an owner for each row of its arguments, as far as they have one."""
    pairs = zip(call.tensors, call.where, strict=True)
    where = tuple(own_tensor(tensor, where, call.batch) for tensor, where in pairs)
    return call if where == call.where else replace(call, where=where)


def own_tensor(tensor: Tensor, where: Where | None, batch: int) -> Where | None:
    """The layout of a tensor; if its samples are mixed, the batch lies in the first dimension of its size."""
    if not isinstance(where, Lost) or not _is_mixed(where):
        return _own_loose_rows(where)
    if batch == 1:
        return Layout(0, ids=(0,) * (len(tensor) if tensor.dim() else 1))
    dims = [dim for dim, size in enumerate(tensor.shape) if size == batch]
    return Layout(dims[0]) if dims else Statistic(where.cause, where.place)


def _undivide(call: Call) -> Call:
    """The call as if no samples had been divided by a number of all samples: each row is still its sample's."""
    if not any(isinstance(where, Divided) for where in call.where):
        return call
    return replace(call, where=tuple(where.layout if isinstance(where, Divided) else where for where in call.where))


def scales_statistic(call: Call) -> bool:
    """Whether a call multiplies or divides what belongs to no sample, and has no parts that do."""
    return call.facts.is_bilinear and any(isinstance(where, Statistic) for where in call.where)


def prepare_use(call: Call, place: str) -> Call:
    """A use of a weight with owners for the rows of its activations.

    Raises:
        SamplesMixed: no activation has rows of samples.
    """
    call = _undivide(own_rows(call))
    if not any(isinstance(where, (Layout, Scattered)) for where in call.where):
        mixed = next(where for where in call.where if isinstance(where, (Reduced, Lost)))
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {place}, combines weights with a tensor that belongs to no single sample: "
            f"{mixed.cause}, in {mixed.place}. So no sample owns the contribution to the gradient. {_ADVICE}"
        )
    if _mark_statistics(call):  # constants beside rows of samples
        call = replace(call, where=tuple(None if isinstance(w, Reduced) else w for w in call.where))
    if call.func in (F.batch_norm, torch.batch_norm) and get_argument(call, 5, "training", default=False):
        return _use_batch_statistics(call)
    return call


def _mark_statistics(call: Call) -> bool:
    """Note that sums over the samples are combined with rows of samples; returns whether there are such sums."""
    sums = [tensor for tensor, where in zip(call.tensors, call.where, strict=True) if isinstance(where, Reduced)]
    for tensor in sums:
        mark_statistic(tensor)
    return bool(sums)


def _use_batch_statistics(call: Call) -> Call:
    """A batch norm in training mode as a function with a rule of its own."""
    args: tuple[Any, ...] = call.args
    if call.func is torch.batch_norm:
        input, weight, bias, mean, var, training, momentum, eps, _ = args
        args = (input, mean, var, weight, bias, training, momentum, eps)
    return replace(call, func=batch_norm_of_batch, args=args)


def _is_mixed(where: Where | None) -> bool:
    """Whether samples are mixed in a tensor. A list of values, or a size, that the samples share is no activation."""
    where = lose_entries(where) if isinstance(where, Crossed) else where
    is_root = isinstance(where, Reduced) and where.kind == "root"
    return is_root or (type(where) is Lost and not (where.listing or where.sized))


def _place(result: Tensor, where: Where | None, call: Call) -> Where | None:
    """The layout of a result in which samples are mixed."""
    if not isinstance(where, Lost) or not _is_mixed(where):
        return where
    owners = [(t, own) for t, own in zip(call.tensors, call.where, strict=True) if isinstance(own, Layout) and t.dim()]
    for tensor, own in owners:
        if tensor.shape == result.shape:
            return own
    for tensor, own in owners:
        dims = [dim for dim, size in enumerate(result.shape) if size == tensor.shape[own.dim]]
        if dims:
            return move_layout(own, dims[0])
    kinds = {each.kind for each in call.where if isinstance(each, Reduced)}
    kind = "mean" if kinds - {"sum"} else make_reduced(call).kind
    return Statistic(where.cause, where.place, kind)
