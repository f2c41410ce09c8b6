"""The per-sample gradients as a lazy matrix with one row for each sample."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from persample._internal import host, tracing
from persample._internal.dtypes import widen
from persample._internal.precision import in_full_precision
from persample._internal.text import format_bytes
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients import buffers
from persample.gradients.base import RecordedGradients
from persample.gradients.clipping import compute_clip_factors
from persample.gradients.copies import OutsideMemory
from persample.gradients.curvature import KroneckerFactors, KroneckerKind, compute_kronecker_factors, has_both_sides
from persample.gradients.joined import JoinedRows, SmallStacks
from persample.gradients.measuring import compact_stack, measure_stacks
from persample.gradients.positions import PositionGradients
from persample.gradients.projection import METHODS, Method, make_projection
from persample.gradients.reduction import LossReduction
from persample.gradients.squared_norms import NonFinite, SquaredNorms, check_finite, find_true
from persample.gradients.stack import Stack
from persample.gradients.units import UnitOptions, Units, combine_units
from persample.terms import (
    Dense,
    Term,
    add_samples,
    add_terms,
    allocate,
    convert_to_double,
    find_factors,
    make_groups,
    merge_samples,
    widen_factors,
)

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

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction,
        processes: Processes,
        nonfinite: NonFinite = "raise",
        units: UnitOptions | None = None,
        positions: int | None = None,
    ) -> None:
        super().__init__(parameters, loss_reduction, processes, nonfinite, units)
        self._positions = positions
        self._parts: dict[str, Term] = {}  # with a row for each position of each sample
        self._rest: dict[str, Term] = {}  # with a row for each sample, of uses without positions
        self._stacks: dict[str, Stack] = {}  # by parameter; several parameters may have the same one
        self._exact: set[int] = set()  # samples with rows that are added up in float64
        self._cleared: Tensor | None = None  # mask of the samples that were not finite, and whose rows are zero now
        self._joined: tuple[list[Stack], JoinedRows | None] | None = None  # what `_join_small` returns
        self._compacted: set[str] = set()  # parameters whose factors were replaced by dense gradients
        self._is_cleared = False  # whether all terms that have arrived were searched for samples to clear
        self.outside = OutsideMemory()

    def share_forward(self, other: PerSampleGradients) -> None:
        """Take what the forward pass is noted in from another loss of the same pass."""
        self.outside, self.tried = other.outside, other.tried

    def grow(self, batch_size: int) -> None:
        super().grow(batch_size)
        self._start_answers()
        self._split_stacks()
        for name, stack in list(self._stacks.items()):
            self._keep(Stack([name], add_samples(stack.term, batch_size)))

    def _find_need_of_whole_batch(self) -> str:
        return "positions are recorded" if self._positions is not None else super()._find_need_of_whole_batch()

    @property
    def _keeps_rows(self) -> bool:
        return True

    def _receive(self, name: str, term: Term) -> None:
        self._start_answers()
        before = self._find_term(name)
        self._keep(Stack([name], term if before is None else add_terms([before, term])))

    @property
    def has_positions(self) -> bool:
        return self._positions is not None

    def receive(self, parameter: Tensor, term: Term) -> None:
        name = self._names.get(id(parameter))
        if self._positions is None or name is None:
            super().receive(parameter, term)
            return
        is_split = term.batch == self.batch_size * self._positions
        kept = self._parts if is_split else self._rest
        term = self.outside.copy_factors(term)
        kept[name] = term if name not in kept else add_terms([kept[name], term])
        if is_split:
            samples = torch.arange(term.batch, device=next(find_factors(term)).device) // self._positions
            term = merge_samples(term, make_groups(samples, self.batch_size))
        super().receive(parameter, term)

    def _receive_stack(self, stack: Stack) -> None:
        self._start_answers()
        if self._stacks.keys().isdisjoint(stack.names):
            self._keep(stack)
        else:  # of another backward pass
            for name, term in stack.split():
                self._receive(name, term)

    def note_outside(self, tensor: Tensor) -> None:
        self.outside.add(tensor)

    def finish(self) -> None:
        super().finish()
        self.outside.forget_copies()

    def __repr__(self) -> str:
        if self._is_empty:
            return "PerSampleGradients(nothing recorded yet)"
        numbers = self.row_count * sum(p.numel() for p in self._parameters.values())
        size = format_bytes(4 * numbers)
        described = f"{self._describe_rows()}, {self._describe_reduction()}, dense() would take {size}"
        described += self._describe_nonfinite(len(self._list_cleared()))
        lines = [f"PerSampleGradients({described}"]
        for name, p in self._parameters.items():
            lines.append(f"  {name}: {tuple(p.shape)} {self._describe_term(name)}")
        return "\n".join([*lines, *self._describe_verification()])

    # ---- answers ----

    @torch.no_grad()
    @in_full_precision
    def dense(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """`{name: (batch, *shape)}`: the gradients themselves, which take `batch_size` times the memory of the model.

        Args:
            names: the parameters to include; all by default.
        """
        chosen = self.names if names is None else [names] if isinstance(names, str) else list(names)
        buffers.start_round()
        return {name: self._compute_dense(name) for name in chosen}

    @torch.no_grad()
    @in_full_precision
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
        for name, p in self._parameters.items():
            found[name] = p.new_empty(1, *p.shape)
            self._term(name).some(row, row + 1).write(found[name], self._scale)
        return {name: part[0] for name, part in found.items()}

    @torch.no_grad()
    @in_full_precision
    def sum(self, weights: Tensor | None = None, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the weighted sum of the rows.

        Args:
            weights: `(batch,)`, the weight of each row; 1 by default.
            own: sum over the rows of this process only, without communication.
        """
        if weights is None:
            weights = torch.ones(self.row_count, device=self._device, dtype=torch.float32)
        self._check_weights("sum", weights)
        weights = weights.to(self._device) * self._scale
        self._check_done()
        self._clear_nonfinite()
        return self._add_weighted(lambda stack: stack.sum(weights, self._exact), own, *self._join_small())

    @torch.no_grad()
    @in_full_precision
    def mean(self) -> dict[str, Tensor]:
        """`{name: shape}`: the mean of the rows, that is the gradient of the mean loss."""
        count = max(1, self._count_rows())
        return {name: total / count for name, total in self.sum().items()}

    @torch.no_grad()
    @in_full_precision
    def clip(self, max_norm: float, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the sum of the rows, each scaled down to a norm of at most `max_norm`.

        Args:
            max_norm: the bound on the norm of each row.
            per_parameter: bound each parameter's part of a row separately.
            own: sum over the rows of this process only, without communication.
        """
        if not per_parameter:
            squares = self._settle_rows()
            if not squares.names:
                return self.sum(own=own)
            weights = squares.compute_clip_weights(max_norm, self._scale)
            return self._add_weighted(lambda stack: stack.sum(weights, self._exact), own, *self._join_small())
        norms = self.norms(per_parameter=True)
        factors = {name: compute_clip_factors(part, max_norm) * self._scale for name, part in norms.items()}
        self._split_stacks()
        return self._add_weighted(
            lambda stack: stack.sum(factors[stack.names[0]], self._exact), own, self._list_stacks()
        )

    @torch.no_grad()
    @in_full_precision
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
    @in_full_precision
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
        return self._add_parts(parts, other.row_count) * (self._scale * other._scale)

    @torch.no_grad()
    @in_full_precision
    def inner(self, other: PerSampleGradients) -> Tensor:
        """`(batch,)`: the inner product of each row with the same row of `other`, of the same parameters."""
        if other.names != self.names or other.row_count != self.row_count:
            raise PerSampleError("inner() needs two recordings of the same parameters and numbers of rows.")
        others = other._terms()
        parts = (term.inner(others[name]) for name, term in self._terms().items())
        return self._add_parts(parts) * (self._scale * other._scale)

    @torch.no_grad()
    @in_full_precision
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
        if method not in METHODS:
            raise PerSampleError(f"method must be one of {', '.join(map(repr, METHODS))}; got {method!r}.")
        if dim < 1:
            raise PerSampleError(f"dim must be a positive number, got {dim}.")
        for name, p in self._parameters.items():
            if p.is_complex():
                raise PerSampleError(f"'{name}' is complex, and project() is defined for real parameters only.")
        self._check_done()
        self._clear_nonfinite()
        found = {name: self._find_term(name) for name in self._parameters} if self.row_count else {}
        terms = {name: term for name, term in found.items() if term is not None and term.shape.numel()}
        shapes = tuple((name, p.shape) for name, p in self._parameters.items())
        projection = make_projection(method, dim, seed, shapes, self._device)
        return projection.project(terms, self.row_count) * self._scale

    def projection_blocks(self, dim: int) -> dict[str, slice]:
        """`{name: slice}`: the entries of a row of `project(dim, method="kronecker")` that belong to each parameter.

        The numbers are in proportion to the cube roots of the parameters' sizes. A parameter with fewer entries than
        that is stored as it is. Parameters with a share of less than 8 have the same slice.
        """
        return allocate(dim, {name: p.shape for name, p in self._parameters.items()})

    @torch.no_grad()
    @in_full_precision
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
        return self._replace_terms({name: Dense(part.clone()) for name, part in scaled.items()}, LossReduction("sum"))

    @torch.no_grad()
    @in_full_precision
    def select(self, names: Iterable[str]) -> PerSampleGradients:
        """The gradients of some parameters; those of all others are zero.

        >>> import persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> grads.norms(per_parameter=True)["bias"][0], grads.select(["bias"]).norms()[0]
        (tensor(1.4142), tensor(1.4142))
        """
        terms = {name: self._term(name) for name in ([names] if isinstance(names, str) else names)}
        return self._replace_terms(terms, self._reduction)

    def _replace_terms(self, terms: Mapping[str, Term], loss_reduction: LossReduction) -> PerSampleGradients:
        """Gradients of the same samples and parameters with other terms; zero where there is none."""
        other = PerSampleGradients(self._parameters, loss_reduction, Processes(), self._nonfinite_mode)
        other._units, other._batch_size, other._processes = self._units, self.batch_size, self._processes
        for name, term in terms.items():
            other._receive(name, term)
        other._is_backward_done = True
        return other

    @torch.no_grad()
    @in_full_precision
    def second_moment(self, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the mean over the rows of each entry's square."""
        count = max(1, self._count_rows())
        squares = ((name, term.square_sum(memory // 4) * self._scale**2) for name, term in self._terms().items())
        return {name: self._add_over_processes(name, part) / count for name, part in squares}

    @torch.no_grad()
    @in_full_precision
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
        self._check_weights("fisher_diagonal", weights)
        if host.decides_late(weights.device):
            host.require((weights >= 0).all(), "fisher_diagonal() needs weights that are not negative.")
        elif bool((weights < 0).any()):
            raise PerSampleError("fisher_diagonal() needs weights that are not negative.")
        roots = weights.double().sqrt() * self._scale
        found = {}
        for name, term in self._terms().items():
            weighted = widen_factors(term).weigh_samples(roots)
            found[name] = self._add_over_processes(name, weighted.square_sum(memory // 4))
        return found

    @torch.no_grad()
    @in_full_precision
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
        if kind not in ("expand", "reduce"):
            raise PerSampleError(f"kind must be 'expand' or 'reduce', got {kind!r}.")
        if self._compacted:
            raise PerSampleError(
                f"The factors of {sorted(self._compacted)} were replaced by dense gradients, which an answer before "
                "needed and which take less memory. Ask for kfac_factors() before norms() and clip()."
            )
        found = {name: compute_kronecker_factors(term, kind, self._scale) for name, term in self._terms().items()}
        return {name: factors for name, factors in found.items() if factors is not None}

    @torch.no_grad()
    @in_full_precision
    def variance(self, correction: int = 1, memory: int = MEMORY) -> dict[str, Tensor]:
        """`{name: shape}`: the variance over the rows of each entry; unbiased with the default correction."""
        count = self._count_rows()
        factor = 1 / (count - correction) if count > correction else torch.nan
        scales = torch.full((self.row_count,), self._scale, device=self._device, dtype=torch.float64)
        found = {}
        for name, term in self._terms().items():
            exact = convert_to_double(term)  # the difference of squares below cancels in float32
            total = self._add_over_processes(name, exact.sum(scales), double=True)
            squares = self._add_over_processes(name, exact.square_sum(memory // 8) * self._scale**2, double=True)
            spread = squares - total.abs().square() / max(1, count)
            found[name] = (spread.clamp(min=0) * factor).to(widen(self._parameters[name]).abs().dtype)
        return found

    @torch.no_grad()
    @in_full_precision
    def noise_scale(self) -> Tensor:
        """The batch size at which the noise of the mean gradient is as large as the gradient.

        This is the simple noise scale of McCandlish et al. (2018), tr(Σ) / |G|², from unbiased estimates of both parts.
        A negative number means that the estimate of |G|² is negative: the mean gradient of this batch is shorter than
        its noise alone would make it, so the noise scale is larger than the batch, and cannot be told from it. Average
        both parts over more batches, or take a larger one.
        """
        size = self._count_rows()
        if size < 2:
            raise PerSampleError(f"noise_scale() needs at least two {self._row_kind}.")
        noise = self._sum_entries(self.variance())
        of_mean = self._sum_entries({name: part.abs().square() for name, part in self.mean().items()})
        return (noise / (of_mean - noise / size)).to(self.norms().dtype)

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
        if self._positions is None:
            raise PerSampleError("by_position() needs the number of positions: record(model, positions=T).")
        self._check_done()
        if self._rest and not allow_rest:
            raise PerSampleError(
                f"{sorted(self._rest)} are used without one dimension of {self._positions} positions that the function "
                "treats one by one, so that parts of their gradients belong to no position. Leave them out with "
                "record(parameters=...), or pass allow_rest=True to get these parts as the rest."
            )
        parts = self._make_rows(self._parts, self.batch_size * self._positions)
        return PositionGradients(self._positions, parts, self._make_rows(self._rest, self.batch_size), self._scale)

    def _make_rows(self, terms: Mapping[str, Term], count: int) -> PerSampleGradients:
        """Gradients with other rows, from terms with these rows, before they are scaled."""
        found = PerSampleGradients(self._parameters, LossReduction("sum"), Processes(), "keep")
        found._batch_size = count
        for name, term in terms.items():
            found._receive(name, term)
        found._is_backward_done = True
        return found

    @torch.no_grad()
    @in_full_precision
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
        recordings = [self, *others]
        if any(recording.names != self.names for recording in others):
            raise PerSampleError("combine() needs recordings of the same parameters; these differ.")
        if self._processes_differ(recordings):
            raise PerSampleError("combine() is not available under several processes.")
        found = self._make_rows({}, 0)
        found._nonfinite_mode = self._nonfinite_mode
        units, parts = combine_units([recording._get_units() for recording in recordings])
        found._units, found._batch_size = units, sum(recording.batch_size for recording in recordings)
        for name in self.names:
            terms = []
            for recording, groups in zip(recordings, parts, strict=True):
                term = recording._find_term(name)
                if term is not None:
                    recording._check_done()
                    terms.append(merge_samples(term, groups.scale(recording._scale)))
            if terms:
                found._receive(name, add_terms(terms))
        found.verification, found.row_verification = self.verification, self.row_verification
        return found

    @torch.no_grad()
    @in_full_precision
    def pass_terms_to(self, receive: Callable[[Stack], None]) -> None:
        """Call a function with each term."""
        self._check_done()
        self._clear_nonfinite()
        for stack in self._list_stacks():
            receive(stack)

    # ---- inside ----

    @staticmethod
    def _processes_differ(recordings: Iterable[PerSampleGradients]) -> bool:
        return any(type(recording._processes) is not Processes for recording in recordings)

    def _get_units(self) -> Units:
        if self._units is None or not self._units.are_named:
            raise PerSampleError("combine() needs recordings with the unit of each sample: record(model, units=ids).")
        return self._units

    def _check_weights(self, answer: str, weights: Tensor) -> None:
        if weights.shape != (self.row_count,):
            count, shape = f"{self.row_count} {self._row_kind}", tuple(weights.shape)
            raise PerSampleError(f"{answer}() needs one weight for each of {count}, got shape {shape}.")

    def _sum_entries(self, parts: Mapping[str, Tensor]) -> Tensor:
        sums = [self._processes.gather(part.sum(dtype=torch.float64)) for part in parts.values()]
        return torch.stack(sums).sum()

    def _add_parts(self, parts: Iterable[Tensor], *more: int) -> Tensor:
        """The sum of tensors of shape `(batch, *more)`; zeros if there are none."""
        total = torch.zeros(self.row_count, *more, device=self._device, dtype=torch.float32)
        for part in parts:
            total = total + part
        return total

    def _add_weighted(
        self,
        sum_rows: Callable[[Stack | JoinedRows], dict[str, Tensor]],
        own: bool,
        stacks: Iterable[Stack],
        joined: JoinedRows | None = None,
    ) -> dict[str, Tensor]:
        """`{name: shape}`: weighted sums of the rows, of which `sum_rows` gives those of one stack."""
        found: dict[str, Tensor] = {} if joined is None else sum_rows(joined)
        for stack in stacks:
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
            self._joined = None
            for name, term in stack.split():
                self._stacks[name] = own = Stack([name], term)
                own.note_versions()

    def _term(self, name: str) -> Term:
        if name not in self._parameters:
            raise PerSampleError(f"'{name}' is not a parameter of this recording.")
        self._check_done()
        self._clear_nonfinite()
        p, term = self._parameters[name], self._find_term(name)
        return Dense(p.new_zeros(()).expand(self.row_count, *p.shape)) if term is None else term

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
        result = buffers.empty((self.row_count, *p.shape), p.dtype, p.device)
        term.write(result, self._scale)
        return result

    def _describe_term(self, name: str) -> str:
        return type(self._stacks[name].term).__name__ if name in self._stacks else "not used"

    def _settle_rows(self) -> SquaredNorms:
        squares = self._measure()
        if squares.is_late:
            self._require_finite(squares)
        else:
            self._settle(squares, squares.find_doubtful(), squares.names)
        return squares

    def _settle_parts(self) -> SquaredNorms:
        squares = self._measure()
        if squares.is_late:
            self._require_finite(squares)
        else:
            for name, doubtful in squares.find_doubtful_parts().items():
                self._settle(squares, doubtful, [name])
        return squares

    def _require_finite(self, squares: SquaredNorms) -> None:
        if self._nonfinite_mode == "raise":
            squares.require_finite()

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
            return self._list_cleared()
        if not squares.is_late:
            squares.settle(squares.find_doubtful(), squares.names, self._compute_exact_row)
        return squares.nonfinite

    def _measure(self) -> SquaredNorms:
        """The squared norms as they are; keeps the dense form of terms if the norms needed it and it is smaller."""
        self._check_done()
        self._clear_nonfinite()
        return self._measure_stacks()

    def _measure_stacks(self) -> SquaredNorms:
        squares, before = SquaredNorms(self._nonfinite_mode), [(stack, stack.term) for stack in self._list_stacks()]
        for stack, _ in before:
            compact_stack(stack)
        others, joined = self._join_small()
        measure_stacks(others, squares, compact=True)
        for stack, term in before:
            if stack.term is not term and has_both_sides(term) and not has_both_sides(stack.term):
                self._compacted.update(stack.names)
        if joined is not None:
            squares.add_joined(joined)
        return squares

    def _join_small(self) -> tuple[list[Stack], JoinedRows | None]:
        """The stacks of large terms, and the rows of the small ones in one matrix."""
        stacks = self._list_stacks()
        if tracing.get_trace() is not None:
            return stacks, None
        if self._joined is None:
            small = SmallStacks()
            others = [stack for stack in stacks if not small.add(stack)]
            joined = small.join(others)
            self._joined = others, joined
        return self._joined

    def _clear_nonfinite(self) -> None:
        """With nonfinite="zero": set the rows of samples that are not finite to zero."""
        if self._nonfinite_mode != "zero" or self._is_cleared or not self._stacks or not self.batch_size:
            return
        self._is_cleared = True
        squares = self._measure_stacks()
        squares.note_infinite()
        mask = squares.clear_nonfinite()
        if mask is not None:
            self._cleared = mask if self._cleared is None else mask | self._cleared
            for stack in self._list_stacks():
                self._keep(stack.clear_samples(mask))

    def _list_cleared(self) -> set[int]:
        return set() if self._cleared is None else find_true(self._cleared)

    def _keep(self, stack: Stack) -> None:
        if tracing.get_trace() is None:  # a compiled step computes its answers before anything can change
            stack.term = self.outside.copy_factors(stack.term)
        stack.note_versions()
        self._joined = None
        for name in stack.names:
            self._stacks[name] = stack

    def _start_answers(self) -> None:
        """Forget what was found about samples: terms have arrived."""
        self._is_cleared = False
        self._exact.clear()

    def _terms(self) -> dict[str, Term]:
        return {name: self._term(name) for name in self._parameters}
