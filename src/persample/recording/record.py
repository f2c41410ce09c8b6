"""`record`: the per-sample gradients of a model that is called inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, overload

from torch import nn

from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, StreamedClip, StreamedNorms
from persample.recording.options import Keep, Options, Selection
from persample.recording.session import Recording, refuse_unrecorded


@overload
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    keep: Literal["everything"] = "everything",
) -> AbstractContextManager[PerSampleGradients]: ...


@overload
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    keep: Literal["norms"],
) -> AbstractContextManager[StreamedNorms]: ...


@overload
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    keep: Literal["clip"],
    max_norm: float | Mapping[str, float],
    stabiliser: float | None = None,
    passes: Literal[1, 2] | None = None,
    memory: int = 2**30,
) -> AbstractContextManager[StreamedClip]: ...


@exclude_from_graph
@contextmanager
@skip_compilation(with_callees=False)
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    keep: Keep = "everything",
    max_norm: float | Mapping[str, float] | None = None,
    stabiliser: float | None = None,
    passes: Literal[1, 2] | None = None,
    memory: int = 2**30,
) -> Iterator[Any]:
    """Record per-sample gradients: call the model inside the block as usual, and `backward()` there or later.

    Row n of the recorded gradients is the gradient of sample n's own loss. Several forward and backward passes in one
    block add up, as they do in `p.grad`.

    Under DistributedDataParallel and FSDP2 the rows are those of this process's samples. Sums over samples are over all
    processes, which all have to ask for them.

    Args:
        model: the model; it stays as it is.
        batch_size: the number of samples; by default all tensors in the model's arguments must agree on it.
        batch_dim: the batch dimension of the model's arguments: one number, or one for each argument, by position or
            name; None for an argument that is the same for all samples.
        loss_reduction: how the back-propagated loss combines the samples, "mean" or "sum".
        parameters: the parameters to record: names, or a predicate of name and parameter; all by default.
        keep_grad: also add to `p.grad` what a plain backward pass would add (under several processes, the mean over
            them); otherwise `p.grad` is not touched.
        keep: "everything"; or, if one answer is enough, "norms" or "clip": then each term is reduced and freed when it
            arrives, and memory stays close to that of a plain backward pass.
        max_norm: with keep="clip", the bound on the norm of each row, or on each parameter's part of it, by name.
        stabiliser: with keep="clip", use automatic clipping: every row is scaled by `max_norm / (norm + stabiliser)`.
        passes: with keep="clip", the number of backward passes: one that keeps its factors to the end, or two that keep
            nothing and need `backward()` inside the block. By default one, unless its factors take more than `memory`
            bytes; `repr(grads)` says which.
        memory: see `passes`.

    Raises:
        PerSampleError: an option is wrong, or the model cannot be recorded; the message names the place.
        SamplesMixed: samples of the batch were combined, so that no sample has a gradient of its own.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> with record(model) as grads:
    ...     nn.functional.cross_entropy(model(x), y).backward()
    >>> grads.norms().shape, grads.clip(1.0)["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))
    """
    options = Options(
        batch_size=batch_size,
        batch_dim=batch_dim,
        loss_reduction=loss_reduction,
        parameters=parameters,
        keep_grad=keep_grad,
        keep=keep,
        max_norm=max_norm,
        stabiliser=stabiliser,
        passes=passes,
        memory=memory,
    )
    recording = Recording(model, options)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.start_forward(args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recording.end_forward()

    collector = recording.collector
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, always_call=True),
        *refuse_unrecorded(recording.recorded, recording.processes, lambda: collector.is_pulling_back),
    ]
    try:
        with recording.processes.prepare_recording(recording.tracker, keep_grad), recording.tracker:
            yield recording.grads
    except PerSampleError:
        recording.undo_forward()
        raise
    finally:
        recording.close()
        for hook in hooks:
            hook.remove()
