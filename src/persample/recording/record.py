"""`record`: the per-sample gradients of a model that is called inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, overload

from torch import nn

from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.several_models import combine_models
from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients import (
    LossGradients,
    NonFinite,
    PerSampleGradients,
    StreamedClip,
    StreamedNorms,
    UnitIds,
    UnitReduction,
)
from persample.layouts import DivisorMode
from persample.recording.calls import Calls
from persample.recording.hooks import refuse_scripted, refuse_unrecorded
from persample.recording.options import Constants, Coupled, Keep, Model, Options, Selection, Verify
from persample.recording.session import Recording


@overload
def record(
    model: Model,
    *,
    batch_size: int | None = None,
    samples: Any = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    divisor: DivisorMode = "batch",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    constants: Constants = (),
    keep: Literal["everything"] = "everything",
    verify: Verify = None,
    coupled: Coupled = None,
    nonfinite: NonFinite = "raise",
    units: UnitIds | None = None,
    num_units: int | None = None,
    unit_reduction: UnitReduction = "sum",
    positions: int | None = None,
    losses: None = None,
) -> AbstractContextManager[PerSampleGradients]: ...


@overload
def record(
    model: Model,
    *,
    batch_size: int | None = None,
    samples: Any = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    divisor: DivisorMode = "batch",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    constants: Constants = (),
    keep: Literal["everything"] = "everything",
    losses: Sequence[str],
    verify: Verify = None,
    coupled: Coupled = None,
    nonfinite: NonFinite = "raise",
    units: UnitIds | None = None,
    num_units: int | None = None,
    unit_reduction: UnitReduction = "sum",
    positions: int | None = None,
) -> AbstractContextManager[LossGradients]: ...


@overload
def record(
    model: Model,
    *,
    batch_size: int | None = None,
    samples: Any = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    divisor: DivisorMode = "batch",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    constants: Constants = (),
    keep: Literal["norms"],
    verify: Verify = None,
    coupled: Coupled = None,
    nonfinite: NonFinite = "raise",
    units: UnitIds | None = None,
    num_units: int | None = None,
    unit_reduction: UnitReduction = "sum",
) -> AbstractContextManager[StreamedNorms]: ...


@overload
def record(
    model: Model,
    *,
    batch_size: int | None = None,
    samples: Any = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    divisor: DivisorMode = "batch",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    constants: Constants = (),
    keep: Literal["clip"],
    max_norm: float | Mapping[str, float],
    stabiliser: float | None = None,
    passes: Literal[1, 2] | None = None,
    memory: int | None = None,
    verify: Verify = None,
    coupled: Coupled = None,
    nonfinite: NonFinite = "raise",
    units: UnitIds | None = None,
    num_units: int | None = None,
    unit_reduction: UnitReduction = "sum",
) -> AbstractContextManager[StreamedClip]: ...


@exclude_from_graph
@contextmanager
@skip_compilation(with_callees=False)
def record(
    model: Model,
    *,
    batch_size: int | None = None,
    samples: Any = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    divisor: DivisorMode = "batch",
    parameters: Selection | None = None,
    keep_grad: bool = False,
    constants: Constants = (),
    keep: Keep = "everything",
    max_norm: float | Mapping[str, float] | None = None,
    stabiliser: float | None = None,
    passes: Literal[1, 2] | None = None,
    memory: int | None = None,
    verify: Verify = None,
    coupled: Coupled = None,
    nonfinite: NonFinite = "raise",
    units: UnitIds | None = None,
    num_units: int | None = None,
    unit_reduction: UnitReduction = "sum",
    positions: int | None = None,
    losses: Sequence[str] | None = None,
) -> Iterator[Any]:
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
        batch_size: the number of samples; by default all tensors in the model's arguments must agree on it.
        samples: a tensor with one row for each sample, or a nested batch of such tensors. It tells the number of
            samples before anything is called, for calls of parts of the model that are ambiguous about it.
        batch_dim: the batch dimension of the model's arguments: one number, or one for each argument, by position or
            name; None for an argument that is the same for all samples.
        loss_reduction: how the back-propagated loss combines the samples, "mean" or "sum". None: as found. A loss that
            is found to be a mean is scaled by the batch size, so that rows are gradients of the samples' own losses. A
            sum that is divided by the batch size is a mean. What is given must agree with what is found; it decides if
            the loss is a sum in one part and a mean in another.
        divisor: what is done with a divisor that counts over all samples: targets that are not ignored, the sum of a
            mask or of class weights, `num_items_in_batch`. "batch": it is held constant, so that a row is B times the
            sample's share of the loss, and the mean of the rows is the gradient that `backward` computes. "own": each
            sample's part is divided by its own number, so that rows do not depend on the rest of the batch. "refuse":
            it is an error, as in private training. `grads.loss_reduction` tells what was found: "mean over 36 targets".
        parameters: the parameters to record: names, or a predicate of name and parameter; all by default.
        keep_grad: also add to `p.grad` what a plain backward pass would add (under several processes, the mean over
            them); otherwise `p.grad` is not touched.
        constants: what is the same for all samples: tensors, and names of the model's arguments. Any other tensor from
            outside that the code around the model uses (a target, a mask, weights) has one row per sample if it has the
            batch's size in its batch dimension: `batch_dim` if that is one number, or 0.
        keep: "everything"; or, if one answer is enough, "norms" or "clip": then each term is reduced and freed when it
            arrives, and memory stays close to that of a plain backward pass.
        max_norm: with keep="clip", the bound on the norm of each row, or on each parameter's part of it, by name.
        stabiliser: with keep="clip", use automatic clipping: every row is scaled by `max_norm / (norm + stabiliser)`.
        passes: with keep="clip", the number of backward passes: one that keeps its factors to the end, or two that keep
            nothing and need `backward()` inside the block. By default one, unless its factors take more than `memory`
            bytes; `grads.passes` and `repr(grads)` say which.
        memory: see `passes`. None: half of the memory that is free when backward begins, on the host within the limits
            of its containers, or on the GPU; 1 GiB if the system does not tell.
        verify: when to run the first and the last sample alone and to compare their outputs with those of the batch,
            so that samples that are mixed out of sight are noticed. "first": in the first forward pass of a model, of
            a mode and of a form of its arguments. "always": in every forward pass; a model that cannot be verified is
            then an error. False: never. By default "first" where nobody can notice the extra passes (no hooks, no
            modes of torch, not compiled), else never. Random numbers, buffers and attributes of modules are restored.
            A model with dropout is compared without it; one that draws other random numbers for each sample, or does
            not run on one sample, is not verified; nor is one under several processes. `repr(grads)` says which.
        coupled: "contributions" accepts samples that influence each other, as by BatchNorm in training mode or in a
            contrastive loss, which have no gradients of their own. Row n is then what the gradient of the batch
            receives through sample n's own activations at each use of a weight. The rows add up to the gradient of the
            batch (under a mean loss, their mean is that gradient), and nothing else is promised. A tensor in which
            samples are mixed belongs to them row by row, along the first dimension with the batch's size. Nothing is
            verified. Without it, such models are refused.
        nonfinite: what happens to samples whose gradient is not finite. "raise": `norms()`, `clip()` and
            `clip_factors()` raise. "zero": the sample is left out, as if its gradient were zero, and the others are
            what they are without it; `grads.nonfinite_count` and `repr(grads)` tell how many there are. A gradient
            whose squared norm overflows counts, too. "keep": infinities and NaN are part of the answers.
        units: rows of units, such as users, in place of rows of samples: the unit of each sample, of shape (B,), or the
            number of consecutive samples of each unit, such as augmentations of one example. Every answer then has one
            row for each unit, in the order of the sorted ids (`grads.units`). Norms come from the same structures as
            those of samples. Under several processes, all samples of a unit must be in one of them.
        num_units: the number of rows; the ids in `units` must be numbers below it. Units without samples have rows of
            zeros, which count in means.
        unit_reduction: whether the row of a unit is the "sum" or the "mean" of its samples' gradients.
        positions: the number of positions of each sample's sequence, for `grads.by_position()`. The parts of all
            positions are kept, which takes as much memory as the activations' gradients.
        losses: names of several losses. The block then has a backward pass for each, in this order, and gives a
            `LossGradients`: rows for each sample and loss, and comparisons of the losses.

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
    options = Options(
        batch_size=batch_size,
        samples=samples,
        batch_dim=batch_dim,
        loss_reduction=loss_reduction,
        divisor=divisor,
        parameters=parameters,
        keep_grad=keep_grad,
        constants=constants,
        keep=keep,
        max_norm=max_norm,
        stabiliser=stabiliser,
        passes=passes,
        memory=memory,
        verify=verify,
        coupled=coupled,
        nonfinite=nonfinite,
        units=units,
        num_units=num_units,
        unit_reduction=unit_reduction,
        positions=positions,
        losses=losses,
    )
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
        with recording.processes.prepare_recording(recording.tracker, keep_grad), recording.tracker:
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
        self._recording.end_forward(output)

    def interrupt_call(self) -> None:
        self._recording.end_forward(None)

    def find_recording(self) -> Recording:
        return self._recording
