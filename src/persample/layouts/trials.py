"""Run a call on invented values, and again with other values for some samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from persample._internal.rng import fork_rng, seed_torch
from persample.errors import raise_if_out_of_memory
from persample.layouts.call import Call
from persample.layouts.layout import Layout, Where

Results = tuple[Tensor, ...]

# The values that a call is tried on:
#   unit      between 0.1 and 0.9, which logarithms, roots and probabilities accept too
#   matrices  well-conditioned matrices, for inverses and factorisations
#   wide      normal with standard deviation 8, for functions that are constant or linear between 0.1 and 0.9
#   large     normal with standard deviation 100
#   given     the values that the call was given
# The samples must stay separate on all of them that the call accepts.
Values = Literal["unit", "matrices", "wide", "large", "given"]

_ALL_VALUES: tuple[Values, ...] = ("unit", "matrices", "wide", "large", "given")

_SCALES = {"wide": 8.0, "large": 100.0}

# The precision of trials, the first that the call accepts; None: that of the call.
PRECISIONS = (torch.float64, torch.float32, None)

# A constant with larger values is a mask that is added to scores; other values would let all entries pass.
_LARGEST_CONSTANT = 1e4


@dataclass(frozen=True)
class Trials:
    """The results of a call for some values of the samples, and for other values of all or some samples.

    Trials with other values for some samples run when they are read, one after the other: all results at once would
    take the memory of many steps.
    """

    before: Results
    all_changed: Results
    run: Callable[[Set[int]], Results]  # the results with other values for these samples
    samples: Set[int]
    depends_on_values: bool  # given values were used: all, those of large constants, or integers that stay the same

    def iterate_changed(self, result: int) -> Iterator[tuple[frozenset[int], Tensor]]:
        """Sets of samples, each followed by its complement, and one of the results if these samples are changed."""
        return ((changed, self.run(changed)[result]) for changed in _make_halves(self.samples))

    def is_conclusive(self, result: int) -> bool:
        """Whether a result ever changed when samples did."""
        before = self.before[result].nan_to_num()
        if bool(self.before[result].isnan().all()):
            return False
        others = itertools.chain([self.all_changed[result]], (after for _, after in self.iterate_changed(result)))
        return any(not torch.equal(before, after.nan_to_num()) for after in others)


def _make_halves(samples: Set[int]) -> list[frozenset[int]]:
    """Sets of samples such that, for any two samples, some set has the first but not the second one.

    >>> [sorted(half) for half in _make_halves({0, 1, 2})]
    [[1], [0, 2], [2], [0, 1]]
    """
    numbered = list(enumerate(sorted(samples)))
    halves = []
    for bit in range(max(1, (len(samples) - 1).bit_length())):
        for digit in (1, 0):
            halves.append(frozenset(n for number, n in numbered if (number >> bit) & 1 == digit))
    return halves


def run_all_trials(call: Call, invent_constants: bool, values: Sequence[Values] = _ALL_VALUES) -> list[Trials]:
    """A trial on each kind of values that the call accepts, in the highest precision that it accepts.

    `invent_constants`: arguments without samples get invented values too.
    """
    is_square = any(t.dim() > 1 and t.shape[-1] == t.shape[-2] for t in call.tensors)
    kinds = [kind for kind in values if is_square or kind != "matrices"]
    for precision in PRECISIONS:
        found = [_run_conclusive_trials(call, invent_constants, kind, precision) for kind in kinds]
        accepted = [trials for trials in found if trials is not None]
        if accepted:
            return accepted
    return []


def _run_conclusive_trials(
    call: Call, invent_constants: bool, kind: Values, precision: torch.dtype | None
) -> Trials | None:
    """The first way to change integers for which all results change, else the first that the call accepts."""
    has_integers = any(w and not t.is_floating_point() for t, w in call.pairs)
    first: Trials | None = None
    for step in (1, -1, 0) if has_integers else (1,):
        trials = _run_trials(call, invent_constants, kind, step, precision)
        if trials is not None and all(trials.is_conclusive(i) for i in range(len(trials.before))):
            return trials
        first = first or trials
    return first


def _run_trials(
    call: Call, invent_constants: bool, kind: Values, step: int, precision: torch.dtype | None
) -> Trials | None:
    """Trials on one kind of values; None if the call does not accept them. `step` is added to integers."""
    samples = call.find_samples() or {0}
    with fork_rng():
        seed_torch(0)
        given = [convert(t, precision) for t in call.tensors]
        base = [invent(t, where, invent_constants, kind) for t, where in zip(given, call.where, strict=True)]
    others = [_make_other(t, where, kind, step) for t, where in zip(base, call.where, strict=True)]

    def run(changed: Set[int]) -> Results:
        arguments = zip(base, others, call.where, strict=True)
        tensors = [_replace_samples(t, other, where, changed, call.batch) for t, other, where in arguments]
        with fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that the user did not choose
            seed_torch(1)
            return call.run(tensors)

    depends_on_values = kind == "given" or step == 0 or any(map(_is_kept, given, call.where))
    try:
        run(_make_halves(samples)[0])
        return Trials(run(set()), run(samples), run, samples, depends_on_values)
    except Exception as error:  # the function does not accept such values
        raise_if_out_of_memory(error)
        return None


def convert(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    """A tensor of numbers in this precision; integers stay as they are."""
    if precision is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().to(precision.to_complex() if tensor.is_complex() else precision)


def _is_kept(tensor: Tensor, where: Where | None) -> bool:
    """Whether a constant is so large that it keeps its values: other values would let all entries pass."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return where is None and is_number and bool((tensor.detach().abs() > _LARGEST_CONSTANT).any())


def invent(tensor: Tensor, where: Where | None, invent_constants: bool, kind: Values) -> Tensor:
    """A tensor of the same shape with invented values; integers, and constants that matter, keep their values."""
    is_invented = invent_constants or isinstance(where, Layout) or tensor.requires_grad
    if kind == "given" or not is_invented or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    if _is_kept(tensor, where):
        return tensor.detach().clone()
    if kind in _SCALES:
        return torch.randn(tensor.shape, device=tensor.device).mul_(_SCALES[kind]).to(tensor.dtype)
    values = torch.rand(tensor.shape, device=tensor.device).mul_(0.8).add_(0.1).to(tensor.dtype)
    if kind == "matrices" and tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]:
        unit = torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        return unit + (values + values.mT) * (0.1 / tensor.shape[-1])
    return values


def _make_other(tensor: Tensor, where: Where | None, kind: Values, step: int) -> Tensor:
    """Other values for a tensor with samples, in the range of its own values if possible."""
    if not isinstance(where, Layout):
        return tensor
    if tensor.dtype == torch.bool:
        return ~tensor
    rolled = tensor.flatten().roll(1).view_as(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor + step if torch.equal(rolled, tensor) else rolled
    if kind == "given" and not torch.equal(rolled, tensor):
        return rolled
    return 1.5 * tensor if kind == "matrices" else 0.9 - 0.8 * tensor


def _replace_samples(tensor: Tensor, other: Tensor, where: Where | None, samples: Set[int], batch: int) -> Tensor:
    """A copy of `tensor` with the values of `other` for these samples."""
    if not isinstance(where, Layout) or not samples:
        return tensor.clone()
    if not tensor.dim():
        return (other if set(where.ids or ()) <= samples else tensor).clone()
    is_replaced = [n in samples for n in where.get_ids(tensor.shape[where.dim], batch)]
    mask = torch.tensor(is_replaced, device=tensor.device, dtype=torch.bool)
    return torch.where(mask.view(-1, *[1] * (tensor.dim() - where.dim - 1)), other, tensor)
