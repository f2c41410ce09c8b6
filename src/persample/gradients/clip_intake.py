"""The clipped sum, in one backward pass or in two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from persample._internal import host, tracing
from persample._internal.memory import find_free_memory
from persample.errors import PerSampleError
from persample.gradients.clipping import Bound, compute_clip_factors
from persample.gradients.intake import RecordedBatch
from persample.gradients.squared_norms import NOT_FINITE, SquaredNorms, compact_stack, measure_stacks
from persample.gradients.stack import JoinedRows, SmallStacks, Stack
from persample.gradients.streamed_norms import Streamed

# Bytes of factors that one pass may always keep, and that it may keep if the free memory is not known.
_SMALL, _UNKNOWN = 2**28, 2**30

_DIFFERENT_PASSES = (
    "The two backward passes saw different gradients, so the norms of the first do not bound the rows of the second. "
    "Hooks or functions that change from call to call cause this, and checkpoints that draw other random numbers when "
    "they recompute (preserve_rng_state=False). Use passes=1."
)


class BackwardCount:
    """The number of backward passes: as given, else one, unless the factors that it keeps take too much memory.

    Two passes keep the whole graph for the second one, so that they save no memory where one pass fits. The limit is
    `memory` bytes or, without it, half of what is free now on the devices of the parameters.

    Attributes:
        count: one or two, None if it is not decided yet.
        done: the passes that have ended.
    """

    def __init__(self, count: int | None, memory: int | None) -> None:
        self.count, self.done = count, 0
        self._memory, self._reason = memory, ""

    def choose(self, factor_bytes: int, devices: Iterable[torch.device], find_any: Callable[[int], int]) -> int:
        """Decide. `find_any` returns a positive number if any process passes one to it: all decide alike."""
        if self.count is None:
            allowed = self._find_allowed_bytes(factor_bytes, devices)
            self.count = 2 if find_any(int(factor_bytes > allowed)) else 1
            self._reason = f": {factor_bytes} bytes to keep, {allowed} allowed"
        return self.count

    def _find_allowed_bytes(self, factor_bytes: int, devices: Iterable[torch.device]) -> int:
        if self._memory is not None:
            return self._memory
        if factor_bytes <= _SMALL:  # not worth a look at the system
            return _SMALL
        free = find_free_memory(devices)
        return _UNKNOWN if free is None else free // 2

    def end_pass(self) -> None:
        """Note that a pass has ended."""
        self.done += 1
        if self.count is None:
            self.count, self._reason = 1, ": loss.backward() was not called inside the block"

    def describe(self) -> str:
        """The number of passes, and why it was chosen."""
        return f"{self.count or 'no'} backward pass{'es' if self.count == 2 else ''}{self._reason}"


class ClipIntake(Streamed):
    """Keeps the norms and the clipped sum.

    Attributes:
        clipped_rows: by name, the rows before clipping, if the recording keeps them.
    """

    kept = "clip"

    def __init__(self, batch: RecordedBatch, bound: Bound) -> None:
        super().__init__(batch)
        self.max_norm, self._bound = bound.max_norm, bound
        self.passes = BackwardCount(bound.passes, bound.memory)
        if isinstance(self.max_norm, Mapping):
            wrong = sorted(self.max_norm.keys() ^ self.parameters.keys())
            if wrong:
                raise PerSampleError(f"max_norm must have a bound for each recorded parameter; it differs in {wrong}.")
        self._stacks: list[Stack] = []
        self._is_left_out: Tensor | None = None  # mask of the samples that are not finite
        self._small = SmallStacks()
        self._joined: JoinedRows | None = None  # whose squared norms are computed if they are asked for
        self._weights: dict[str, Tensor] | None = None  # by name: what each row is multiplied by
        self._second_squares = SquaredNorms("keep")  # of the second pass, to be compared with the first
        self._clipped: dict[str, Tensor] = {}
        self.clipped_rows: dict[str, Tensor] = {}

    # ---- filling ----

    @property
    def is_complete(self) -> bool:
        """Whether all backward passes have ended."""
        return self.passes.done == self.passes.count

    @property
    def is_first_of_two(self) -> bool:
        """Whether the running backward pass is the one for the norms only."""
        return self.passes.count == 2 and self._weights is None

    def needs_two_passes(self, factor_bytes: int) -> bool:
        processes, devices = self.rows.processes, [p.device for p in self.parameters.values()]
        # Processes that share units wait for each other in each pass.
        find_any = processes.find_largest if self.rows.split is None else processes.count
        return self.passes.choose(factor_bytes, devices, find_any) == 2

    def _receive_stack(self, stack: Stack) -> None:
        if self.passes.done >= (self.passes.count or 1):
            self.refuse_second_pass()
        if self._weights is not None:
            self._second_squares.add(stack.names, *stack.measure())
            for name in stack.names if self.squares.exact else ():  # as in the first pass, to be compared with it
                settled = self.squares.list_settled(name)
                self._second_squares.settle(settled, [name], stack.compute_exact_row)
            self._add_clipped(stack, self._weights)
        elif self.passes.count == 2:
            self.note_used(stack)
            self.measure_and_settle([stack], summed=True, least=self._find_least_square(stack.names))
        else:
            self.note_used(stack)
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
            bound = self.max_norm / math.sqrt(len(self.parameters))
        return (bound / self.rows.batch_size) ** 2  # the rows are scaled by the batch size at most

    def finish(self) -> None:
        """Note that a backward pass has ended: the norms are complete, so the clipped sum can be computed."""
        super().finish()
        self.passes.end_pass()
        if self.passes.count == self.passes.done == 2:
            self._compare_passes()
        if self._weights is None:
            if self.passes.count == 2:
                self.squares.note_nonfinite()
            elif self._measure_kept_terms():
                return
            self._is_left_out = self.clear_nonfinite()
            self._weights = self._compute_weights()
            if self._joined is not None:
                self._add_clipped(self._joined, self._weights)
                self._joined = None
            while self._stacks:  # the factors of each are freed before the next sum
                self._add_clipped(self._stacks.pop(), self._weights)

    def _measure_kept_terms(self) -> bool:
        """Compute the squared norms of all terms of one pass; True if that has answered everything."""
        joined = self._small.join(self._stacks)
        measure_stacks(self._stacks, self.squares, compact=True)
        if joined is not None and not self._stacks and self._clip_joined(joined):
            return True
        kept: dict[str, Stack | JoinedRows] = {name: stack for stack in self._stacks for name in stack.names}
        if joined is not None:
            self.squares.add_joined(joined)
            self._joined = joined
            kept |= dict.fromkeys(joined.names, joined)
        if kept and not self.squares.is_late:
            self._settle_kept_terms(kept)
        return False

    def _clip_joined(self, joined: JoinedRows) -> bool:
        """Compute the clipped sum of small terms, which are all there is; False if the options ask for more."""
        if self._bound.stabiliser or isinstance(self.max_norm, Mapping):
            return False
        norms = joined.compute_norms()
        is_finite = joined.find_finite(norms)
        is_late = host.decides_late(norms.device)
        if (is_late and self.nonfinite == "zero") or not (is_late or all(host.read_numbers(is_finite))):
            if self.nonfinite == "keep":
                return False
            self.squares.note_cleared(~is_finite)
            joined = joined.clear_samples(~is_finite)
            norms = joined.compute_norms()
        elif is_late and self.nonfinite == "raise":
            host.require(is_finite.all(), NOT_FINITE)
        weights = compute_clip_factors(norms, self.max_norm, scale=self.scale)
        self._clipped = joined.sum(weights)
        self._weights, self._joined = {}, joined
        return True

    def settle_rows(self) -> SquaredNorms:
        if self._joined is not None:
            self.squares.add_joined(self._joined)
            self._joined = None
        return super().settle_rows()

    def _compare_passes(self) -> None:
        """Refuse two passes with different gradients: the factors of the first do not bound the rows of the second.

        Norms far below the bound (or the stabiliser) may differ: they may be rounding errors alone, as the gradient of
        a bias that a norm layer removes, and some kernels add up in another order in each call.
        """
        second, self._second_squares = self._second_squares, SquaredNorms("keep")
        if not self.squares.names:
            return
        before, after = self._list_bounded_norms(self.squares), self._list_bounded_norms(second)
        bounds = self.max_norm if isinstance(self.max_norm, Mapping) else {"": self.max_norm}
        if before.keys() != after.keys():
            raise PerSampleError(_DIFFERENT_PASSES)
        closeness = []
        for name, norms in before.items():
            least = 5e-5 * (self._bound.stabiliser or bounds[name]) / self.scale
            is_compared = norms.isfinite() if self._is_left_out is None else norms.isfinite() & ~self._is_left_out
            closeness.append((torch.isclose(norms, after[name], rtol=5e-5, atol=least) | ~is_compared).all())
        is_same = torch.stack(closeness).all()
        if self.squares.is_late:
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
        squares = self.squares
        if isinstance(self.max_norm, Mapping):
            found = squares.find_doubtful_parts(self._find_least(squares))
            doubtful = sorted({n for samples in found.values() for n in samples})
        else:
            doubtful = squares.find_doubtful(None if self._bound.stabiliser else (self.max_norm / self.scale) ** 2)
        squares.settle(doubtful, squares.names, lambda name, n: kept[name].compute_exact_row(name, n))

    def _find_least(self, squares: SquaredNorms) -> dict[str, float] | None:
        """By name: the squared norms below which rounding does not matter, as such rows are not clipped."""
        if self._bound.stabiliser or not isinstance(self.max_norm, Mapping):
            return None
        return {name: (self.max_norm[name] / self.scale) ** 2 for name in squares.names}

    def _compute_weights(self) -> dict[str, Tensor]:
        """By name: what each row is multiplied by, with 0 for a row that is not finite."""
        squares, stabiliser, scale = self.squares, self._bound.stabiliser, self.scale
        if isinstance(self.max_norm, Mapping):
            parts = squares.compute_part_norms(self._find_least(squares)).items()
            return {n: compute_clip_factors(norms, self.max_norm[n], stabiliser, scale) for n, norms in parts}
        if not squares.names:
            return {}
        if stabiliser is None:
            return dict.fromkeys(squares.names, squares.compute_clip_weights(self.max_norm, scale))
        weights = compute_clip_factors(squares.compute_norms(), self.max_norm, stabiliser, scale)
        return dict.fromkeys(squares.names, weights)

    def _add_clipped(self, stack: Stack | JoinedRows, weights: Mapping[str, Tensor]) -> None:
        """Compute the clipped sums of the parameters of a stack."""
        squares = self.squares
        if self._is_left_out is not None:  # zero times infinity would be NaN
            stack = stack.clear_samples(self._is_left_out)
        if isinstance(stack, Stack) and self._bound.keeps_rows:
            self.clipped_rows.update({name: term.dense() * self.scale for name, term in stack.split()})
        if isinstance(stack, Stack) and isinstance(self.max_norm, Mapping):
            for name, term in stack.split():
                self._clipped.update(Stack([name], term).sum(weights[name], squares.exact))
        else:
            self._clipped.update(stack.sum(weights[stack.names[0]], squares.exact))

    # ---- the answer ----

    def check_finished(self) -> None:
        """Raise if the clipped sum is not complete."""
        self.check_done()
        if self.nonfinite == "raise":
            self.squares.require_finite()
        if self.rows.batch_size and self.passes.count == 2 and self.passes.done < 2:
            raise PerSampleError("Two passes need loss.backward() to be called inside the block, and it was not.")

    def take_clipped_sum(self) -> dict[str, Tensor]:
        """`{name: shape}`: the clipped sum of this process, which is not kept any longer."""
        clipped, self._clipped = self._clipped, {}
        for name in self.parameters.keys() - clipped.keys():
            clipped[name] = torch.zeros_like(self.parameters[name])
        return {name: clipped[name] for name in self.parameters}
