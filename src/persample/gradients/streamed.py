"""Recordings that know beforehand what will be asked, and keep that answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients.base import NotKept, RecordedGradients
from persample.gradients.clip_intake import ClipIntake
from persample.gradients.intake import add_all_over_processes
from persample.gradients.matrix import PerSampleGradients
from persample.gradients.stack import Stack
from persample.gradients.streamed_norms import NormsIntake, Streamed


class StreamedGradients(RecordedGradients):
    """Refuses answers that need what was not kept."""

    _intake: Streamed

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised an AttributeError: raise that one again
            return object.__getattribute__(self, name)
        if not name.startswith("_") and hasattr(PerSampleGradients, name):
            raise NotKept(
                f"This recording has kept {self._intake.kept} only, which does not answer {name}(). Record with "
                "keep='everything'."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return self._describe(len(self._intake.squares.nonfinite))

    def __getitem__(self, sample: int) -> NoReturn:
        raise NotKept(f"This recording has kept {self._intake.kept} only, and no rows. Record with keep='everything'.")


class StreamedNorms(StreamedGradients):
    """The norms, and nothing else: `record(model, keep="norms")`.

    >>> import persample
    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, keep="norms") as grads:
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> grads.norms().shape
    torch.Size([5])
    """

    _intake: NormsIntake

    def pass_terms_to(self, receive: Callable[[Stack], None]) -> None:
        """Call a function with each term that arrives from now on, for an answer that has to be computed at once."""
        self._intake.pass_terms_to(receive)

    def norm_of_sum(self) -> Tensor:
        """The norm of the sum of the rows of this process. Requires `keep_grad`, which computes the sum anyway."""
        return self._intake.compute_norm_of_sum()


class StreamedClip(StreamedGradients):
    """The norms and the clipped sum: `record(model, keep="clip", max_norm=1.0)`.

    With one backward pass, the factors are kept until the pass has ended and are then reduced. With two passes nothing
    is kept: the first computes the norms, the second, over the same graph, the sum of the scaled rows.

    >>> import persample, torch
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, keep="clip", max_norm=1.0) as grads:
    ...     model(torch.randn(5, 3)).square().mean().backward()
    >>> grads.clip()["weight"].shape, grads.passes
    (torch.Size([2, 3]), 1)
    """

    _intake: ClipIntake

    def __init__(self, intake: ClipIntake) -> None:
        super().__init__(intake)
        self._totals: dict[str, Tensor] | None = None
        self._versions: list[int] = []  # of the totals when they were returned
        self._is_own = False  # whether the totals are of this process only

    @property
    def max_norm(self) -> float | Mapping[str, float]:
        """The bound on the norm of a row, or on each parameter's part of it, by name."""
        return self._intake.max_norm

    @property
    def passes(self) -> int | None:
        """The number of backward passes; None if it is not decided yet."""
        return self._intake.passes.count

    @property
    def rows(self) -> dict[str, Tensor]:
        """By name, the rows before clipping, if the recording keeps them."""
        return self._intake.clipped_rows

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n  clipped at {self.max_norm} in {self.describe_passes()}"

    def describe_passes(self) -> str:
        """The number of backward passes, and why it was chosen."""
        return self._intake.passes.describe()

    def clip(self, max_norm: float | None = None, per_parameter: bool = False, own: bool = False) -> dict[str, Tensor]:
        """`{name: shape}`: the clipped sum.

        Args:
            max_norm: the bound that the recording was given, or None.
            per_parameter: must be False; give `record` a bound for each parameter instead.
            own: sum over the rows of this process only, without communication.
        """
        intake = self._intake
        intake.check_finished()
        if per_parameter or max_norm not in (None, self.max_norm):
            raise PerSampleError(f"This recording has kept the sum clipped at {self.max_norm} only.")
        if self._totals is None:
            self._totals = add_all_over_processes(intake, intake.take_clipped_sum(), own)
            self._versions = [total._version for total in self._totals.values()]
            self._is_own = own
            return dict(self._totals)
        if own != self._is_own:
            raise PerSampleError(f"clip(own={self._is_own}) was called before; clip(own={own}) is no longer available.")
        if [total._version for total in self._totals.values()] != self._versions:
            raise PerSampleError("The clipped sum that clip() returned was changed in place; there is no other copy.")
        return {name: total.clone() for name, total in self._totals.items()}
