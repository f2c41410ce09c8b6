"""The per-sample gradients as a lazy matrix: one row for each sample, and whatever is asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from persample._internal.dtypes import widen
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients import buffers
from persample.gradients.clipping import factors_of
from persample.terms import Dense, Term, add_terms
from persample.terms.base import convert_to_double, find_factors
from persample.terms.sketch import SparseSketch, TensorSketch

# What gram() and variance() may take for a block of dense gradients, where the user does not say.
MEMORY = 64 * 2**20


class PerSampleGradients:
    """The gradient of each sample's own loss, for each parameter: a matrix J of `batch_size` rows, never built.

    Every answer is computed from the terms in which the gradients came. Sums, norms, clipped sums and dot products
    never need memory for more than one block of dense gradients.

    Where several processes share a batch, the rows are those of this process's samples, and sums, means and variances
    are over the samples of all: every process has to ask for them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], loss_reduction: str, over: Processes) -> None:
        self._parameters = {name: over.face(p) for name, p in parameters.items()}
        self._names = {id(over.used(p)): name for name, p in parameters.items()}
        self._loss_reduction = loss_reduction
        self._over = over
        self._arrived: dict[str, Term] = {}
        self._versions: dict[str, list[tuple[Tensor, int]]] = {}
        self._batch_size: int | None = None
        self._backward_done = False

    # ---- filling ----

    def start(self, batch_size: int) -> int:
        """Says how many samples there are; all forward passes of a recording must agree."""
        if self._batch_size not in (None, batch_size):
            raise PerSampleError(
                f"A forward pass of {batch_size} samples in a recording that has one of {self._batch_size}. Use a "
                "recording for each batch."
            )
        self._batch_size = batch_size
        return batch_size

    def receive(self, parameter: Tensor, term: Term) -> None:
        """Takes what a backward pass found for a parameter; several add up."""
        name = self._names.get(id(parameter))
        if name is not None:
            self._check_unchanged(name)
            self._keep(name, add_terms([self._arrived[name], term]) if name in self._arrived else term)

    def finish(self) -> None:
        """Says that a backward pass has ended."""
        self._backward_done = True

    # ---- what there is ----

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        if self._batch_size is None:
            raise PerSampleError("No forward pass has been recorded yet: call the model inside the block.")
        return self._batch_size

    @property
    def names(self) -> list[str]:
        """The names of the parameters, as in `model.named_parameters()`."""
        return list(self._parameters)

    def __repr__(self) -> str:
        if self._batch_size is None or not self._backward_done:
            return "PerSampleGradients(nothing recorded yet)"
        numbers = self.batch_size * sum(p.numel() for p in self._parameters.values())
        lines = [f"PerSampleGradients(batch_size={self.batch_size}, dense() would take {_bytes(4 * numbers)}"]
        for name, p in self._parameters.items():
            lines.append(f"  {name}: {tuple(p.shape)} {self._kind(name)}")
        return "\n".join(lines) + ")"

    def samples(self) -> int:
        """The number of samples of all processes: of one alone, its `batch_size`."""
        return self._over.count(self.batch_size)

    # ---- answers ----

    @torch.no_grad()
    def dense(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """`{name: (batch, *shape)}`: the gradients themselves, B times the size of the model, or of some names."""
        chosen = self.names if names is None else [names] if isinstance(names, str) else list(names)
        buffers.next_round()
        return {name: self._scaled_dense(name) for name in chosen}

    @torch.no_grad()
    def norms(self, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
        """`(batch,)`: the norm of each sample's gradient; with `per_parameter`, `{name: (batch,)}`."""
        squares = self._squares()
        if per_parameter:  # by way of inner products, rounding may leave a little less than nothing
            return {name: square.clamp(min=0).sqrt() * self._scale for name, square in squares.items()}
        if not squares:
            return torch.zeros(self.batch_size, device=self._device)
        return torch.stack([*squares.values()]).clamp_(min=0).sum(0).sqrt_().mul_(self._scale)

    @torch.no_grad()
    def sum(self, weights: Tensor | None = None, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the sum of the rows, each times its weight; `own`: of this process's rows alone."""
        if weights is None:
            weights = torch.ones(self.batch_size, device=self._device, dtype=torch.float32)
        if weights.shape != (self.batch_size,):
            raise PerSampleError(
                f"One weight for each of {self.batch_size} samples is needed, got {tuple(weights.shape)}"
            )
        weights = weights.to(self._device) * self._scale
        return {name: self._total(name, term.sum(weights), own=own) for name, term in self._terms().items()}

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """`{name: shape}`: the mean of the rows, which is the gradient of the mean loss."""
        count = max(1, self.samples())
        return {name: total / count for name, total in self.sum().items()}

    @torch.no_grad()
    def clip_factors(self, max_norm: float) -> Tensor:
        """`(batch,)`: what each row has to be scaled by so that its norm is at most `max_norm`."""
        return factors_of(self._all_norms(), max_norm)

    @torch.no_grad()
    def clip(self, max_norm: float, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the sum of the rows, each scaled down to a norm of at most `max_norm`.

        With `per_parameter`, each parameter's part of a row is scaled by itself to that norm. Where several processes
        share a batch, `own` gives the sum of this process's rows alone, for which the others need not ask.
        """
        if not per_parameter:
            return self.sum(self.clip_factors(max_norm), own)
        norms = self.norms(per_parameter=True)
        assert isinstance(norms, dict)
        factors = {name: factors_of(part, max_norm) * self._scale for name, part in norms.items()}
        return {name: self._total(name, term.sum(factors[name]), own=own) for name, term in self._terms().items()}

    @torch.no_grad()
    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """`(batch,)`: the inner product of each row with `{name: shape}`; a missing name counts as zeros."""
        unknown = direction.keys() - self._parameters.keys()
        if unknown:
            raise PerSampleError(f"The direction names {sorted(unknown)}, which are no parameters of this recording.")
        for name, part in direction.items():
            if part.shape != self._parameters[name].shape:
                wanted = tuple(self._parameters[name].shape)
                raise PerSampleError(f"The direction has shape {tuple(part.shape)} for '{name}', which has {wanted}")
        terms = {name: term for name, term in self._terms().items() if name in direction}
        parts = (term.dot(self._over.whole(direction[name].detach())) for name, term in terms.items())
        return self._added_up(parts) * self._scale

    @torch.no_grad()
    def gram(self, other: PerSampleGradients | None = None, memory: int = MEMORY) -> Tensor:
        """`(batch, batch of other)`: the inner products of the rows, with each other or with another recording's.

        Where that takes dense gradients, they are made in blocks of at most `memory` bytes.
        """
        other = other or self
        if other.names != self.names:
            raise PerSampleError("The two recordings are of different parameters.")
        others = other._terms()
        parts = (term.gram(others[name], memory // 4) for name, term in self._terms().items())
        return self._added_up(parts, other.batch_size) * (self._scale * other._scale)

    @torch.no_grad()
    def project(self, dim: int, seed: int = 0, method: Literal["tensor", "sparse"] = "tensor") -> Tensor:
        """`(batch, dim)`: a random projection of the rows that keeps inner products in the mean.

        The projection depends on the seed and the parameters' names and shapes only, so rows of different batches, runs
        and processes can be compared. "tensor" makes gradients dense, in blocks, only where that is quicker. "sparse"
        always does, and has the smaller spread for the same dim: use it where samples have few positions (T = 1: an
        MLP) and dim is dear.
        """
        if method not in ("tensor", "sparse"):
            raise PerSampleError(f"method must be 'tensor' or 'sparse', got {method!r}")
        parts = []
        for name, term in self._terms().items():
            if self._parameters[name].is_complex():
                raise PerSampleError(f"'{name}' is complex; projections are of real gradients")
            if not self.batch_size or not self._parameters[name].numel():
                continue
            sketch: TensorSketch | SparseSketch
            if method == "tensor":
                sketch = TensorSketch(dim, seed, name, self._parameters[name].shape, self._device)
            else:
                sketch = SparseSketch(dim, seed, name)
            parts.append(term.project(sketch))
        return self._added_up(parts, dim) * self._scale

    @torch.no_grad()
    def second_moment(self, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the mean of the rows' squares, entry by entry."""
        count = max(1, self.samples())
        squares = ((name, term.square_sum(memory // 4) * self._scale**2) for name, term in self._terms().items())
        return {name: self._total(name, part) / count for name, part in squares}

    @torch.no_grad()
    def variance(self, correction: int = 1, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the variance of the rows, entry by entry; unbiased with the default correction."""
        count = self.samples()
        factor = 1 / (count - correction) if count > correction else torch.nan
        scales = torch.full((self.batch_size,), self._scale, device=self._device, dtype=torch.float64)
        found = {}
        for name, term in self._terms().items():
            exact = convert_to_double(term)  # a difference of squares loses what it is about in float32
            total = self._total(name, exact.sum(scales), double=True)
            squares = self._total(name, exact.square_sum(memory // 8) * self._scale**2, double=True)
            spread = squares - total.abs().square() / max(1, count)
            found[name] = (spread.clamp(min=0) * factor).to(widen(self._parameters[name]).abs().dtype)
        return found

    @torch.no_grad()
    def noise_scale(self) -> Tensor:
        """How many samples a batch needs until its gradient's noise is as large as the gradient itself.

        The simple noise scale of McCandlish et al. (2018), tr(Σ) / |G|², from unbiased estimates of both.
        """
        size = self.samples()
        if size < 2:
            raise PerSampleError("The noise scale takes at least two samples.")
        noise = self._sum_of_entries(self.variance())
        of_mean = self._sum_of_entries({name: part.abs().square() for name, part in self.mean().items()})
        return (noise / (of_mean - noise / size)).to(self._all_norms().dtype)

    # ---- inside ----

    @property
    def _scale(self) -> float:
        return float(self.batch_size) if self._loss_reduction == "mean" else 1.0

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def _total(self, name: str, part: Tensor, double: bool = False, own: bool = False) -> Tensor:
        """The sum of what all processes found for a parameter, which may differ in type where one did not use it."""
        if own:
            return part
        dtype = widen(self._parameters[name].new_empty(0)).dtype
        if double:
            dtype = torch.promote_types(dtype, torch.float64)
        return self._over.total(name, part, dtype if part.is_complex() else dtype.to_real())

    def _sum_of_entries(self, parts: Mapping[str, Tensor]) -> Tensor:
        sums = [self._over.whole(part.sum(dtype=torch.float64)) for part in parts.values()]
        return torch.stack(sums).sum()

    def _all_norms(self) -> Tensor:
        norms = self.norms()
        assert isinstance(norms, Tensor)
        return norms

    def _added_up(self, parts: Iterable[Tensor], *more: int) -> Tensor:
        """The sum of tensors `(batch, *more)`, of which there may be none."""
        total = torch.zeros(self.batch_size, *more, device=self._device, dtype=torch.float32)
        for part in parts:
            total = total + part
        return total

    def _term(self, name: str) -> Term:
        if name not in self._parameters:
            raise PerSampleError(f"'{name}' is no parameter of this recording.")
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
                "pass. Ask before you change it, or change a copy."
            )

    def _scaled_dense(self, name: str) -> Tensor:
        term, p = self._term(name), self._parameters[name]
        result = buffers.empty((self.batch_size, *p.shape), p.dtype, p.device)
        term.write(result, self._scale)
        return result

    def _check_done(self) -> None:
        if self.batch_size and not self._backward_done:
            raise PerSampleError(
                "No backward pass has been recorded yet: call backward on a loss of the model's outputs first."
            )

    def _kind(self, name: str) -> str:
        return type(self._arrived[name]).__name__ if name in self._arrived else "not used"

    def _squares(self) -> dict[str, Tensor]:
        return {name: self._measured(name, term) for name, term in self._terms().items()}

    def _measured(self, name: str, term: Term) -> Tensor:
        """The squared norms; where they took the dense form, and that is smaller, it is what is kept from now on."""
        squared, lighter = term.compute_norms_and_compact()
        if lighter is not term:
            self._keep(name, lighter)
        return squared

    def _keep(self, name: str, term: Term) -> None:
        self._arrived[name] = term
        self._versions[name] = [(t, t._version) for t in find_factors(term)]

    def _terms(self) -> dict[str, Term]:
        return {name: self._term(name) for name in self._parameters}


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
