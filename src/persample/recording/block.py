"""`record`: the per-sample gradients of a model that is called inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Unpack, overload

from torch import nn

from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.models import combine_models
from persample._internal.options import make_options, show_options
from persample.errors import PerSampleError
from persample.gradients import LossGradients, PerSampleGradients, StreamedClip, StreamedNorms
from persample.recording.hooks import Calls, refuse_scripted, refuse_unrecorded
from persample.recording.options import ClipOptions, CommonOptions, Model, Options, RecordOptions
from persample.recording.session import Recording


@overload
def record(
    model: Model,
    *,
    keep: Literal["everything"] = "everything",
    losses: None = None,
    positions: int | None = None,
    **options: Unpack[CommonOptions],
) -> AbstractContextManager[PerSampleGradients]: ...


@overload
def record(
    model: Model,
    *,
    keep: Literal["everything"] = "everything",
    losses: Sequence[str],
    positions: int | None = None,
    **options: Unpack[CommonOptions],
) -> AbstractContextManager[LossGradients]: ...


@overload
def record(
    model: Model, *, keep: Literal["norms"], **options: Unpack[CommonOptions]
) -> AbstractContextManager[StreamedNorms]: ...


@overload
def record(
    model: Model, *, keep: Literal["clip"], max_norm: float | Mapping[str, float], **options: Unpack[ClipOptions]
) -> AbstractContextManager[StreamedClip]: ...


@exclude_from_graph
@show_options(Options, RecordOptions)
def record(model: Model, **options: Any) -> AbstractContextManager[Any]:
    """Record per-sample gradients: call the model inside the block as usual, and `backward()` there or later.

    Everything inside the block that uses the parameters is recorded: calls of the model and of its submodules, methods
    such as `model.encode(x)`, and functions of the parameters themselves.

    Row n of the recorded gradients is the gradient of sample n's own loss. Several forward and backward passes in one
    block add up, as they do in `p.grad`.

    Under DistributedDataParallel and FSDP2 the rows are those of this process's samples. Sums over samples are over all
    processes, which all have to ask for them.

    Args:
        model: the model; it stays as it is. Or several models, as a list or a dict: the names of their parameters then
            begin with the model's number or name, as in "0.weight" and "actor.weight".
        **options: see `Options`.

    Raises:
        PerSampleError: an option is wrong, or the model cannot be recorded; the message names the place.
        SamplesMixed: samples of the batch were combined, so that no sample has a gradient of its own; or the output of
            a sample alone differs from its output in the batch.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> with record(model) as grads:
    ...     nn.functional.cross_entropy(model(x), y).backward()
    >>> grads.norms().shape, grads.clip(1.0)["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))
    """
    return _record(model, make_options(Options, "record", options, RecordOptions))


@exclude_from_graph
@contextmanager
@skip_compilation(with_callees=False)
def _record(model: Model, options: Options) -> Iterator[Any]:
    model = combine_models(model)
    refuse_scripted(model)
    recording = Recording(model, options)

    collector, recorded = recording.collector, recording.recorded
    calls = _BlockCalls(recording)
    calls.add_hooks(model, {*map(id, recorded.values())})
    refusals = []
    if recording.needs_hooks:
        refusals = refuse_unrecorded(recorded, recording.processes, lambda: collector.is_pulling_back)
    try:
        with recording.processes.prepare_recording(recording.tracker, options.keep_grad), recording.tracker:
            yield recording.grads
    except PerSampleError:
        recording.undo_forward()
        raise
    finally:
        recording.close()
        calls.remove_hooks()
        for refusal in refusals:
            refusal.remove()


class _BlockCalls(Calls):
    """The calls inside a block."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def start_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._recording.start_call(module, args, kwargs)

    def end_call(self, output: Any) -> None:
        self._recording.end_call(output)

    def interrupt_call(self) -> None:
        self._recording.end_call(None)

    def find_recording(self) -> Recording:
        return self._recording
