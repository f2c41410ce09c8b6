"""Recordings that know beforehand what will be asked: terms are reduced when they arrive, and freed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from persample._internal.dtypes import widen
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients.base import NotKept, RecordedGradients
from persample.gradients.clipping import Bound, compute_clip_factors
from persample.gradients.matrix import PerSampleGradients
from persample.terms import Term


class _Streamed(RecordedGradients):
    """Keeps the squared norms by parameter, and what a subclass adds."""

    _kept: str

    def __init__(self, parameters: Mapping[str, Tensor], loss_reduction: str, processes: Processes) -> None:
        super().__init__(parameters, loss_reduction, processes)
        self._squares: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(PerSampleGradients, name):
            raise NotKept(
                f"This recording has kept {self._kept} only, which does not answer {name}(). Record with "
                "keep='everything'."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:
        if self._is_empty:
            return f"{type(self).__name__}(nothing recorded yet)"
        lines = [f"{type(self).__name__}(batch_size={self.batch_size}"]
        for name, p in self._parameters.items():
            lines.append(f"  {name}: {tuple(p.shape)} {'norms only' if name in self._squares else 'not used'}")
        return "\n".join(lines) + ")"

    def _compute_squared_norms(self) -> dict[str, Tensor]:
        self._check_done()
        unused = {name: p for name, p in self._parameters.items() if name not in self._squares}
        zeros = {name: widen(p).abs().new_zeros(self.batch_size) for name, p in unused.items()}
        return {name: zeros[name] if name in zeros else self._squares[name] for name in self._parameters}

    def _refuse_second_pass(self, name: str) -> NoReturn:
        raise PerSampleError(
            f"A second backward pass reached '{name}' in a recording that keeps {self._kept} only: the norm of a sum "
            "of two passes cannot be computed from the two norms. Add the losses before backward(), or record with "
            "keep='everything'."
        )


class StreamedNorms(_Streamed):
    """The norms, and nothing else: `record(model, keep="norms")`."""

    _kept = "norms"

    def _receive(self, name: str, term: Term) -> None:
        if name in self._squares:
            self._refuse_second_pass(name)
        self._squares[name] = term.squared_norms()


class StreamedClip(_Streamed):
    """The norms and the clipped sum: `record(model, keep="clip", max_norm=1.0)`.

    With one backward pass, the factors are kept until the pass has ended and are then reduced. With two passes nothing
    is kept: the first computes the norms, the second, over the same graph, the sum of the scaled rows. If each
    parameter has a bound of its own, its clipped sum needs its own norms only, and one pass keeps nothing either.
    """

    _kept = "clip"

    def __init__(
        self, parameters: Mapping[str, Tensor], loss_reduction: str, processes: Processes, bound: Bound
    ) -> None:
        super().__init__(parameters, loss_reduction, processes)
        self.max_norm = bound.max_norm
        self.passes: int | None = bound.passes
        self._bound = bound
        if isinstance(self.max_norm, Mapping):
            wrong = sorted(self.max_norm.keys() ^ self._parameters.keys())
            if wrong:
                raise PerSampleError(f"max_norm must have a bound for each recorded parameter; it differs in {wrong}.")
            self.passes = 1
        self._terms: dict[str, Term] = {}
        self._factors: Tensor | None = None
        self._clipped: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] | None = None
        self._versions: dict[str, int] = {}  # of the totals when they were returned
        self._is_own = False  # whether the totals are of this process only
        self._reason = ""
        self._passes_done = 0

    def __repr__(self) -> str:
        passes = f"{self.passes or 'no'} backward pass{'es' if self.passes == 2 else ''}{self._reason}"
        return f"{super().__repr__()}\n  clipped at {self.max_norm} in {passes}"

    # ---- filling ----

    @property
    def is_complete(self) -> bool:
        """Whether all backward passes have ended."""
        return self._passes_done == self.passes

    @property
    def is_first_of_two(self) -> bool:
        """Whether the running backward pass is the one for the norms only."""
        return self.passes == 2 and self._factors is None

    def choose_passes(self, factor_bytes: int) -> int:
        """The number of backward passes: one, unless the factors that it keeps would take more than `memory` bytes."""
        if self.passes is None:
            factor_bytes = self._processes.find_largest(factor_bytes)
            self.passes = 2 if factor_bytes > self._bound.memory else 1
            self._reason = f": {factor_bytes} bytes to keep, {self._bound.memory} allowed"
        return self.passes

    def _receive(self, name: str, term: Term) -> None:
        if self._passes_done >= (self.passes or 1):
            self._refuse_second_pass(name)
        if self.passes == 2 and self._factors is not None:
            self._clipped[name] = term.sum(self._factors * self._scale)
            return
        if name in self._squares:
            self._refuse_second_pass(name)
        if self.passes == 2:
            self._squares[name] = term.squared_norms()
            return
        self._squares[name], term = term.compute_norms_and_compact()
        if isinstance(self.max_norm, Mapping):
            norms = self._squares[name].clamp(min=0).sqrt() * self._scale
            factors = compute_clip_factors(norms, self.max_norm[name], self._bound.stabiliser)
            self._clipped[name] = term.sum(factors * self._scale)
        else:
            self._terms[name] = term

    def finish(self) -> None:
        """Note that a backward pass has ended: the norms are complete, so the factors can be computed."""
        super().finish()
        self._passes_done += 1
        if self.passes is None:
            self.passes, self._reason = 1, ": loss.backward() was not called inside the block"
        if self._factors is None and not isinstance(self.max_norm, Mapping):
            self._factors = compute_clip_factors(self.norms(), self.max_norm, self._bound.stabiliser)
            weights = self._factors * self._scale
            for name, term in self._terms.items():
                self._clipped[name] = term.sum(weights)
            self._terms.clear()

    # ---- the answer ----

    def clip(self, max_norm: float | None = None, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the clipped sum.

        Args:
            max_norm: the bound that the recording was given, or None.
            per_parameter: must be False; give `record` a bound for each parameter instead.
            own: sum over the rows of this process only, without communication.
        """
        self._check_done()
        if self.batch_size and self.passes == 2 and self._passes_done < 2:
            raise PerSampleError("Two passes need loss.backward() to be called inside the block, and it was not.")
        if per_parameter or max_norm not in (None, self.max_norm):
            raise PerSampleError(f"This recording has kept the sum clipped at {self.max_norm} only.")
        if self._totals is None:
            parts = {name: self._get_own_part(name) for name in self._parameters}
            self._totals = {name: self._add_over_processes(name, part, own=own) for name, part in parts.items()}
            self._clipped.clear()
            self._versions = {name: total._version for name, total in self._totals.items()}
            self._is_own = own
            return dict(self._totals)
        if own != self._is_own:
            raise PerSampleError(f"clip(own={self._is_own}) was called before; clip(own={own}) is no longer available.")
        if any(total._version != self._versions[name] for name, total in self._totals.items()):
            raise PerSampleError("The clipped sum that clip() returned was changed in place; there is no other copy.")
        return {name: total.clone() for name, total in self._totals.items()}

    def _get_own_part(self, name: str) -> Tensor:
        return self._clipped[name] if name in self._clipped else torch.zeros_like(self._parameters[name])


def run_backward_twice(anchor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call of `backward` as two: one that reaches the weights only, for the norms, then the user's own."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    func(args[0], **{**given, "retain_graph": True, "inputs": [anchor]})
    return func(args[0], **given)
