"""The per-sample gradients as a lazy matrix with one row for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from persample._internal import tracing
from persample._internal.dtypes import widen
from persample._internal.precision import without_autocast
from persample._internal.text import format_bytes
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients import buffers
from persample.gradients.base import RecordedGradients
from persample.gradients.clipping import compute_clip_factors
from persample.gradients.copies import OutsideMemory
from persample.gradients.squared_norms import NonFinite, SquaredNorms, check_finite, require_finite
from persample.gradients.stack import Stack
from persample.terms import Dense, Term, add_terms
from persample.terms.base import convert_to_double
from persample.terms.sketch import SparseSketch, TensorSketch

# Default size in bytes of a block of dense gradients in gram(), second_moment() and variance().
MEMORY = 64 * 2**20


class PerSampleGradients(RecordedGradients):
    """The gradient of each sample's own loss, for each parameter: a matrix of `batch_size` rows that is never built.

    Every answer is computed from the terms in which the gradients arrive. Sums, norms, clipped sums and dot products
    need memory for one block of dense gradients at most.

    Where several processes share a batch, the rows are those of this process's samples. Sums, means and variances are
    over the samples of all processes, so every process has to ask for them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_reduction: str | None,
        processes: Processes,
        nonfinite: NonFinite = "raise",
    ) -> None:
        super().__init__(parameters, loss_reduction, processes, nonfinite)
        self._stacks: dict[str, Stack] = {}  # by parameter; several parameters may have the same one
        self._exact: set[int] = set()  # samples with rows that are added up in float64
        self._cleared: set[int] = set()  # samples that were not finite, and whose rows are zero now
        self._is_cleared = False  # whether all terms that have arrived were searched for samples to clear
        self.outside = OutsideMemory()

    def _receive(self, name: str, term: Term) -> None:
        self._start_answers()
        before = self._find_term(name)
        self._keep(Stack([name], term if before is None else add_terms([before, term])))

    def _receive_stack(self, stack: Stack) -> None:
        self._start_answers()
        if self._stacks.keys().isdisjoint(stack.names):
            self._keep(stack)
        else:  # of another backward pass
            for name, term in stack.split():
                self._receive(name, term)

    def finish(self) -> None:
        super().finish()
        self.outside.forget_copies()

    def __repr__(self) -> str:
        if self._is_empty:
            return "PerSampleGradients(nothing recorded yet)"
        numbers = self.batch_size * sum(p.numel() for p in self._parameters.values())
        size = format_bytes(4 * numbers)
        described = f"batch_size={self.batch_size}, {self._describe_reduction()}, dense() would take {size}"
        described += self._describe_nonfinite(len(self._cleared))
        lines = [f"PerSampleGradients({described}"]
        for name, p in self._parameters.items():
            lines.append(f"  {name}: {tuple(p.shape)} {self._describe_term(name)}")
        return "\n".join([*lines, f"  {self.verification})"])

    # ---- answers ----

    @torch.no_grad()
    @without_autocast
    def dense(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """`{name: (batch, *shape)}`: the gradients themselves, which take `batch_size` times the memory of the model.

        Args:
            names: the parameters to include; all by default.
        """
        chosen = self.names if names is None else [names] if isinstance(names, str) else list(names)
        buffers.start_round()
        return {name: self._compute_dense(name) for name in chosen}

    @torch.no_grad()
    @without_autocast
    def sum(self, weights: Tensor | None = None, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the weighted sum of the rows.

        Args:
            weights: `(batch,)`, the weight of each row; 1 by default.
            own: sum over the rows of this process only, without communication.
        """
        if weights is None:
            weights = torch.ones(self.batch_size, device=self._device, dtype=torch.float32)
        if weights.shape != (self.batch_size,):
            raise PerSampleError(
                f"sum() needs one weight for each of {self.batch_size} samples, got shape {tuple(weights.shape)}."
            )
        weights = weights.to(self._device) * self._scale
        return self._add_weighted(lambda stack: stack.sum(weights, self._exact), own)

    @torch.no_grad()
    @without_autocast
    def mean(self) -> dict[str, Tensor]:
        """`{name: shape}`: the mean of the rows, that is the gradient of the mean loss."""
        count = max(1, self.samples())
        return {name: total / count for name, total in self.sum().items()}

    @torch.no_grad()
    @without_autocast
    def clip(self, max_norm: float, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the sum of the rows, each scaled down to a norm of at most `max_norm`.

        Args:
            max_norm: the bound on the norm of each row.
            per_parameter: bound each parameter's part of a row separately.
            own: sum over the rows of this process only, without communication.
        """
        if not per_parameter:
            return self.sum(self.clip_factors(max_norm), own)
        norms = self.norms(per_parameter=True)
        factors = {name: compute_clip_factors(part, max_norm) * self._scale for name, part in norms.items()}
        self._split_stacks()
        return self._add_weighted(lambda stack: stack.sum(factors[stack.names[0]], self._exact), own)

    @torch.no_grad()
    @without_autocast
    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """`(batch,)`: the inner product of each row with a direction `{name: shape}`; missing names count as zero."""
        unknown = direction.keys() - self._parameters.keys()
        if unknown:
            raise PerSampleError(f"The direction names {sorted(unknown)}, which are not parameters of this recording.")
        for name, part in direction.items():
            if part.shape != self._parameters[name].shape:
                wanted = tuple(self._parameters[name].shape)
                raise PerSampleError(f"The direction has shape {tuple(part.shape)} for '{name}' of shape {wanted}.")
        terms = {name: term for name, term in self._terms().items() if name in direction}
        parts = (term.dot(self._processes.gather(direction[name].detach())) for name, term in terms.items())
        return self._add_parts(parts) * self._scale

    @torch.no_grad()
    @without_autocast
    def gram(self, other: PerSampleGradients | None = None, memory: int = MEMORY) -> Tensor:
        """`(batch, batch of other)`: the inner products of the rows with the rows of `other`, or with each other.

        Args:
            other: another recording of the same parameters.
            memory: the largest block of dense gradients, in bytes, for parameters that need dense gradients.
        """
        other = other or self
        if other.names != self.names:
            raise PerSampleError("gram() needs two recordings of the same parameters; these differ.")
        others = other._terms()
        parts = (term.gram(others[name], memory // 4) for name, term in self._terms().items())
        return self._add_parts(parts, other.batch_size) * (self._scale * other._scale)

    @torch.no_grad()
    @without_autocast
    def project(self, dim: int, seed: int = 0, method: Literal["tensor", "sparse"] = "tensor") -> Tensor:
        """`(batch, dim)`: a random projection of the rows that preserves inner products in expectation.

        The projection depends only on the seed and on the names and shapes of the parameters, so that rows of different
        batches, runs and processes can be compared.

        Args:
            dim: the number of entries of a projected row.
            seed: selects the projection.
            method: "tensor" makes gradients dense only where that is faster. "sparse" always makes them dense, in
                blocks, and has a smaller variance at the same `dim`; use it if samples have one position each (an MLP).
        """
        if method not in ("tensor", "sparse"):
            raise PerSampleError(f"method must be 'tensor' or 'sparse', got {method!r}.")
        parts = []
        for name, term in self._terms().items():
            if self._parameters[name].is_complex():
                raise PerSampleError(f"'{name}' is complex, and project() is defined for real parameters only.")
            if not self.batch_size or not self._parameters[name].numel():
                continue
            sketch: TensorSketch | SparseSketch
            if method == "tensor":
                sketch = TensorSketch(dim, seed, name, self._parameters[name].shape, self._device)
            else:
                sketch = SparseSketch(dim, seed, name)
            parts.append(term.project(sketch))
        return self._add_parts(parts, dim) * self._scale

    @torch.no_grad()
    @without_autocast
    def second_moment(self, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the mean over the rows of each entry's square."""
        count = max(1, self.samples())
        squares = ((name, term.square_sum(memory // 4) * self._scale**2) for name, term in self._terms().items())
        return {name: self._add_over_processes(name, part) / count for name, part in squares}

    @torch.no_grad()
    @without_autocast
    def variance(self, correction: int = 1, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the variance over the rows of each entry; unbiased with the default correction."""
        count = self.samples()
        factor = 1 / (count - correction) if count > correction else torch.nan
        scales = torch.full((self.batch_size,), self._scale, device=self._device, dtype=torch.float64)
        found = {}
        for name, term in self._terms().items():
            exact = convert_to_double(term)  # the difference of squares below cancels in float32
            total = self._add_over_processes(name, exact.sum(scales), double=True)
            squares = self._add_over_processes(name, exact.square_sum(memory // 8) * self._scale**2, double=True)
            spread = squares - total.abs().square() / max(1, count)
            found[name] = (spread.clamp(min=0) * factor).to(widen(self._parameters[name]).abs().dtype)
        return found

    @torch.no_grad()
    @without_autocast
    def noise_scale(self) -> Tensor:
        """The batch size at which the noise of the mean gradient is as large as the gradient.

        This is the simple noise scale of McCandlish et al. (2018), tr(Σ) / |G|², from unbiased estimates of both parts.
        A negative number means that the estimate of |G|² is negative: the mean gradient of this batch is shorter than
        its noise alone would make it, so the noise scale is larger than the batch, and cannot be told from it. Average
        both parts over more batches, or take a larger one.
        """
        size = self.samples()
        if size < 2:
            raise PerSampleError("noise_scale() needs at least two samples.")
        noise = self._sum_entries(self.variance())
        of_mean = self._sum_entries({name: part.abs().square() for name, part in self.mean().items()})
        return (noise / (of_mean - noise / size)).to(self.norms().dtype)

    # ---- inside ----

    def _sum_entries(self, parts: Mapping[str, Tensor]) -> Tensor:
        sums = [self._processes.gather(part.sum(dtype=torch.float64)) for part in parts.values()]
        return torch.stack(sums).sum()

    def _add_parts(self, parts: Iterable[Tensor], *more: int) -> Tensor:
        """The sum of tensors of shape `(batch, *more)`; zeros if there are none."""
        total = torch.zeros(self.batch_size, *more, device=self._device, dtype=torch.float32)
        for part in parts:
            total = total + part
        return total

    def _add_weighted(self, sum_rows: Callable[[Stack], dict[str, Tensor]], own: bool) -> dict[str, Tensor]:
        """`{name: shape}`: weighted sums of the rows, of which `sum_rows` gives those of one stack."""
        self._check_done()
        self._clear_nonfinite()
        found: dict[str, Tensor] = {}
        for stack in self._list_stacks():
            found.update(sum_rows(stack))
        for name in self._parameters.keys() - found.keys():
            found[name] = widen(torch.zeros_like(self._parameters[name]))
        return self._add_all_over_processes({name: found[name] for name in self._parameters}, own)

    def _list_stacks(self) -> list[Stack]:
        stacks = list(dict.fromkeys(self._stacks.values()))
        for stack in stacks:
            stack.check_unchanged()
        return stacks

    def _split_stacks(self) -> None:
        for stack in self._list_stacks():
            self._split(stack)

    def _split(self, stack: Stack) -> None:
        if len(stack.names) > 1:
            for name, term in stack.split():
                self._stacks[name] = own = Stack([name], term)
                own.note_versions()

    def _term(self, name: str) -> Term:
        if name not in self._parameters:
            raise PerSampleError(f"'{name}' is not a parameter of this recording.")
        self._check_done()
        self._clear_nonfinite()
        p, term = self._parameters[name], self._find_term(name)
        return Dense(p.new_zeros(()).expand(self.batch_size, *p.shape)) if term is None else term

    def _find_term(self, name: str) -> Term | None:
        """What was found for a parameter so far, None if it was not used."""
        stack = self._stacks.get(name)
        if stack is None:
            return None
        stack.check_unchanged()
        self._split(stack)
        return self._stacks[name].term

    def _compute_dense(self, name: str) -> Tensor:
        term, p = self._term(name), self._parameters[name]
        result = buffers.empty((self.batch_size, *p.shape), p.dtype, p.device)
        term.write(result, self._scale)
        return result

    def _describe_term(self, name: str) -> str:
        return type(self._stacks[name].term).__name__ if name in self._stacks else "not used"

    def _settle_rows(self) -> SquaredNorms:
        squares = self._measure()
        if tracing.get_trace() is None:
            self._settle(squares, squares.find_doubtful(), squares.names)
        else:
            self._require_finite(squares)
        return squares

    def _settle_parts(self) -> SquaredNorms:
        squares = self._measure()
        if tracing.get_trace() is None:
            for name in squares.names:
                self._settle(squares, squares.find_doubtful_parts([name]), [name])
        else:
            self._require_finite(squares)
        return squares

    def _require_finite(self, squares: SquaredNorms) -> None:
        if self._nonfinite_mode == "raise" and squares.names:
            require_finite(squares.add_up())

    def _settle(self, squares: SquaredNorms, doubtful: list[int], names: Iterable[str]) -> None:
        squares.settle(doubtful, names, self._compute_exact_row)
        self._exact |= squares.exact
        if self._nonfinite_mode == "raise":
            check_finite(squares.nonfinite)

    def _compute_exact_row(self, name: str, sample: int) -> Tensor:
        return self._stacks[name].compute_exact_row(name, sample)

    def _find_nonfinite(self) -> set[int]:
        squares = self._measure()
        if self._nonfinite_mode == "zero":
            return self._cleared
        squares.settle(squares.find_doubtful(), squares.names, self._compute_exact_row)
        return squares.nonfinite

    def _measure(self) -> SquaredNorms:
        """The squared norms as they are; keeps the dense form of terms if the norms needed it and it is smaller."""
        self._check_done()
        self._clear_nonfinite()
        return self._measure_stacks()

    def _measure_stacks(self) -> SquaredNorms:
        squares = SquaredNorms(self._nonfinite_mode)
        for stack in self._list_stacks():
            squares.add(stack.names, *stack.measure(compact=True))
        return squares

    def _clear_nonfinite(self) -> None:
        """With nonfinite="zero": set the rows of samples that are not finite to zero."""
        if self._nonfinite_mode != "zero" or self._is_cleared or not self._stacks or not self.batch_size:
            return
        self._is_cleared = True
        squares = self._measure_stacks()
        found = [n for n in squares.find_doubtful() if not float(squares.add_up()[n]) < torch.inf]
        if found:
            self._cleared.update(found)
            for stack in self._list_stacks():
                self._keep(stack.clear_samples(found))

    def _keep(self, stack: Stack) -> None:
        if tracing.get_trace() is None:  # a compiled step computes its answers before anything can change
            stack.term = self.outside.copy_factors(stack.term)
        stack.note_versions()
        for name in stack.names:
            self._stacks[name] = stack

    def _start_answers(self) -> None:
        """Forget what was found about samples: terms have arrived."""
        self._is_cleared = False
        self._exact.clear()

    def _terms(self) -> dict[str, Term]:
        return {name: self._term(name) for name in self._parameters}
