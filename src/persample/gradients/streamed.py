"""Gradients of which the wanted quantity is known beforehand: terms are reduced as they arrive, and freed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from persample._internal.dtypes import widen
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients.clipping import factors_of
from persample.gradients.matrix import PerSampleGradients
from persample.recording.options import Options
from persample.terms import Term

_SECOND_PASS = (
    "A second backward pass reached '{name}' in a recording that keeps {kept} only: what two passes have in common is "
    "lost by then. Add the losses up first, or record with keep='everything'."
)


class StreamedNorms(PerSampleGradients):
    """Knows the norms, and nothing else: `record(model, keep="norms")`."""

    kept = "norms"

    def __init__(self, parameters: Mapping[str, Tensor], loss_reduction: str, over: Processes) -> None:
        super().__init__(parameters, loss_reduction, over)
        self._squared: dict[str, Tensor] = {}

    def receive(self, parameter: Tensor, term: Term) -> None:
        name = self._names.get(id(parameter))
        if name is not None:
            if name in self._squared:
                raise PerSampleError(_SECOND_PASS.format(name=name, kept=self.kept))
            self._squared[name] = self._measured(name, term)

    def _measured(self, name: str, term: Term) -> Tensor:
        return term.squared_norms()

    def _squares(self) -> dict[str, Tensor]:
        self._check_done()
        unused = {name: p for name, p in self._parameters.items() if name not in self._squared}
        zeros = {name: widen(p).abs().new_zeros(self.batch_size) for name, p in unused.items()}
        return {name: self._squared[name] if name in self._squared else zeros[name] for name in self._parameters}

    def _term(self, name: str) -> Term:
        self._check_done()
        raise PerSampleError(
            f"This recording has kept {self.kept} only. Record with keep='everything' for other answers."
        )

    def _kind(self, name: str) -> str:
        return "norms only" if name in self._squared else "not used"


class StreamedClip(StreamedNorms):
    """Knows the norms and the clipped sum: `record(model, keep="clip", max_norm=1.0)`.

    With one backward pass the factors are kept until it has ended, then reduced. With two nothing is kept: the
    first gives the norms, the second, over the same graph, the sum of the rows times what the norms allow. Where each
    parameter has a bound of its own, its norms are all that its sum needs: nothing is kept either.
    """

    kept = "clip"

    def __init__(self, parameters: Mapping[str, Tensor], options: Options, over: Processes) -> None:
        super().__init__(parameters, options.loss_reduction, over)
        assert options.max_norm is not None
        self.max_norm = options.max_norm
        self.stabiliser = options.stabiliser
        self.passes: int | None = options.passes
        self.memory = options.memory
        if isinstance(self.max_norm, Mapping):
            if self.max_norm.keys() != self._parameters.keys():
                wrong = sorted(self.max_norm.keys() ^ self._parameters.keys())
                raise PerSampleError(f"max_norm has to name the recorded parameters, and differs from them in {wrong}")
            self.passes = 1
        self._factors: Tensor | None = None
        self._clipped: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] | None = None
        self._given: dict[str, int] = {}  # the versions of the totals when they were given out
        self._given_own = False
        self._reason = ""
        self._ended = 0

    @property
    def is_complete(self) -> bool:
        """Whether there has been all that was to come."""
        return self._ended == self.passes

    @property
    def first_of_two(self) -> bool:
        """Whether the backward pass that is running is there for the norms alone."""
        return self.passes == 2 and self._factors is None

    def choose(self, factor_bytes: int) -> int:
        """How many backward passes to make: one, unless what it keeps would take more than `memory`."""
        if self.passes is None:
            factor_bytes = self._over.agreed(factor_bytes)
            self.passes = 2 if factor_bytes > self.memory else 1
            self._reason = f": {factor_bytes} bytes to keep, {self.memory} allowed"
        return self.passes

    def receive(self, parameter: Tensor, term: Term) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            return
        if self._ended >= (self.passes or 1):
            raise PerSampleError(_SECOND_PASS.format(name=name, kept=self.kept))
        if self.passes == 2 and self._factors is not None:
            self._clipped[name] = term.sum(self._factors * self._scale)
            return
        super().receive(parameter, term)

    def _measured(self, name: str, term: Term) -> Tensor:
        if self.passes == 2:
            return term.squared_norms()
        squared, term = term.compute_norms_and_compact()
        if isinstance(self.max_norm, Mapping):
            norms = squared.clamp(min=0).sqrt() * self._scale
            self._clipped[name] = term.sum(factors_of(norms, self.max_norm[name], self.stabiliser) * self._scale)
        else:
            self._arrived[name] = term
        return squared

    def finish(self) -> None:
        """A backward pass has ended: with one, this is the time to reduce; with two, the first gives the factors."""
        super().finish()
        self._ended += 1
        if self.passes is None:
            self.passes, self._reason = 1, ": loss.backward() was not called inside the block"
        if self._factors is None and not isinstance(self.max_norm, Mapping):
            self._factors = factors_of(self._all_norms(), self.max_norm, self.stabiliser)
            weights = self._factors * self._scale
            for name, term in self._arrived.items():
                self._clipped[name] = term.sum(weights)
            self._arrived.clear()

    def clip(
        self, max_norm: float | None = None, per_parameter: bool = False, own: bool = False
    ) -> dict[str, Tensor]:
        self._check_done()
        if self.batch_size and self.passes == 2 and self._ended < 2:
            raise PerSampleError("The two passes are made by loss.backward() inside the block, and there was none.")
        if per_parameter or max_norm not in (None, self.max_norm):
            raise PerSampleError(f"This recording kept the sum clipped at {self.max_norm} only.")
        if self._totals is None:
            self._totals = {name: self._total(name, self._own_clipped(name), own=own) for name in self._parameters}
            self._clipped.clear()
            self._given = {name: total._version for name, total in self._totals.items()}
            self._given_own = own
            return dict(self._totals)
        if own != self._given_own:
            raise PerSampleError("The clipped sum was asked for with another `own` before, and is not kept twice.")
        if any(total._version != self._given[name] for name, total in self._totals.items()):
            raise PerSampleError("The clipped sum was changed in place since clip() gave it, and is not kept twice.")
        return {name: total.clone() for name, total in self._totals.items()}

    def _own_clipped(self, name: str) -> Tensor:
        """What the samples of this process give."""
        return self._clipped[name] if name in self._clipped else torch.zeros_like(self._parameters[name])

    def __repr__(self) -> str:
        passes = f"{self.passes or 'no'} backward pass{'es' if self.passes == 2 else ''}{self._reason}"
        return f"{super().__repr__()}\n  clipped at {self.max_norm} in {passes}"


def backward_twice(anchor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of backward as two: one that reaches only the weights, for the norms, and then the user's own."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    func(args[0], **{**given, "retain_graph": True, "inputs": [anchor]})
    return func(args[0], **given)
