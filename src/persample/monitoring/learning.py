"""`dynamics`: how each example is learnt in a training run, as the columns of a scan, without another pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from persample import _torch
from persample._internal.options import show_options
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, RecordedGradients
from persample.monitoring.attempt import Attempt, Ids
from persample.monitoring.curves import Curves
from persample.monitoring.measurement import ExampleId
from persample.monitoring.steps import MeasuredSteps, StepOptions, check_ids
from persample.recording import Model, Options

if TYPE_CHECKING:
    from persample.scanning import Scan

Found = tuple[Sequence[ExampleId], Tensor, Tensor]  # ids, norms and cosines of a step


@show_options(Options, StepOptions)
def dynamics(model: Model, *, every: int = 1, **options: Unpack[StepOptions]) -> Dynamics:
    """Measure how each example is learnt: margins (AUM), forgetting, data maps, coherence of gradients.

    The loop, the model and `p.grad` stay as they are. Set `dynamics.ids` before each call of the model, and call
    `dynamics.note(logits, labels)` with its outputs. `write` makes a scan of what was found.

    Args:
        model: the model that is trained.
        every: how many calls of the model go by until the gradients of one are measured. Outputs count in every call.
        **options: as in `record`.

    Fewer `parameters` cost less.

    >>> model = torch.nn.Linear(3, 2)
    >>> x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> with dynamics(model) as found:
    ...     for _ in range(3):
    ...         found.ids = range(6)
    ...         logits = model(x)
    ...         found.note(logits, y)
    ...         torch.nn.functional.cross_entropy(logits, y).backward()
    >>> sorted(found.columns())[:3]
    ['aum', 'coherence', 'confidence']
    """
    return Dynamics(model, every, options)


class Dynamics(MeasuredSteps[Found]):
    """The result of `dynamics`. `stop()`, or the end of a `with` block, ends it.

    Attributes:
        ids: the ids of the samples of the next call of the model; set it before the call.
        step: the number of calls of the model in training mode so far. It can be set, to the step of a trainer.

    >>> model = torch.nn.Linear(3, 2)
    >>> with dynamics(model) as found:
    ...     found.ids = ["a", "b"]
    ...     logits = model(torch.randn(2, 3))
    ...     found.note(logits, torch.tensor([0, 1]))
    ...     logits.square().mean().backward()
    >>> found.seen, found.columns()["norm"].shape
    (['a', 'b'], torch.Size([2]))
    """

    def __init__(self, model: Model, every: int, options: StepOptions) -> None:
        super().__init__(model, every, {**options, "keep": "everything", "nonfinite": "zero"})
        self._curves = Curves()
        self._last_ids: Ids = None

    def note(self, logits: Tensor, labels: Tensor) -> None:
        """Take the outputs of the last call of the model, and the labels of its examples.

        Args:
            logits: `(batch, classes)`.
            labels: `(batch,)`.
        """
        if self._last_ids is None:
            raise PerSampleError("note() needs the ids of the examples: set `ids` before the model is called.")
        with _torch.DisableTorchFunction():  # no part of the step, which the recording follows
            self._curves.note(self._last_ids, logits, labels)

    def columns(self) -> dict[str, Tensor]:
        """`{name: (examples,)}`: what was found about the examples, in the order of `seen`."""
        self.keep_result()
        return self._curves.compute_columns()

    @property
    def seen(self) -> list[ExampleId]:
        """The ids of the examples that were seen."""
        return self._curves.ids

    def write(self, directory: str | Path, classes: Sequence[str] | None = None) -> Scan:
        """Write what was found as a scan, for `persample report`, `persample query` and `persample.Scan`.

        The examples have the order of their ids if these are the numbers from 0 on, as of a dataset; else that in which
        they were seen, with the ids as their names. Needs `pip install 'persample[scan]'`.

        Args:
            directory: an empty or a new directory.
            classes: the names of the classes.
        """
        from persample.scanning import write_columns

        columns, ids = self.columns(), self.seen
        names = None
        if {*ids} == {*range(len(ids))}:
            order = torch.tensor(ids).argsort()
            columns = {name: column[order] for name, column in columns.items()}
        else:
            names = [str(i) for i in ids]
        return write_columns(directory, {name: column.numpy() for name, column in columns.items()}, names, classes)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        self.keep_result()
        return {"step": self.step, "curves": self._curves.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.step = state["step"]
        self._curves.load_state_dict(state["curves"])

    def note_call(self, ids: Ids) -> None:
        self._last_ids = ids

    def measure(self, grads: RecordedGradients, attempt: Attempt[Found]) -> Found | None:
        """Compare the gradient of each sample with the sum of the others."""
        ids = check_ids(attempt.ids, grads.row_count)
        if not isinstance(grads, PerSampleGradients):
            raise PerSampleError("The step was recorded by something else, such as private training, without its rows.")
        if ids is None:
            return None
        return ids, grads.norms(), compute_coherence(grads)

    def keep(self, found: Found, attempt: Attempt[Found]) -> None:
        """Add a step to the columns."""
        self._curves.note_gradients(*found)


def compute_coherence(grads: PerSampleGradients) -> Tensor:
    """`(batch,)`: the cosine of each row with the sum of the others; 0 if one of them is zero.

    With s the sum of the rows, g · (s - g) = g · s - |g|², and |s - g|² = |s|² - 2 g · s + |g|².
    """
    total = grads.sum(own=True)
    squared = sum((part.double().square().sum() for part in total.values()), torch.zeros((), dtype=torch.float64))
    dots, squares = grads.dot(total).double(), grads.norms().double().square()
    lengths = (squares * (squared - 2 * dots + squares).clamp(min=0)).sqrt()
    return ((dots - squares) / lengths).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-1, 1)
