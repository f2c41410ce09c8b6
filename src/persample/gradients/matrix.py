"""The per-sample gradients as a lazy matrix with one row for each sample."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from persample._internal.precision import widen
from persample._internal.text import format_bytes
from persample.errors import PerSampleError
from persample.gradients import buffers
from persample.gradients.base import RecordedGradients, answer
from persample.gradients.clipping import compute_clip_factors
from persample.gradients.curvature import KroneckerFactors, KroneckerKind, check_kind, compute_kronecker_factors
from persample.gradients.derived import combine_kept_terms, make_kept_terms, replace_terms
from persample.gradients.kept_terms import KeptTerms
from persample.gradients.moments import (
    compute_noise_scale,
    compute_second_moment,
    compute_variance,
    compute_weighted_squares,
)
from persample.gradients.positions import PositionGradients
from persample.gradients.projection import Method, check_projection, make_projection
from persample.gradients.rows import LossReduction
from persample.gradients.stack import Stack
from persample.terms import Dense, Term, allocate

# Default size in bytes of a block of dense gradients in gram(), second_moment() and variance().
MEMORY = 64 * 2**20


class PerSampleGradients(RecordedGradients):
    """The gradient of each sample's own loss, for each parameter: a matrix of `batch_size` rows that is never built.

    Every answer is computed from the terms in which the gradients arrive. Sums, norms, clipped sums and dot products
    need memory for one block of dense gradients at most.

    Where several processes share a batch, the rows are those of this process's samples. Sums, means and variances are
    over the samples of all processes, so every process has to ask for them.

    >>> import persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model) as grads:
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> len(grads), grads.names, grads.norms().shape, grads[0]["weight"].shape
    (5, ['weight', 'bias'], torch.Size([5]), torch.Size([2, 3]))
    """

    _intake: KeptTerms

    def __repr__(self) -> str:
        intake = self._intake
        if intake.rows.size is None or not intake.is_backward_done:
            return self._describe(0)
        numbers = self.row_count * sum(p.numel() for p in intake.parameters.values())
        return self._describe(len(intake.list_cleared()), f"dense() would take {format_bytes(4 * numbers)}")

    # ---- answers ----

    @answer
    def dense(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """`{name: (batch, *shape)}`: the gradients themselves, which take `batch_size` times the memory of the model.

        Args:
            names: the parameters to include; all by default.
        """
        chosen = self.names if names is None else [names] if isinstance(names, str) else list(names)
        buffers.start_round()
        return {name: self._compute_dense(name) for name in chosen}

    def _compute_dense(self, name: str) -> Tensor:
        term, p = self._intake.get_term(name), self._intake.parameters[name]
        result = buffers.empty((self.row_count, *p.shape), p.dtype, p.device)
        term.write(result, self._intake.scale)
        return result

    @answer
    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        """`{name: shape}`: one row, the gradient of a sample (or unit). Negative numbers count from the end.

        >>> import persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     model(torch.randn(5, 3)).square().mean().backward()
        >>> len(grads), grads[-1]["weight"].shape
        (5, torch.Size([2, 3]))
        """
        index = operator.index(sample)
        if not -self.row_count <= index < self.row_count:
            raise IndexError(f"Row {index} of a recording with {self.row_count} rows.")
        row = index % self.row_count
        found = {}
        for name, p in self._intake.parameters.items():
            found[name] = p.new_empty(1, *p.shape)
            self._intake.get_term(name).some(row, row + 1).write(found[name], self._intake.scale)
        return {name: part[0] for name, part in found.items()}

    @answer
    def sum(self, weights: Tensor | None = None, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the weighted sum of the rows.

        Args:
            weights: `(batch,)`, the weight of each row; 1 by default.
            own: sum over the rows of this process only, without communication.
        """
        intake = self._intake
        if weights is None:
            weights = torch.ones(self.row_count, device=intake.rows.device, dtype=torch.float32)
        intake.rows.check_weights("sum", weights)
        weights = weights.to(intake.rows.device) * intake.scale
        intake.prepare_answer()
        return intake.sum_stacks(lambda stack: stack.sum(weights, intake.exact), own, *intake.stacks.join_small())

    @answer
    def mean(self) -> dict[str, Tensor]:
        """`{name: shape}`: the mean of the rows, that is the gradient of the mean loss."""
        count = max(1, self._intake.rows.count_all())
        return {name: total / count for name, total in self.sum().items()}

    @answer
    def clip(self, max_norm: float, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the sum of the rows, each scaled down to a norm of at most `max_norm`.

        Args:
            max_norm: the bound on the norm of each row.
            per_parameter: bound each parameter's part of a row separately.
            own: sum over the rows of this process only, without communication.
        """
        intake = self._intake
        if not per_parameter:
            squares = intake.settle_rows()
            if not squares.names:
                return self.sum(own=own)
            weights = squares.compute_clip_weights(max_norm, intake.scale)
            return intake.sum_stacks(lambda stack: stack.sum(weights, intake.exact), own, *intake.stacks.join_small())
        norms = self.norms(per_parameter=True)
        factors = {name: compute_clip_factors(part, max_norm) * intake.scale for name, part in norms.items()}
        stacks = intake.stacks.split()
        return intake.sum_stacks(lambda stack: stack.sum(factors[stack.names[0]], intake.exact), own, stacks)

    @answer
    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """`(batch,)`: the inner product of each row with a direction `{name: shape}`; missing names count as zero."""
        intake = self._intake
        unknown = direction.keys() - intake.parameters.keys()
        if unknown:
            raise PerSampleError(f"The direction names {sorted(unknown)}, which are not parameters of this recording.")
        for name, part in direction.items():
            if part.shape != intake.parameters[name].shape:
                wanted = tuple(intake.parameters[name].shape)
                raise PerSampleError(f"The direction has shape {tuple(part.shape)} for '{name}' of shape {wanted}.")
        terms = {name: term for name, term in intake.get_terms().items() if name in direction}
        gather = intake.rows.processes.gather
        return self._add_parts(term.dot(gather(direction[name].detach())) for name, term in terms.items())

    @answer
    def gram(self, other: PerSampleGradients | None = None, memory: int = MEMORY) -> Tensor:
        """`(batch, batch of other)`: the inner products of the rows with the rows of `other`, or with each other.

        Args:
            other: another recording of the same parameters.
            memory: the largest block of dense gradients, in bytes, for parameters that need dense gradients.
        """
        other = other or self
        if other.names != self.names:
            raise PerSampleError("gram() needs two recordings of the same parameters; these differ.")
        others = other._intake.get_terms()
        parts = (term.gram(others[name], memory // 4) for name, term in self._intake.get_terms().items())
        return self._add_parts(parts, other.row_count) * other._intake.scale

    @answer
    def inner(self, other: PerSampleGradients) -> Tensor:
        """`(batch,)`: the inner product of each row with the same row of `other`, of the same parameters."""
        if other.names != self.names or other.row_count != self.row_count:
            raise PerSampleError("inner() needs two recordings of the same parameters and numbers of rows.")
        others = other._intake.get_terms()
        parts = (term.inner(others[name]) for name, term in self._intake.get_terms().items())
        return self._add_parts(parts) * other._intake.scale

    def _add_parts(self, parts: Iterable[Tensor], *more: int) -> Tensor:
        """The scaled sum of tensors of shape `(batch, *more)`; zeros if there are none."""
        total = torch.zeros(self.row_count, *more, device=self._intake.rows.device, dtype=torch.float32)
        for part in parts:
            total = total + part
        return total * self._intake.scale

    @answer
    def project(self, dim: int, seed: int = 0, method: Method = "tensor") -> Tensor:
        """`(batch, dim)`: a random projection of the rows that preserves inner products in expectation.

        The projection depends only on the seed and on the names and shapes of the parameters, so that rows of different
        batches, runs and processes can be compared.

        Args:
            dim: the number of entries of a projected row.
            seed: selects the projection.
            method: "tensor" makes gradients dense only where that is faster. "sparse" always makes them dense, in
                blocks; use it if samples have one position each (an MLP). "kronecker" projects the inputs and the
                output gradients of each layer before it multiplies them, which is the fastest by far. Its parameters
                have separate entries of a row, see `projection_blocks`: its error is 1.5 to 3 times as large.
        """
        intake = self._intake
        check_projection(method, dim, intake.parameters)
        intake.prepare_answer()
        found = {name: intake.stacks.find_term(name) for name in intake.parameters} if self.row_count else {}
        terms = {name: term for name, term in found.items() if term is not None and term.shape.numel()}
        shapes = tuple((name, p.shape) for name, p in intake.parameters.items())
        projection = make_projection(method, dim, seed, shapes, intake.rows.device)
        return projection.project(terms, self.row_count) * intake.scale

    def projection_blocks(self, dim: int) -> dict[str, slice]:
        """`{name: slice}`: the entries of a row of `project(dim, method="kronecker")` that belong to each parameter.

        The numbers are in proportion to the cube roots of the parameters' sizes. A parameter with fewer entries than
        that is stored as it is. Parameters with a share of less than 8 have the same slice.
        """
        return allocate(dim, {name: p.shape for name, p in self._intake.parameters.items()})

    @answer
    def scale(self, factors: Mapping[str, Tensor]) -> PerSampleGradients:
        """The gradients with each entry multiplied by a factor, as dense rows.

        >>> import persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> grads.scale({"bias": torch.tensor([2.0, 0.0])}).dense()["bias"][0]
        tensor([2., 0.])

        Args:
            factors: a tensor with the shape of the parameter, by name. Other parameters are not multiplied.
        """
        rows = {name: widen(part) for name, part in self.dense().items()}
        scaled = {name: part * factors[name].to(part) if name in factors else part for name, part in rows.items()}
        terms = {name: Dense(part.clone()) for name, part in scaled.items()}
        return PerSampleGradients(replace_terms(self._intake, terms, LossReduction("sum")))

    @answer
    def select(self, names: Iterable[str]) -> PerSampleGradients:
        """The gradients of some parameters; those of all others are zero.

        >>> import persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> grads.norms(per_parameter=True)["bias"][0], grads.select(["bias"]).norms()[0]
        (tensor(1.4142), tensor(1.4142))
        """
        terms = {name: self._intake.get_term(name) for name in ([names] if isinstance(names, str) else names)}
        return PerSampleGradients(replace_terms(self._intake, terms, self._intake.reduction))

    @answer
    def second_moment(self, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the mean over the rows of each entry's square."""
        return compute_second_moment(self._intake, memory)

    @answer
    def fisher_diagonal(self, weights: Tensor | None = None, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the diagonal of the Fisher matrix, from rows whose loss is a negative log-likelihood.

        With labels drawn from the model (`persample.sample_labels`) it is an unbiased estimate of the Fisher matrix;
        with the labels of the data it is the empirical Fisher matrix.

        Args:
            weights: `(batch,)`, the weight of each row's squares, such as the probability of its label, if every
                sample is in the batch with every label; 1 / batch by default.
            memory: as in `second_moment`, which is the same without weights.
        """
        if weights is None:
            return self.second_moment(memory)
        self._intake.rows.check_weights("fisher_diagonal", weights)
        return compute_weighted_squares(self._intake, weights, memory)

    @answer
    def kfac_factors(self, kind: KroneckerKind = "expand") -> dict[str, KroneckerFactors]:
        """`{name: (input, grad)}`: the factors of K-FAC for the weights of linear layers and convolutions.

        Other parameters (biases, norms, embeddings, convolutions with groups) are left out. `kind` says how positions
        that share a weight (tokens, pixels) are combined: "expand" counts each of them, "reduce" averages the inputs
        and adds up the gradients first. The factors are over the rows of this process.

        >>> from torch import nn
        >>> import persample
        >>> model = nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     logits = model(torch.randn(5, 3))
        ...     nn.functional.cross_entropy(logits, persample.sample_labels(logits)).backward()
        >>> [factor.shape for factor in grads.kfac_factors()["weight"]]
        [torch.Size([3, 3]), torch.Size([2, 2])]
        """
        check_kind(kind)
        intake = self._intake
        if intake.compacted:
            raise PerSampleError(
                f"The factors of {sorted(intake.compacted)} were replaced by dense gradients, which an answer before "
                "needed and which take less memory. Ask for kfac_factors() before norms() and clip()."
            )
        terms = intake.get_terms().items()
        found = {name: compute_kronecker_factors(term, kind, intake.scale) for name, term in terms}
        return {name: factors for name, factors in found.items() if factors is not None}

    @answer
    def variance(self, correction: int = 1, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the variance over the rows of each entry; unbiased with the default correction."""
        return compute_variance(self._intake, correction, memory)

    @answer
    def noise_scale(self) -> Tensor:
        """The batch size at which the noise of the mean gradient is as large as the gradient.

        This is the simple noise scale of McCandlish et al. (2018), tr(Σ) / |G|², from unbiased estimates of both parts.
        A negative number means that the estimate of |G|² is negative: the mean gradient of this batch is shorter than
        its noise alone would make it, so the noise scale is larger than the batch, and cannot be told from it. Average
        both parts over more batches, or take a larger one.
        """
        rows = self._intake.rows
        if rows.count_all() < 2:
            raise PerSampleError(f"noise_scale() needs at least two {rows.kind}.")
        return compute_noise_scale(self._intake, self.variance(), self.mean()).to(self.norms().dtype)

    def by_position(self, allow_rest: bool = False) -> PositionGradients:
        """The part of each sample's gradient that each position contributes; needs `record(model, positions=T)`.

        Args:
            allow_rest: allow parameters that are used without positions, such as a layer after the pooling. Their parts
                are the `rest` of the result. By default they are refused.

        >>> from torch import nn
        >>> import persample
        >>> model, x = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.randint(7, (2, 5))
        >>> with persample.record(model, positions=5) as grads:
        ...     model(x).square().sum().backward()
        >>> grads.by_position().norms().shape
        torch.Size([2, 5])
        """
        intake, found = self._intake, self._intake.positions
        if found is None:
            raise PerSampleError("by_position() needs the number of positions: record(model, positions=T).")
        intake.check_done()
        if found.rest and not allow_rest:
            raise PerSampleError(
                f"{sorted(found.rest)} are used without one dimension of {found.count} positions that the function "
                "treats one by one, so that parts of their gradients belong to no position. Leave them out with "
                "record(parameters=...), or pass allow_rest=True to get these parts as the rest."
            )
        parts = make_rows(intake.parameters, found.parts, intake.rows.batch_size * found.count)
        rest = make_rows(intake.parameters, found.rest, intake.rows.batch_size)
        return PositionGradients(found.count, parts, rest, sorted(found.rest), intake.scale)

    @answer
    def combine(self, *others: PerSampleGradients) -> PerSampleGradients:
        """The rows of several recordings with units, added up by unit: for units whose samples are in several batches.

        All recordings must have the same parameters. The rows are those of all units, in the order of the sorted ids.
        The factors of all recordings are kept; none is made dense.

        >>> from torch import nn
        >>> import persample
        >>> model, found = nn.Linear(3, 2), []
        >>> for users in ([0, 0, 1], [1, 2]):
        ...     with persample.record(model, units=users) as grads:
        ...         model(torch.randn(len(users), 3)).square().sum().backward()
        ...     found.append(grads)
        >>> found[0].combine(found[1]).norms().shape
        torch.Size([3])
        """
        if any(recording.names != self.names for recording in others):
            raise PerSampleError("combine() needs recordings of the same parameters; these differ.")
        return PerSampleGradients(combine_kept_terms([self._intake, *(other._intake for other in others)]))

    @answer
    def pass_terms_to(self, receive: Callable[[Stack], None]) -> None:
        """Call a function with each term."""
        self._intake.prepare_answer()
        for stack in self._intake.stacks.get_all():
            receive(stack)


def find_term(grads: PerSampleGradients, name: str) -> Term | None:
    """What gradients have for a parameter, None if it was not used."""
    return grads._intake.stacks.find_term(name)


def make_rows(parameters: Mapping[str, Tensor], terms: Mapping[str, Term], count: int) -> PerSampleGradients:
    """Gradients with this number of rows, from terms by the names of parameters; zero where there is none."""
    return PerSampleGradients(make_kept_terms(parameters, terms, count))
