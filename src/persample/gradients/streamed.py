"""Recordings that know beforehand what will be asked: terms are reduced when they arrive, and freed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from persample._internal import host, tracing
from persample._internal.memory import find_free_memory
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients.base import NotKept, RecordedGradients
from persample.gradients.clipping import Bound, compute_clip_factors
from persample.gradients.joined import JoinedRows, SmallStacks
from persample.gradients.matrix import PerSampleGradients
from persample.gradients.measuring import compact_stack, measure_stacks
from persample.gradients.reduction import LossReduction
from persample.gradients.squared_norms import NOT_FINITE, NonFinite, SquaredNorms
from persample.gradients.stack import Stack
from persample.gradients.units import UnitOptions
from persample.terms import Term, find_factors

# Bytes of factors that one pass may always keep, and that it may keep if the free memory is not known.
_SMALL, _UNKNOWN = 2**28, 2**30

# Entries of factors that are measured together.
_MAX_WAITING = 2**20

_DIFFERENT_PASSES = (
    "The two backward passes saw different gradients, so the norms of the first do not bound the rows of the second. "
    "Hooks or functions that change from call to call cause this, and checkpoints that draw other random numbers when "
    "they recompute (preserve_rng_state=False). Use passes=1."
)


class _Streamed(RecordedGradients):
    """Keeps the squared norms by parameter, and what a subclass adds."""

    is_early = True
    _kept: str

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction,
        processes: Processes,
        nonfinite: NonFinite = "raise",
        units: UnitOptions | None = None,
    ) -> None:
        super().__init__(parameters, loss_reduction, processes, nonfinite, units)
        self._squares = SquaredNorms(nonfinite)
        self._used: set[str] = set()  # the parameters that have squared norms

    def _receive(self, name: str, term: Term) -> None:
        self._receive_stack(Stack([name], term))

    def _note_used(self, stack: Stack) -> None:
        if not self._used.isdisjoint(stack.names):
            self._refuse_second_pass()
        self._used.update(stack.names)

    def _measure_and_settle(self, stacks: Sequence[Stack], summed: bool = False, least: float = 0.0) -> None:
        """Keep reliable squared norms of terms that will not be kept. Below `least`, they need not be reliable."""
        own = SquaredNorms(self._nonfinite_mode)
        measure_stacks(stacks, own, summed=summed)
        if not own.is_late:
            kept = {name: stack for stack in stacks for name in stack.names}
            found = own.find_doubtful_parts(dict.fromkeys(own.names, least) if least else None)
            for name, doubtful in found.items():
                own.settle(doubtful, [name], kept[name].compute_exact_row)
        self._squares.extend(own)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised an AttributeError: raise that one again
            return object.__getattribute__(self, name)
        if not name.startswith("_") and hasattr(PerSampleGradients, name):
            raise NotKept(
                f"This recording has kept {self._kept} only, which does not answer {name}(). Record with "
                "keep='everything'."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:
        if self._is_empty:
            return f"{type(self).__name__}(nothing recorded yet)"
        described = f"{self._describe_rows()}, {self._describe_reduction()}"
        lines = [f"{type(self).__name__}({described}{self._describe_nonfinite(len(self._squares.nonfinite))}"]
        for name, p in self._parameters.items():
            lines.append(f"  {name}: {tuple(p.shape)} {self._describe_term(name)}")
        return "\n".join([*lines, *self._describe_verification()])

    def _describe_term(self, name: str) -> str:
        return "norms only" if name in self._used else "not used"

    def __getitem__(self, sample: int) -> NoReturn:
        raise NotKept(f"This recording has kept {self._kept} only, and no rows. Record with keep='everything'.")

    def _settle_rows(self) -> SquaredNorms:
        self._check_done()
        if self._nonfinite_mode == "raise":
            self._squares.require_finite()
        self._clear_nonfinite()
        return self._squares

    def _settle_parts(self) -> SquaredNorms:
        return self._settle_rows()

    def _find_nonfinite(self) -> set[int]:
        return self._squares.nonfinite

    def _clear_nonfinite(self) -> Tensor | None:
        """Set the squared norms of samples that are left out to zero; returns their mask, None if there are none."""
        return self._squares.clear_nonfinite() if self._nonfinite_mode == "zero" else None

    def _refuse_second_pass(self) -> NoReturn:
        raise PerSampleError(
            f"A second backward pass reached weights in a recording that keeps {self._kept} only: the norm of a sum of "
            "two passes cannot be computed from the two norms. Add the losses before backward(), or record with "
            "keep='everything'."
        )


class StreamedNorms(_Streamed):
    """The norms, and nothing else: `record(model, keep="norms")`.

    >>> import persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, keep="norms") as grads:
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> grads.norms().shape
    torch.Size([5])
    """

    _kept = "norms"

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction,
        processes: Processes,
        nonfinite: NonFinite = "raise",
        units: UnitOptions | None = None,
    ) -> None:
        super().__init__(parameters, loss_reduction, processes, nonfinite, units)
        self._squared_sums: dict[str, Tensor] = {}  # by name: of the sum of the rows, before they are scaled
        self._has_sums = False
        self._waiting: list[Stack] = []  # small terms, which are measured together at the end of the pass
        self._waiting_entries = 0
        self._receivers: list[Callable[[Stack], None]] = []

    def pass_terms_to(self, receive: Callable[[Stack], None]) -> None:
        """Call a function with each term that arrives from now on, for an answer that has to be computed at once."""
        self._receivers.append(receive)

    def _receive_stack(self, stack: Stack) -> None:
        self._note_used(stack)
        if self._receivers:
            compact_stack(stack)
        entries = sum(factor.numel() for factor in find_factors(stack.term))
        self._waiting.append(stack)
        self._waiting_entries += entries
        if self._waiting_entries > _MAX_WAITING:
            self._measure_waiting()
        if self._split_units is not None and self._has_sums:  # the rows are not those of the samples that are here
            for name, total in stack.sum(torch.ones(self.row_count, device=self._device)).items():
                self._squared_sums[name] = total.abs().square().sum(dtype=torch.float64)
        for receive in self._receivers:
            receive(stack)

    def note_sum(self, parameter: Tensor, term: Term, total: Tensor) -> None:
        """Note the sum over the samples of a parameter's term, before it is scaled. Only its norm is kept."""
        self._has_sums = True
        if (name := self._names.get(id(parameter))) is None or self._split_units is not None:
            return
        if self._units is not None and self._units.reduction == "mean":  # the rows do not add up to the sum of samples
            total = self._merge(term).sum(torch.ones(self.row_count, device=total.device))
        self._squared_sums[name] = total.abs().square().sum(dtype=torch.float64)

    def finish(self) -> None:
        """Note that a backward pass has ended: the norms are complete."""
        super().finish()
        self._measure_waiting()
        self._squares.note_nonfinite()

    def _measure_waiting(self) -> None:
        waiting, self._waiting, self._waiting_entries = self._waiting, [], 0
        self._measure_and_settle(waiting)

    def norm_of_sum(self) -> Tensor:
        """The norm of the sum of the rows of this process. Requires `keep_grad`, which computes the sum anyway."""
        self._check_done()
        if not self._has_sums:
            raise NotKept("This recording has not added up the rows. Record with keep_grad=True, or keep='everything'.")
        if self._nonfinite_mode == "raise":
            self._squares.require_finite()
        if self._nonfinite_mode == "zero" and self._squares.nonfinite:
            raise NotKept(
                f"The sum that this recording has kept contains {len(self._squares.nonfinite)} {self._row_kind} that "
                "are not finite. Record with keep='everything' to leave them out."
            )
        total = sum(self._squared_sums.values(), torch.zeros((), dtype=torch.float64, device=self._device))
        return total.sqrt() * self._scale


class StreamedClip(_Streamed):
    """The norms and the clipped sum: `record(model, keep="clip", max_norm=1.0)`.

    With one backward pass, the factors are kept until the pass has ended and are then reduced. With two passes nothing
    is kept: the first computes the norms, the second, over the same graph, the sum of the scaled rows.

    >>> import persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, keep="clip", max_norm=1.0) as grads:
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> grads.clip()["weight"].shape, grads.passes
    (torch.Size([2, 3]), 1)
    """

    _kept = "clip"

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction,
        processes: Processes,
        bound: Bound,
        nonfinite: NonFinite = "raise",
        units: UnitOptions | None = None,
    ) -> None:
        super().__init__(parameters, loss_reduction, processes, nonfinite, units)
        self.max_norm = bound.max_norm
        self.passes: int | None = bound.passes
        self._bound = bound
        if isinstance(self.max_norm, Mapping):
            wrong = sorted(self.max_norm.keys() ^ self._parameters.keys())
            if wrong:
                raise PerSampleError(f"max_norm must have a bound for each recorded parameter; it differs in {wrong}.")
        self._stacks: list[Stack] = []
        self._is_left_out: Tensor | None = None  # mask of the samples that are not finite
        self._small = SmallStacks()
        self._joined: JoinedRows | None = None  # whose squared norms are computed if they are asked for
        self._weights: dict[str, Tensor] | None = None  # by name: what each row is multiplied by
        self._second_squares = SquaredNorms("keep")  # of the second pass, to be compared with the first
        self._clipped: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}  # by name, before clipping, if the recording keeps them
        self._totals: dict[str, Tensor] | None = None
        self._versions: list[int] = []  # of the totals when they were returned
        self._is_own = False  # whether the totals are of this process only
        self._reason = ""
        self._passes_done = 0

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n  clipped at {self.max_norm} in {self.describe_passes()}"

    def describe_passes(self) -> str:
        """The number of backward passes, and why it was chosen."""
        return f"{self.passes or 'no'} backward pass{'es' if self.passes == 2 else ''}{self._reason}"

    # ---- filling ----

    @property
    def is_complete(self) -> bool:
        """Whether all backward passes have ended."""
        return self._passes_done == self.passes

    @property
    def is_first_of_two(self) -> bool:
        """Whether the running backward pass is the one for the norms only."""
        return self.passes == 2 and self._weights is None

    def run_backward(self, run: Callable[..., Any], anchor: Tensor, factor_bytes: int) -> None:
        """Run a call of `loss.backward()`; before it, if there are two passes, one that reaches the weights only."""
        if self._choose_passes(factor_bytes) == 2:
            run(retain_graph=True, inputs=[anchor])
        run()

    def _choose_passes(self, factor_bytes: int) -> int:
        """The number of backward passes: one, unless the factors that it keeps would take too much memory.

        Two passes keep the whole graph for the second one, so that they save no memory where one pass fits. The limit
        is `memory` bytes or, without it, half of what is free now on the devices of the parameters.
        """
        if self.passes is None:
            allowed = self._find_allowed_bytes(factor_bytes)
            # Processes that share units wait for each other in each pass.
            find_any = self._processes.find_largest if self._split_units is None else self._processes.count
            self.passes = 2 if find_any(int(factor_bytes > allowed)) else 1
            self._reason = f": {factor_bytes} bytes to keep, {allowed} allowed"
        return self.passes

    def _find_allowed_bytes(self, factor_bytes: int) -> int:
        if self._bound.memory is not None:
            return self._bound.memory
        if factor_bytes <= _SMALL:  # not worth a look at the system
            return _SMALL
        free = find_free_memory(p.device for p in self._parameters.values())
        return _UNKNOWN if free is None else free // 2

    def _receive_stack(self, stack: Stack) -> None:
        if self._passes_done >= (self.passes or 1):
            self._refuse_second_pass()
        if self._weights is not None:
            self._second_squares.add(stack.names, *stack.measure())
            for name in stack.names if self._squares.exact else ():  # as in the first pass, to be compared with it
                settled = self._squares.list_settled(name)
                self._second_squares.settle(settled, [name], stack.compute_exact_row)
            self._add_clipped(stack, self._weights)
        elif self.passes == 2:
            self._note_used(stack)
            self._measure_and_settle([stack], summed=True, least=self._find_least_square(stack.names))
        else:
            self._note_used(stack)
            if not self._can_join or not self._small.add(stack):
                compact_stack(stack)  # frees the factors
                self._stacks.append(stack)

    @property
    def _can_join(self) -> bool:
        """Whether the rows of small terms may be joined: no answer needs the parts of a row by themselves."""
        return not (isinstance(self.max_norm, Mapping) or self._bound.keeps_rows or tracing.get_trace() is not None)

    def _find_least_square(self, names: Iterable[str]) -> float:
        """Upper bound of the rounding error of a squared norm of one parameter's part of a row."""
        if self._bound.stabiliser:
            return 0.0
        if isinstance(self.max_norm, Mapping):
            bound = min(self.max_norm[name] for name in names)
        else:
            bound = self.max_norm / math.sqrt(len(self._parameters))
        return (bound / self.batch_size) ** 2  # the rows are scaled by the batch size at most

    def finish(self) -> None:
        """Note that a backward pass has ended: the norms are complete, so the clipped sum can be computed."""
        super().finish()
        self._passes_done += 1
        if self.passes is None:
            self.passes, self._reason = 1, ": loss.backward() was not called inside the block"
        if self.passes == 2 and self._passes_done == 2:
            self._compare_passes()
        if self._weights is None:
            if self.passes == 2:
                self._squares.note_nonfinite()
            elif self._measure_kept_terms():
                return
            self._is_left_out = self._clear_nonfinite()
            self._weights = self._compute_weights()
            if self._joined is not None:
                self._add_clipped(self._joined, self._weights)
                self._joined = None
            while self._stacks:  # the factors of each are freed before the next sum
                self._add_clipped(self._stacks.pop(), self._weights)

    def _measure_kept_terms(self) -> bool:
        """Compute the squared norms of all terms of one pass; True if that has answered everything."""
        joined = self._small.join(self._stacks)
        measure_stacks(self._stacks, self._squares, compact=True)
        if joined is not None and not self._stacks and self._clip_joined(joined):
            return True
        kept: dict[str, Stack | JoinedRows] = {name: stack for stack in self._stacks for name in stack.names}
        if joined is not None:
            self._squares.add_joined(joined)
            self._joined = joined
            kept |= dict.fromkeys(joined.names, joined)
        if kept and not self._squares.is_late:
            self._settle_kept_terms(kept)
        return False

    def _clip_joined(self, joined: JoinedRows) -> bool:
        """Compute the clipped sum of small terms, which are all there is; False if the options ask for more."""
        if self._bound.stabiliser or isinstance(self.max_norm, Mapping):
            return False
        norms = joined.compute_norms()
        is_finite = joined.find_finite(norms)
        is_late = host.decides_late(norms.device)
        if (is_late and self._nonfinite_mode == "zero") or not (is_late or all(host.read_numbers(is_finite))):
            if self._nonfinite_mode == "keep":
                return False
            self._squares.note_cleared(~is_finite)
            joined = joined.clear_samples(~is_finite)
            norms = joined.compute_norms()
        elif is_late and self._nonfinite_mode == "raise":
            host.require(is_finite.all(), NOT_FINITE)
        # The norm of a row is `scale` times as large, and so is the row.
        weights = norms.reciprocal_().mul_(self.max_norm).clamp_(max=self._scale)
        self._clipped = joined.sum(weights)
        self._weights, self._joined = {}, joined
        return True

    def _settle_rows(self) -> SquaredNorms:
        if self._joined is not None:
            self._squares.add_joined(self._joined)
            self._joined = None
        return super()._settle_rows()

    def _compare_passes(self) -> None:
        """Refuse two passes with different gradients: the factors of the first do not bound the rows of the second.

        Norms far below the bound (or the stabiliser) may differ: they may be rounding errors alone, as the gradient of
        a bias that a norm layer removes, and some kernels add up in another order in each call.
        """
        second, self._second_squares = self._second_squares, SquaredNorms("keep")
        if not self._squares.names:
            return
        before, after = self._list_bounded_norms(self._squares), self._list_bounded_norms(second)
        bounds = self.max_norm if isinstance(self.max_norm, Mapping) else {"": self.max_norm}
        if before.keys() != after.keys():
            raise PerSampleError(_DIFFERENT_PASSES)
        closeness = []
        for name, norms in before.items():
            least = 5e-5 * (self._bound.stabiliser or bounds[name]) / self._scale
            is_compared = norms.isfinite() if self._is_left_out is None else norms.isfinite() & ~self._is_left_out
            closeness.append((torch.isclose(norms, after[name], rtol=5e-5, atol=least) | ~is_compared).all())
        is_same = torch.stack(closeness).all()
        if self._squares.is_late:
            host.require(is_same, _DIFFERENT_PASSES)
        elif not all(host.read_numbers(is_same)):
            self._clipped.clear()
            raise PerSampleError(_DIFFERENT_PASSES)

    def _list_bounded_norms(self, squares: SquaredNorms) -> dict[str, Tensor]:
        """The norms that have a bound: those of each parameter's part by name, or those of the whole rows."""
        if isinstance(self.max_norm, Mapping):
            return squares.compute_part_norms(self._find_least(squares))
        return {"": squares.compute_norms()} if squares.names else {}

    def _settle_kept_terms(self, kept: Mapping[str, Stack | JoinedRows]) -> None:
        """Make the squared norms reliable where the bound needs it."""
        squares = self._squares
        if isinstance(self.max_norm, Mapping):
            found = squares.find_doubtful_parts(self._find_least(squares))
            doubtful = sorted({n for samples in found.values() for n in samples})
        else:
            doubtful = squares.find_doubtful(None if self._bound.stabiliser else (self.max_norm / self._scale) ** 2)
        squares.settle(doubtful, squares.names, lambda name, n: kept[name].compute_exact_row(name, n))

    def _find_least(self, squares: SquaredNorms) -> dict[str, float] | None:
        """By name: the squared norms below which rounding does not matter, as such rows are not clipped."""
        if self._bound.stabiliser or not isinstance(self.max_norm, Mapping):
            return None
        return {name: (self.max_norm[name] / self._scale) ** 2 for name in squares.names}

    def _compute_weights(self) -> dict[str, Tensor]:
        """By name: what each row is multiplied by, with 0 for a row that is not finite."""
        squares, stabiliser = self._squares, self._bound.stabiliser
        if isinstance(self.max_norm, Mapping):
            parts = squares.compute_part_norms(self._find_least(squares))
            return {
                name: compute_clip_factors(norms * self._scale, self.max_norm[name], stabiliser) * self._scale
                for name, norms in parts.items()
            }
        if not squares.names:
            return {}
        if stabiliser is None:
            return dict.fromkeys(squares.names, squares.compute_clip_weights(self.max_norm, self._scale))
        norms = squares.compute_norms() * self._scale
        return dict.fromkeys(squares.names, compute_clip_factors(norms, self.max_norm, stabiliser) * self._scale)

    def _add_clipped(self, stack: Stack | JoinedRows, weights: Mapping[str, Tensor]) -> None:
        """Compute the clipped sums of the parameters of a stack."""
        squares = self._squares
        if self._is_left_out is not None:  # zero times infinity would be NaN
            stack = stack.clear_samples(self._is_left_out)
        if isinstance(stack, Stack) and self._bound.keeps_rows:
            self.rows.update({name: term.dense() * self._scale for name, term in stack.split()})
        if isinstance(stack, Stack) and isinstance(self.max_norm, Mapping):
            for name, term in stack.split():
                self._clipped.update(Stack([name], term).sum(weights[name], squares.exact))
        else:
            self._clipped.update(stack.sum(weights[stack.names[0]], squares.exact))

    # ---- the answer ----

    def clip(self, max_norm: float | None = None, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the clipped sum.

        Args:
            max_norm: the bound that the recording was given, or None.
            per_parameter: must be False; give `record` a bound for each parameter instead.
            own: sum over the rows of this process only, without communication.
        """
        self._check_done()
        if self._nonfinite_mode == "raise":
            self._squares.require_finite()
        if self.batch_size and self.passes == 2 and self._passes_done < 2:
            raise PerSampleError("Two passes need loss.backward() to be called inside the block, and it was not.")
        if per_parameter or max_norm not in (None, self.max_norm):
            raise PerSampleError(f"This recording has kept the sum clipped at {self.max_norm} only.")
        if self._totals is None:
            clipped, self._clipped = self._clipped, {}
            if len(clipped) != len(self._parameters):
                for name in self._parameters.keys() - clipped.keys():
                    clipped[name] = torch.zeros_like(self._parameters[name])
            self._totals = self._add_all_over_processes({name: clipped[name] for name in self._parameters}, own)
            self._versions = [total._version for total in self._totals.values()]
            self._is_own = own
            return dict(self._totals)
        if own != self._is_own:
            raise PerSampleError(f"clip(own={self._is_own}) was called before; clip(own={own}) is no longer available.")
        if [total._version for total in self._totals.values()] != self._versions:
            raise PerSampleError("The clipped sum that clip() returned was changed in place; there is no other copy.")
        return {name: total.clone() for name, total in self._totals.items()}
