"""The per-sample gradients as a lazy matrix with one row for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from persample._internal.dtypes import widen
from persample._internal.text import format_bytes
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients import buffers
from persample.gradients.base import RecordedGradients
from persample.gradients.clipping import compute_clip_factors
from persample.terms import Dense, Term, add_terms
from persample.terms.base import convert_to_double, find_factors
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

    def __init__(self, parameters: Mapping[str, Tensor], loss_reduction: str, processes: Processes) -> None:
        super().__init__(parameters, loss_reduction, processes)
        self._arrived: dict[str, Term] = {}
        self._versions: dict[str, list[tuple[Tensor, int]]] = {}

    def _receive(self, name: str, term: Term) -> None:
        self._check_unchanged(name)
        self._keep(name, add_terms([self._arrived[name], term]) if name in self._arrived else term)

    def __repr__(self) -> str:
        if self._is_empty:
            return "PerSampleGradients(nothing recorded yet)"
        numbers = self.batch_size * sum(p.numel() for p in self._parameters.values())
        lines = [f"PerSampleGradients(batch_size={self.batch_size}, dense() would take {format_bytes(4 * numbers)}"]
        for name, p in self._parameters.items():
            lines.append(f"  {name}: {tuple(p.shape)} {self._describe_term(name)}")
        return "\n".join(lines) + ")"

    # ---- answers ----

    @torch.no_grad()
    def dense(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """`{name: (batch, *shape)}`: the gradients themselves, which take `batch_size` times the memory of the model.

        Args:
            names: the parameters to include; all by default.
        """
        chosen = self.names if names is None else [names] if isinstance(names, str) else list(names)
        buffers.start_round()
        return {name: self._compute_dense(name) for name in chosen}

    @torch.no_grad()
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
        parts = {name: term.sum(weights) for name, term in self._terms().items()}
        return {name: self._add_over_processes(name, part, own=own) for name, part in parts.items()}

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """`{name: shape}`: the mean of the rows, that is the gradient of the mean loss."""
        count = max(1, self.samples())
        return {name: total / count for name, total in self.sum().items()}

    @torch.no_grad()
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
        parts = {name: term.sum(factors[name]) for name, term in self._terms().items()}
        return {name: self._add_over_processes(name, part, own=own) for name, part in parts.items()}

    @torch.no_grad()
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
    def second_moment(self, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the mean over the rows of each entry's square."""
        count = max(1, self.samples())
        squares = ((name, term.square_sum(memory // 4) * self._scale**2) for name, term in self._terms().items())
        return {name: self._add_over_processes(name, part) / count for name, part in squares}

    @torch.no_grad()
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
    def noise_scale(self) -> Tensor:
        """The batch size at which the noise of the mean gradient is as large as the gradient.

        This is the simple noise scale of McCandlish et al. (2018), tr(Σ) / |G|², from unbiased estimates of both parts.
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

    def _term(self, name: str) -> Term:
        if name not in self._parameters:
            raise PerSampleError(f"'{name}' is not a parameter of this recording.")
        self._check_done()
        if name in self._arrived:
            self._check_unchanged(name)
            return self._arrived[name]
        p = self._parameters[name]
        return Dense(p.new_zeros(()).expand(self.batch_size, *p.shape))

    def _check_unchanged(self, name: str) -> None:
        if any(tensor._version != version for tensor, version in self._versions.get(name, ())):
            raise PerSampleError(
                f"An input or activation behind the gradients of '{name}' was changed in place after the backward "
                "pass. Read the answers before you change it, or change a copy."
            )

    def _compute_dense(self, name: str) -> Tensor:
        term, p = self._term(name), self._parameters[name]
        result = buffers.empty((self.batch_size, *p.shape), p.dtype, p.device)
        term.write(result, self._scale)
        return result

    def _describe_term(self, name: str) -> str:
        return type(self._arrived[name]).__name__ if name in self._arrived else "not used"

    def _compute_squared_norms(self) -> dict[str, Tensor]:
        return {name: self._square_and_compact(name, term) for name, term in self._terms().items()}

    def _square_and_compact(self, name: str, term: Term) -> Tensor:
        """The squared norms; keeps the dense form from now on if the norms needed it and it is smaller."""
        squared, compact = term.compute_norms_and_compact()
        if compact is not term:
            self._keep(name, compact)
        return squared

    def _keep(self, name: str, term: Term) -> None:
        self._arrived[name] = term
        self._versions[name] = [(t, t._version) for t in find_factors(term)]

    def _terms(self) -> dict[str, Term]:
        return {name: self._term(name) for name in self._parameters}
