"""What all kinds of recorded gradients answer: the parameters, the batch, the norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from persample._internal.precision import in_full_precision
from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.forward import CONTRIBUTIONS
from persample.gradients.clipping import compute_clip_factors
from persample.gradients.explanation import Explanation, TriedFunctions
from persample.gradients.intake import Intake, make_zeros

P = ParamSpec("P")
R = TypeVar("R")


def answer(function: Callable[P, R]) -> Callable[P, R]:
    """The function, without gradients and in full precision."""
    return torch.no_grad()(in_full_precision(function))


class NotKept(PerSampleError, AttributeError):
    """A recording was asked for an answer that it has not kept."""


class OfRecording:
    """What the gradients of one recording tell of it, also those of several losses."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    @property
    def verification(self) -> str:
        """Whether samples were compared with the batch, in words."""
        return self._intake.notes.verification

    @property
    def row_verification(self) -> str:
        """Whether a row was compared with the gradient of the sample alone, in words."""
        return self._intake.notes.row_verification

    @property
    def tried(self) -> TriedFunctions:
        """The functions whose motion was found by trial."""
        return self._intake.notes.tried

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self._intake.rows.batch_size

    @property
    def row_count(self) -> int:
        """The number of rows of all answers: the number of units if the recording has units, else of samples."""
        return self._intake.rows.count

    @property
    def names(self) -> list[str]:
        """The names of the recorded parameters, as in `model.named_parameters()`."""
        return list(self._intake.parameters)

    def explain(self) -> Explanation:
        """What was kept for each parameter, and which functions were tried because persample does not know them.

        >>> import persample
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> with persample.record(model, keep="norms") as grads:
        ...     model(torch.randn(5, 3)).square().mean().backward()
        >>> print(grads.explain())
          parameter  kept
          ---------  ----------
          weight     norms only
          bias       norms only
        <BLANKLINE>
        The definition of every function is known: none was tried.
        """
        return Explanation({name: self._intake.describe_term(name) for name in self.names}, self.tried.list())


class RecordedGradients(OfRecording):
    """The gradients of one recording, which its `Intake` holds. Subclasses differ in what they can answer."""

    def __len__(self) -> int:
        """The number of rows of this process: `row_count`, and 0 before the first forward pass."""
        return 0 if self._intake.rows.size is None else self.row_count

    def __bool__(self) -> bool:
        """True, also for an empty batch: a recording is no list."""
        return True

    @property
    def units(self) -> list[Any]:
        """The unit of each row, in the order of the rows; without units, the numbers of the samples."""
        return list(self._intake.rows.names)

    @property
    def loss_reduction(self) -> str:
        """How the back-propagated loss combines the samples, as given or as found in backward.

        "sum", "mean", or, if samples have different parts of the divisor, what it counts: "mean over 36 targets".
        """
        return self._intake.reduction.describe(self._intake.rows)

    def shared(self) -> dict[str, Tensor]:
        """`{name: shape}`: the gradient of what the loss adds to the samples' parts, such as a penalty on the weights.

        It belongs to no sample, so it is in no row. The gradient that `backward` computes is `sum()`, or `mean()` of a
        mean loss, and this.

        >>> import persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as grads:
        ...     (model(torch.randn(5, 3)).square().mean() + model.weight.square().sum()).backward()
        >>> torch.equal(grads.shared()["weight"], 2 * model.weight)
        True
        """
        intake = self._intake
        intake.check_done()
        return {
            name: intake.shared[name] if name in intake.shared else torch.zeros_like(p)
            for name, p in intake.parameters.items()
        }

    @property
    def has_own_means(self) -> bool:
        """Whether the parts of a mean were divided by the samples' own numbers, so that rows do not add up to it."""
        return self._intake.reduction.has_own_means(self._intake.rows)

    @property
    def coupled(self) -> str | None:
        """ "contributions" if the rows are contributions of samples that may influence each other, else None."""
        return "contributions" if self.verification == CONTRIBUTIONS else None

    @property
    def processes(self) -> Processes:
        """The processes that share the batch."""
        return self._intake.rows.processes

    def samples(self) -> int:
        """The number of samples of all processes; with one process, the `batch_size`."""
        return self._intake.rows.processes.count(self.batch_size)

    @overload
    def norms(self, per_parameter: Literal[False] = False) -> Tensor: ...

    @overload
    def norms(self, per_parameter: Literal[True]) -> dict[str, Tensor]: ...

    @answer
    def norms(self, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
        """`(batch,)`: the norm of each sample's gradient; with `per_parameter`, `{name: (batch,)}`."""
        intake = self._intake
        if per_parameter:
            found = intake.settle_parts().compute_part_norms()
            for name in intake.parameters.keys() - found.keys():
                found[name] = make_zeros(intake, name)
            return {name: found[name] * intake.scale for name in intake.parameters}
        squares = intake.settle_rows()
        if squares.names:
            return squares.compute_norms().mul_(intake.scale)
        zeros = [make_zeros(intake, name) for name in intake.parameters]
        return torch.stack(zeros).sum(0) if zeros else torch.zeros(self.row_count, device=intake.rows.device)

    @answer
    def clip_factors(self, max_norm: float) -> Tensor:
        """`(batch,)`: the factor for each row that makes its norm at most `max_norm`."""
        return compute_clip_factors(self.norms(), max_norm)

    @property
    @in_full_precision
    def nonfinite_count(self) -> int:
        """The number of samples whose gradient is not finite, or so large that its squared norm overflows.

        With nonfinite="zero" these samples are left out. With units, it is the number of units with such a gradient.
        """
        return len(self.list_nonfinite())

    @in_full_precision
    def list_nonfinite(self) -> list[int]:
        """The rows that `nonfinite_count` counts."""
        self._intake.check_done()
        return sorted(self._intake.find_nonfinite())

    def _describe(self, nonfinite: int, *more: str) -> str:
        """The text of `repr`, given the number of rows that are not finite."""
        intake, rows, name = self._intake, self._intake.rows, type(self).__name__
        if rows.size is None or not intake.is_backward_done:
            return f"{name}(nothing recorded yet)"
        given = "" if intake.reduction.given else " as found"
        apart = ", a part of the loss that belongs to no sample in shared()" if intake.shared else ""
        parts = [rows.describe(), f"loss_reduction='{self.loss_reduction}'{given}{apart}", *more]
        if nonfinite:
            parts.append(f"{nonfinite} {rows.kind} not finite{' and left out' if intake.nonfinite == 'zero' else ''}")
        lines = [f"  {key}: {tuple(p.shape)} {intake.describe_term(key)}" for key, p in intake.parameters.items()]
        return "\n".join([f"{name}({', '.join(parts)}", *lines, *intake.notes.describe()])
