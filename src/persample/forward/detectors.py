"""What watches the calls of a recording beside the steps that follow them: one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from persample.distributed import Processes
from persample.errors import Complain
from persample.forward.known import ForwardPass
from persample.layouts import Call, Motion, Where

if TYPE_CHECKING:
    from persample.forward.mode import FollowMode
    from persample.forward.outside import OutsideTensors
    from persample.forward.path import Path, Progress


Hook = Callable[..., Any]


class Context(ForwardPass, Protocol):
    """What detectors and the steps' helpers may ask about the forward pass; the tracker provides it."""

    outside: OutsideTensors | None
    processes: Processes
    mode: FollowMode
    progress: Progress
    path: Path
    detectors: Detectors
    is_isolated: bool

    @property
    def model(self) -> nn.Module | None:
        """The module whose forward is followed."""

    @property
    def is_inside(self) -> bool:
        """Whether a call of the model runs."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is followed any more."""

    @property
    def complain(self) -> Complain | None:
        """Takes refusals in place of raising them."""

    def find_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, by its memory if an audit is running."""

    def find_known_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, as far as torch functions show it."""

    def set_layout(self, tensor: Tensor, layout: Where | None) -> None:
        """Set where the samples lie in a tensor."""

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that does not depend on the batch is a parameter, or computed from parameters."""


class Detector:
    """Watches a recording, and may refuse what it sees. The methods are in the order in which they are called first.

    By default, each of them does nothing.

    Attributes:
        wraps_calls: whether the calls of the code around the model go through `run_outside` and `read_attribute`.
    """

    wraps_calls = False

    def start(self, context: Context) -> None:
        """A recording begins."""

    def note_given(self, tensor: Tensor) -> None:
        """A tensor of samples comes from outside the model."""

    def start_call(self, context: Context) -> None:
        """The model is about to be called."""

    def prepare(self, call: Call, context: Context) -> Call:
        """Return the call to run in place of one with samples that is about to run."""
        return call

    def check_motion(self, call: Call, motion: Motion, context: Context) -> None:
        """A call moves the samples as `motion` says."""

    def after(self, call: Call, result: Any, context: Context) -> None:
        """A call has run."""

    def check_function(self, tensor: Tensor, layout: Where, context: Context) -> None:
        """A tensor with samples was made by an `autograd.Function`."""

    def read_attribute(self, func: Any, args: tuple[Any, ...], result: Any, context: Context) -> Any:
        """Return what the user gets who reads an attribute or a size of a tensor."""
        return result

    def end_call(self, has_failed: bool, context: Context) -> None:
        """The call of the model has ended."""

    def run_outside(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context, run: Callable[..., Any]
    ) -> Any:
        """Run a call of the code around the model by `run`."""
        return run(func, args, kwargs, context)

    def note_error(self, error: Exception, func: Any, args: Any, kwargs: Any, context: Context) -> None:
        """A call has raised an error; for detectors that wrap calls."""

    def before_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], context: Context) -> None:
        """A backward pass is about to start from `outputs`, with these gradients of them if they are given."""

    def restore(self, context: Context) -> None:
        """The forward pass was refused: undo what it has changed."""

    def end(self, context: Context) -> None:
        """The recording has ended."""


class Detectors:
    """The detectors of a recording: for each event, the methods of those that watch it, in the order of the detectors.

    Args:
        detectors: at most one of them may wrap calls.

    Attributes:
        outer: the one that wraps calls, if any.
    """

    def __init__(self, detectors: Sequence[Detector]) -> None:
        def find(hook: Hook) -> list[Hook]:
            name = hook.__name__
            return [getattr(each, name) for each in detectors if getattr(type(each), name) is not hook]

        self.outer = next((each for each in detectors if each.wraps_calls), None)
        self.start = find(Detector.start)
        self.note_given = find(Detector.note_given)
        self.start_call = find(Detector.start_call)
        self.prepare = find(Detector.prepare)
        self.check_motion = find(Detector.check_motion)
        self.after = find(Detector.after)
        self.check_function = find(Detector.check_function)
        self.end_call = find(Detector.end_call)
        self.before_backward = find(Detector.before_backward)
        self.restore = find(Detector.restore)
        self.end = find(Detector.end)
