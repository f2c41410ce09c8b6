"""How the back-propagated loss combines the samples, and what follows for the rows."""

from __future__ import annotations

from torch import Tensor

from persample.errors import PerSampleError
from persample.layouts import Divisor, Reduced, Reduction, SampleUnits, describe_divisors, find_own_factors
from persample.terms import Term


class LossReduction:
    """How the loss of a recording combines the samples: as given, or as found in its backward passes.

    Args:
        given: "sum" or "mean"; None: as found.
        owns_divisor: divide each sample's part of a mean by its own number of targets, not by that of the batch.
    """

    def __init__(self, given: str | None = None, owns_divisor: bool = False) -> None:
        self.given = given
        self._owns_divisor = owns_divisor
        self._found: Reduction | None = None
        self._divisors: tuple[Divisor, ...] = ()
        self._batch = 0
        self.units: SampleUnits | None = None
        self._factors: Tensor | None = None  # of the samples' parts in the running backward pass

    @property
    def kind(self) -> str:
        """ "sum" or "mean"."""
        return self.given or self._found or "sum"

    @property
    def units_have_met(self) -> bool:
        """Whether samples of one unit were combined, so that none of them has a loss of its own."""
        return self.units is not None and self.units.have_met

    @property
    def _met_units(self) -> SampleUnits | None:
        return self.units if self.units_have_met else None

    def _describe_divisors(self) -> str | None:
        return describe_divisors(self._divisors, self._batch, self._met_units)

    @property
    def has_own_means(self) -> bool:
        """Whether samples with different parts of a divisor have had theirs divided by their own numbers."""
        return self._owns_divisor and self._describe_divisors() is not None

    def __str__(self) -> str:
        divisors = self._describe_divisors()
        if divisors is None:
            return self.kind
        return f"{self.kind} of the samples' own means" if self.has_own_means else f"{self.kind} over {divisors}"

    def take(self, loss: Reduced, batch: int) -> None:
        """Take the loss that a backward pass starts from. All backward passes must agree."""
        given, where = self.given, f"{loss.cause}, in {loss.place}"
        if not loss.is_clear and given is None:
            raise PerSampleError(
                f"Whether the loss is a sum or a mean over the samples is not clear: {where}. Pass "
                "loss_reduction='sum' or 'mean' to say by which factor the rows are scaled, or reduce all parts alike."
            )
        if given is not None and loss.is_clear and loss.kind != given:
            raise PerSampleError(
                f"loss_reduction='{given}' was given, but the back-propagated loss is a {loss.kind} over the samples: "
                f"{where}. Pass loss_reduction='{loss.kind}', or leave it out to use what is found."
            )
        self._divisors, self._batch = loss.divisors if loss.is_share else (), batch
        factors = find_own_factors(self._divisors, batch, self._met_units) if self._owns_divisor else None
        if isinstance(factors, str):
            raise PerSampleError(
                f"divisor='own' was given, but {factors}: {where}. Reduce each sample's loss by itself first, or leave "
                "divisor='batch', which holds the number of the whole batch constant."
            )
        self._factors = factors
        self.set_found(loss.kind)

    def set_found(self, found: Reduction) -> None:
        """Note how a backward pass combines the samples."""
        if self.given is None and self._found not in (None, found):
            raise PerSampleError(
                f"One backward pass of this recording starts from a {self._found} over the samples, another from a "
                f"{found}: the rows of both cannot be added up. Reduce all losses alike, or pass loss_reduction."
            )
        self._found = found

    def end_pass(self) -> None:
        """Note that a backward pass has ended."""
        self._factors = None

    def weigh(self, term: Term, times: int = 1) -> Term:
        """The term of the running backward pass, with each sample's part divided by its own number.

        It has the samples of `times` parameters, one after the other.
        """
        if self._factors is None:
            return term
        return term.weigh_samples(self._factors.repeat(times))
