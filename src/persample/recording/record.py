"""Recording the per-sample gradients of a model that is called as usual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample.errors import PerSampleError
from persample.gradients.matrix import PerSampleGradients
from persample.recording.options import BatchDim, Chosen, Options
from persample.recording.session import Recording, refuse_unrecorded


@exclude_from_graph
@contextmanager
@skip_compilation(with_callees=False)
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Chosen | None = None,
    keep_grad: bool = False,
    keep: Literal["everything", "norms", "clip"] = "everything",
    max_norm: float | Mapping[str, float] | None = None,
    stabiliser: float | None = None,
    passes: Literal[1, 2] | None = None,
    memory: int = 2**30,
) -> Iterator[PerSampleGradients]:
    """Inside the block the model is called as usual; a backward of its loss, there or later, fills the gradients.

    `batch_dim` is the dim of the samples in the model's inputs: one number, or one for each argument, by position or
    name. `loss_reduction` says how the loss that is back-propagated was reduced over the batch, "mean" or "sum", so
    that row n is always the gradient of sample n's own loss. `parameters` restricts the recording to some, by their
    names or by a predicate of name and parameter. `p.grad` stays as it was, unless `keep_grad`. Several forward and
    backward passes in a block add up, as they do in `p.grad`.

    Under DistributedDataParallel and FSDP2 the rows are those of the samples of this process, and sums over samples are
    over those of all processes, which all have to ask for them; `keep_grad` gives `p.grad` what a plain backward pass
    would have: the mean over the processes.

    Where it is known beforehand what will be asked, `keep` says so, and each term is reduced as it arrives and freed:
    "norms", or "clip" with `max_norm`, for a memory close to that of a plain backward. The clipped sum takes one
    backward pass that keeps its factors to the end, or two `passes` that keep nothing; by default one, unless the
    factors would take more than `memory` bytes. `repr(grads)` says which it was. Two passes need the backward inside
    the block. With a `max_norm` for each parameter, by its name, each parameter's part of a row is clipped by itself.
    A `stabiliser` makes it automatic clipping: every row is scaled, to max_norm / (norm + stabiliser), not only those
    that are too long.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> with record(model) as grads:
    ...     nn.functional.cross_entropy(model(x), y).backward()
    >>> grads.norms().shape, grads.clip(1.0)["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))
    """
    options = Options(
        batch_size, batch_dim, loss_reduction, parameters, keep_grad, keep, max_norm, stabiliser, passes, memory
    )
    recording = Recording(model, options)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.before_forward(args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recording.after_forward()

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, always_call=True),
        *refuse_unrecorded(recording.recorded, recording.over, recording.collector.pulls_back),
    ]
    try:
        with recording.over.recording(recording.tracker, keep_grad), recording.tracker:
            yield recording.grads
    except PerSampleError:
        recording.undo()
        raise
    finally:
        recording.forget()
        for hook in hooks:
            hook.remove()
